"""Who asks for slopes."""

import torch
from torch.func import grad, jvp, vmap

from sparsefn.engine.slopes import SLOPES, differentiated


def test_who_asks_for_slopes():
    seen = []

    def note(x):
        seen.append(differentiated(x))
        return x.sum()

    x = torch.ones(2)
    note(x)
    vmap(note)(x)
    grad(note)(x)
    vmap(grad(note))(torch.ones(2, 2))
    jvp(note, (x,), (x,))
    note(x.clone().requires_grad_())
    assert seen == [False, False, True, True, True, True]
    assert torch.compile(lambda x: x + differentiated(x), backend="eager", fullgraph=True)(x).tolist() == [2.0, 2.0]


def test_slopes_are_constants_where_functions_end():
    x = torch.tensor([0.0, -1e3, 1e3], dtype=torch.float64)
    for name, fn in SLOPES.items():
        value = torch.ones_like(x)
        assert fn(x, torch.full_like(x, 2.0), value).isfinite().all(), name
