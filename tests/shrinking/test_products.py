"""Products of programs: their FLOPs are those of torch's counter, and their factors the
leaves that they read whole.
"""

import pytest
import torch
from torch import nn

from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.products import products
from sparsefn.shrinking.traced import traced
from tests.shrinking.cost_counts import flops_of


class Of(nn.Module):
    """A function of the input and of one parameter."""

    def __init__(self, shape, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.w)


def found(shape, function, x):
    model = Of(shape, function).eval()
    some = products(analyse(traced(model, x)))
    return (
        sum(product.flops for product in some),
        flops_of(model, (x,)),
        [product.leaves for product in some],
    )


X = torch.ones(2, 5, 4)


@pytest.mark.deep(but=["shape0-*", "shape4-*", "shape14-*"])
@pytest.mark.parametrize(
    ("shape", "function", "leaves"),
    [
        ((4, 3), lambda x, w: x @ w, [("w",)]),
        ((3, 4), lambda x, w: x @ w.T, [("w",)]),
        ((3, 4), lambda x, w: x @ (2 * w).T, [()]),
        ((6, 4), lambda x, w: x @ w[:3].T, [()]),
        ((2, 4, 3), torch.bmm, [("w",)]),
        ((2, 5, 3), lambda x, w: torch.baddbmm(w, x, torch.ones(2, 4, 3)), [()]),
        ((4, 3), lambda x, w: torch.addmm(torch.ones(3), x[0], w), [("w",)]),
        ((4, 3), lambda x, w: torch.einsum("bti,io->bto", x, w), [("w",)]),
        ((4, 3), lambda x, w: torch.einsum("...i,io", x, w), [("w",)]),
        (
            (4, 3),
            lambda x, w: torch.einsum("bti,io,o->bt", x, w, torch.ones(3)),
            [("w",), ()],
        ),
        ((7, 4), lambda x, w: torch.einsum("bti,ai->ti", x, w), []),
        ((7, 4, 3), lambda x, w: torch.einsum("bti,aio->to", x, w), [()]),
        ((4,), lambda x, w: torch.einsum("bti,i->bti", x, w), []),
        ((5, 7, 3), lambda x, w: nn.functional.conv1d(x, w[:, :5]), [()]),
        ((7, 5, 3), nn.functional.conv1d, [("w",)]),
        ((5, 2, 3), nn.functional.conv_transpose1d, [("w",)]),
        (
            (2, 5, 4),
            lambda x, w: nn.functional.scaled_dot_product_attention(
                w[None], x[None], x[None]
            ),
            [(), ()],
        ),
    ],
)
def test_products_count_as_torch_counts_them(shape, function, leaves):
    mine, counted, factors = found(shape, function, X)
    assert mine == counted
    assert factors == leaves


def test_products_with_vectors_and_bilinear_layers_count_where_torch_leaves_them_out():
    mine, counted, factors = found((4,), lambda x, w: x[0] @ w, X)
    assert (mine, counted, factors) == (2 * 5 * 4, 0, [("w",)])
    mine, counted, factors = found(
        (3, 4, 4), lambda x, w: nn.functional.bilinear(x, x, w), X
    )
    assert (mine, counted, factors) == (2 * 10 * (3 * 4 * 4 + 3 * 4), 0, [("w",), ()])


def test_einsum_goes_along_the_path_that_it_is_given():
    def chained(path):
        return lambda x, w: torch.ops.aten.einsum(
            "ti,io,ok->tk", [x[0], w, torch.ones(3, 1)], path=path
        )

    assert found((4, 3), chained(None), X)[0] == 2 * (5 * 4 * 3 + 5 * 3)
    assert found((4, 3), chained([1, 2, 0, 1]), X)[0] == 2 * (4 * 3 + 5 * 4)


def test_recurrent_layers_multiply_at_every_step():
    model, x = (
        nn.LSTM(4, 3, num_layers=2, bidirectional=True).eval(),
        torch.ones(5, 2, 4),
    )
    some = products(analyse(traced(model, x)))
    assert sum(product.flops for product in some) == 2 * 10 * sum(
        w.numel() for w in model.parameters() if w.ndim == 2
    )
    assert some[0].leaves == ("weight_ih_l0",)
