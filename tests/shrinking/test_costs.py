"""Products of programs: their FLOPs are those of torch's counter, and their factors the
leaves that they read whole.
Costs of cuts: parameters as tensors have them, FLOPs as torch counts them for the
smaller program, bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsefn as sf
from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.costs import cost, distinct, parameters, terms_of
from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.program import program
from sparsefn.shrinking.trace import traced
from sparsefn.shrinking.values import opname, values_in
from tests.shrinking.cost_counts import flops_of, params_of_cut, some_units
from tests.shrinking.networks import networks
from tests.shrinking.zoo import MODELS


class Of(nn.Module):
    """A function of the input and of one parameter."""

    def __init__(self, shape, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.w)


def found(shape, function, x):
    model = Of(shape, function).eval()
    some = analyse(traced(model, x)).book.products
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
    some = analyse(traced(model, x)).book.products
    assert sum(product.flops for product in some) == 2 * 10 * sum(
        w.numel() for w in model.parameters() if w.ndim == 2
    )
    assert some[0].leaves == ("weight_ih_l0",)


OTHER = {"einsum", "bilinear", "mv", "dot"}  # what torch counts in part, or not at all
SOME = (
    "mobilenet v2",
    "shufflenet v2",
    "densenet",
    "unet with transposed convolutions",
    "grouped queries",
    "lstm classifier",
)


@pytest.mark.deep
@settings(max_examples=30, deadline=None)
@given(networks(), st.integers(0, 99))
def test_costs_of_random_networks_are_those_of_the_tensors_and_of_the_smaller_program(
    drawn, seed
):
    model, example = drawn
    found = groups(model, example)
    cut = found.cut(some_units(found, seed))
    assert cost(cut) == params_of_cut(cut)
    assert cost(cut, "bytes") == 8 * params_of_cut(cut)
    names = {
        opname(node)
        for node in found.analysis.graph.graph.nodes
        if node.op == "call_function"
    }
    counted = flops_of(program(cut), example)
    assert (
        cost(cut, "flops") >= counted
        if names & OTHER
        else cost(cut, "flops") == counted
    )


@pytest.mark.deep(but=["mobilenet v2", "grouped queries"])
@pytest.mark.parametrize("name", SOME)
def test_costs_of_known_families(name):
    model, example = MODELS[name]()
    found = groups(model, example)
    assert found.cost(unit="flops") == flops_of(model, example)
    assert found.cost() == sum(x.numel() for x in model.parameters())
    gone = some_units(found, 1)
    cut = found.cut(gone)
    assert found.cost(gone) == params_of_cut(cut) < found.cost()
    assert (
        found.cost(gone, "flops")
        == flops_of(program(cut), example)
        < found.cost(unit="flops")
    )


def test_flops_are_those_of_the_report():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 2, 2, stride=2)
    ).eval()
    x = torch.ones(3, 4, 6, 6)
    reported = sf.report.flops(
        model, sf.dense().init(sf.modules.params_of(model)), x
    ).total.dense
    assert groups(model, x).cost(unit="flops") == reported


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.unread = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(5, 7),
        )
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.again(self.first(x))


def test_a_shared_parameter_counts_once_its_products_twice_and_an_unread_one_too():
    found = groups(Shared().eval(), torch.ones(2, 4))
    assert found.cost() == 16 + 4 + 4 + 35 + 7
    assert found.cost(unit="flops") == 2 * (2 * 2 * 4 * 4)
    assert set(parameters(found.analysis)) == {
        *("first.weight", "first.bias", "again.bias"),
        *("unread.weight", "unread.bias"),
    }


def test_bytes_have_the_dtype_of_each_parameter_or_so_many_bits_and_a_mask():
    model = nn.Sequential(
        nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)
    ).eval()
    found = groups(model, torch.ones(1, 8))
    gone = {0: [0, 1]}
    left = 4 * 8 + 4 + 3 * 4
    assert found.cost(gone, "bytes") == 4 * left
    assert found.cost(gone, "bytes", bits=8) == left
    assert found.cost(gone, "bytes", bits=3) == (3 * left + 7) // 8
    assert (
        found.cost(gone, "bytes", bits=16, compressed=True)
        == 2 * left + 48 // 8 + 1 + 3
    )
    model[0].half()
    assert cost(found.cut(gone), "params") == left


def test_terms_are_worked_out_once_and_labels_are_told_apart_by_what_they_hold():
    found = groups(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(),
        torch.ones(1, 3),
    )
    terms = terms_of(found.analysis, "flops")
    assert terms is terms_of(found.analysis, "flops")
    assert len(terms.labels) == 1
    assert terms.value([4]) == 2 * 12 + 2 * 8
    assert terms.value([1]) == 2 * 3 + 2 * 2
    assert (
        len(distinct(values_in(found.analysis.leaves), found.analysis.book.atoms)) == 1
    )


def test_units_that_there_are_not_are_refused():
    found = groups(nn.Linear(3, 4).eval(), torch.ones(1, 3))
    with pytest.raises(
        ValueError, match="expected unit to be 'params', 'flops' or 'bytes', got 'macs'"
    ):
        found.cost(unit="macs")
    with pytest.raises(
        ValueError,
        match="bits= and compressed= are for unit='bytes', got unit='params'",
    ):
        found.cost(bits=8)
    with pytest.raises(
        ValueError, match="bits= and compressed= are for unit='bytes', got unit='flops'"
    ):
        found.cost(unit="flops", compressed=True)
    with pytest.raises(ValueError, match="expected bits >= 1, got 0"):
        found.cost(unit="bytes", bits=0)
