"""Derivatives of elementary functions."""

import torch

from sparsefn.engine.slopes import SLOPES


def test_slopes_are_constants_where_functions_end():
    x = torch.tensor([0.0, -1e3, 1e3], dtype=torch.float64)
    for name, fn in SLOPES.items():
        value = torch.ones_like(x)
        assert fn(x, torch.full_like(x, 2.0), value).isfinite().all(), name
