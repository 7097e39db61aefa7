"""`linear_pair`: one weight forwards, another backwards."""

import pytest
import torch
from torch.func import grad, vjp, vmap
from torch.nn.functional import linear

import sparsefn as sf


def draws(*shapes, dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients(leading, biased):
    x, fwd, bwd, bias, dy = draws((*leading, 4), (3, 4), (3, 4), (3,), (*leading, 3))
    bias = bias if biased else None
    args = (x, fwd, bwd, bias) if biased else (x, fwd, bwd)
    y, pull = vjp(sf.masks.linear_pair, *args)
    assert torch.equal(y, linear(x, fwd, bias))
    dx, dw, none, *rest = pull(dy)
    torch.testing.assert_close(dx, dy @ bwd)
    torch.testing.assert_close(dw, dy.reshape(-1, 3).T @ x.reshape(-1, 4))
    assert not none.any()
    if biased:
        torch.testing.assert_close(rest[0], dy.reshape(-1, 3).sum(0))


def test_with_one_weight_twice_it_is_a_linear_layer():
    x, w, bias = draws((5, 4), (3, 4), (3,))
    ours = grad(
        lambda x, w, b: sf.masks.linear_pair(x, w, w, b).square().sum(), (0, 1, 2)
    )(x, w, bias)
    theirs = grad(lambda x, w, b: linear(x, w, b).square().sum(), (0, 1, 2))(x, w, bias)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def loss(x, fwd, bwd, bias):
    return sf.masks.linear_pair(x, fwd, bwd, bias).square().sum()


def test_under_vmap_autograd_and_compiled_code():
    x, fwd, bwd, bias = draws((2, 5, 4), (2, 3, 4), (2, 3, 4), (2, 3))
    slopes = grad(loss, (0, 1, 3))
    each = [slopes(*row) for row in zip(x, fwd, bwd, bias, strict=True)]
    for both, one, other in zip(vmap(slopes)(x, fwd, bwd, bias), *each, strict=True):
        torch.testing.assert_close(both, torch.stack([one, other]))
    leaves = [leaf[0].clone().requires_grad_() for leaf in (x, fwd, bwd, bias)]
    loss(*leaves).backward()
    assert leaves[2].grad is None
    for leaf, slope in zip([leaves[0], leaves[1], leaves[3]], each[0], strict=True):
        assert torch.equal(leaf.grad, slope)
    # torch ignores custom functions in compiled gradients of torch.func.
    compiled = torch.compile(slopes, fullgraph=True, backend="aot_eager")(
        x[0], fwd[0], bwd[0], bias[0]
    )
    for ours, eager in zip(compiled, each[0], strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_training_step_with_both_products_sparse():
    x, weight = draws((8, 4), (8, 4))
    along = {
        name: sf.patterns.nm(2, 4, axis)
        for name, axis in (("inputs", 1), ("outputs", 0))
    }

    def through(w):
        masks = {
            name: sf.masks.topk_mask(w.abs(), None, pattern=pattern)
            for name, pattern in along.items()
        }
        kept = {
            name: torch.where(mask, w, 0.0).detach() for name, mask in masks.items()
        }
        return (
            sf.masks.linear_pair(
                x, sf.masks.straight_through(kept["inputs"], w), kept["outputs"]
            )
            .square()
            .sum()
        )

    slope = grad(through)(weight)
    kept = torch.where(
        sf.masks.topk_mask(weight.abs(), None, pattern=along["inputs"]), weight, 0.0
    )
    torch.testing.assert_close(slope, 2 * linear(x, kept).T @ x)


def test_weights_of_two_shapes_are_an_error():
    x, fwd, bwd = draws((5, 4), (3, 4), (4, 3))
    with pytest.raises(
        ValueError,
        match=r"linear_pair: expected two weights of one shape .* got \(3, 4\) and "
        r"\(4, 3\)",
    ):
        sf.masks.linear_pair(x, fwd, bwd)
