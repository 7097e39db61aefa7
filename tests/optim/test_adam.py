"""Adam over the memory of plain leaves has the bits that torch has leaf by leaf, under
vmap and in graphs.
"""

import math

import optree
import pytest
import torch

import sparsefn.optim as O

ADAMS = [
    lambda lr: O.adam(lr),
    lambda lr: O.adam(lr, betas=(0.0, 0.5), eps=0.0, weight_decay=0.3),
    lambda lr: O.adamw(lr, eps=1e-30, weight_decay=0.3),
]


@pytest.mark.deep
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", ADAMS)
def test_the_pass_over_memory_has_the_bits_of_torch(make, threads):
    # Outside transforms float32 leaves are computed in blocks of their memory, under
    # vmap by torch.
    draw = torch.Generator().manual_seed(3)
    odd = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-40, 1e-20, 3e38, -3e38, math.inf, -math.inf, math.nan]
    )
    shapes = {
        "large": (1100, 1000),
        "odd": (70001,),
        "small": (3,),
        "none": (0, 4),
        "number": (),
    }
    params = {
        path: torch.randn(shape, generator=draw) for path, shape in shapes.items()
    }
    params["other"] = torch.randn(30, 20, generator=draw).T
    params["double"] = torch.randn(9, generator=draw, dtype=torch.float64)
    params["half"] = torch.randn(9, generator=draw).bfloat16()
    grads = {
        path: leaf.flip(0) if leaf.ndim else leaf * 2 for path, leaf in params.items()
    }
    grads["odd"] = odd[torch.randint(0, len(odd), (70001,), generator=draw)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    optimizer = make(0.01)
    state = optimizer.init(params)
    try:
        for _ in range(3):
            batched = torch.vmap(lambda g, s, p: optimizer.update(g, s, params=p))
            want = batched(
                *(
                    optree.tree_map(lambda x: x[None], tree)
                    for tree in (grads, state, params)
                )
            )
            updates, state = optimizer.update(grads, state, params=params)
            rows = zip(
                optree.tree_leaves((updates, state)),
                optree.tree_leaves(want),
                strict=True,
            )
            for got, (expected,) in rows:
                assert got.dtype == expected.dtype and got.shape == expected.shape
                assert torch.equal(got.isnan(), expected.isnan())
                got, expected = (
                    x.nan_to_num(7.0, math.inf, -math.inf) for x in (got, expected)
                )
                assert torch.equal(got, expected) and torch.equal(
                    got.signbit(), expected.signbit()
                )
    finally:
        torch.set_num_threads(before)


def test_adam_is_differentiable_in_gradients_and_rates():
    def stepped(scale, rate):
        optimizer = O.adam(rate)
        params = {"w": torch.ones(5)}
        grads = {"w": scale * torch.arange(1.0, 6.0)}
        return optimizer.update(grads, optimizer.init(params), params=params)[0][
            "w"
        ].sum()

    one, rate = torch.tensor(1.0), torch.tensor(0.5)
    assert torch.func.grad(stepped, argnums=1)(one, rate).item() == pytest.approx(-5)
    by_graph = [x.clone().requires_grad_() for x in (one, rate)]
    stepped(*by_graph).backward()
    assert by_graph[1].grad.item() == pytest.approx(-5) and by_graph[0].grad is not None
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rate, one)
        assert torch.autograd.forward_ad.unpack_dual(
            stepped(one, dual)
        ).tangent.item() == pytest.approx(-5)
