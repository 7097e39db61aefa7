"""Products of programs: their FLOPs are those of torch's counter, and their factors the
leaves that they read whole.
Costs of cuts: parameters as tensors have them, FLOPs as torch counts them for the
smaller program, bytes.

Costs by kept units are those of cuts with so many units, whichever they are; of
weights those of the report.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsefn as sf
from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.plan import cost, distinct, parameters, terms_of, weights
from sparsefn.shrinking.rebuild import program
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
    some = analyse(traced(model, x)).log.products
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
    some = analyse(traced(model, x)).log.products
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
        len(distinct(values_in(found.analysis.leaves), found.analysis.log.channels))
        == 1
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
    for wrong, got in ((8.0, "float"), (True, "bool")):
        with pytest.raises(
            TypeError, match=f"^within: expected bits to be an int, got {got}$"
        ):
            found.cost(unit="bytes", bits=wrong)
    with pytest.raises(ValueError, match="^within: expected bits >= 1, got 0$"):
        found.cost(unit="bytes", bits=0)


UNITS = "params", "flops", "bytes"


@pytest.mark.deep
@settings(max_examples=30, deadline=None)
@given(networks(), st.integers(0, 99))
def test_costs_by_kept_units_are_those_of_any_cut_or_the_most_of_them(drawn, seed):
    found = groups(*drawn)
    gone = some_units(found, seed)
    kept = [group.size - len(gone[i]) for i, group in enumerate(found)]
    for unit in UNITS:
        made = found.priced(unit, None, False, range(len(found)))
        assert made.cost(kept) >= found.cost(gone, unit)
        assert made.cost(list(made.sizes.values())) == found.cost(unit=unit)
        for i in range(len(kept)):
            more = [min(n + (i == j), found[j].size) for j, n in enumerate(kept)]
            assert made.cost(more) >= made.cost(kept)


@pytest.mark.deep(but=["resnet bottleneck"])
@pytest.mark.parametrize(
    "name",
    [
        "resnet bottleneck",
        "resnext",
        "mobilenet v2",
        "densenet",
        "grouped queries",
        "falcon",
    ],
)
def test_they_are_exact_where_units_are_alike(name):
    found = groups(*MODELS[name]())
    for unit in UNITS:
        made = found.priced(unit, None, False, range(len(found)))
        for seed in range(3):
            gone = some_units(found, seed)
            kept = [group.size - len(gone[i]) for i, group in enumerate(found)]
            assert made.cost(kept) == found.cost(gone, unit)


class Twice(nn.Module):
    """The next layer reads two of the channels twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(6, 2)

    def forward(self, x):
        y = self.one(x)
        return self.two(torch.cat([y, y[..., :2]], -1))


def test_unlike_units_cost_the_most_that_so_many_can():
    found = groups(Twice().eval(), torch.ones(1, 3))
    made = found.priced("params", None, False, None)
    (size,) = made.sizes.values()
    for kept in range(1, size + 1):
        cuts = [
            [i for i in range(size) if i not in some] for some in _choices(size, kept)
        ]
        most = max(found.cost({0: gone}) for gone in cuts)
        # fewer may leave the slice empty
        assert made.cost([kept]) == most if kept > 2 else made.cost([kept]) >= most


def _choices(size, kept):
    return [
        [i for i in range(size) if bits >> i & 1]
        for bits in range(1 << size)
        if bits.bit_count() == kept
    ]


class Halves(nn.Module):
    """A layer reads the first channels alone: where all of them go, one of them
    stays.
    """

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (
            nn.Linear(3, 4),
            nn.Linear(2, 2),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        y = self.one(x)
        return self.two(y[..., :2]), self.three(y)


def test_a_dimension_that_would_be_empty_keeps_an_index_and_that_is_counted():
    found = groups(Halves().eval(), torch.ones(1, 3))
    sizes = [group.size for group in found]
    made = found.priced("params", None, False, range(len(found)))
    for masks in _choices(4, 2):
        gone = {i: [] for i in range(len(found))}
        if len(found) == 1:
            gone[0] = [i for i in range(4) if i not in masks]
        else:
            for i, group in enumerate(found):
                gone[i] = list(range(1, group.size))
        kept = [n - len(gone[i]) for i, n in enumerate(sizes)]
        assert made.cost(kept) >= found.cost(gone)


def test_sets_have_the_names_that_the_pattern_gives_them():
    for name in ("mobilenet v2", "resnext", "grouped queries"):
        found = groups(*MODELS[name]())
        params = dict(found.analysis.graph.named_parameters())
        for only in (None, list(range(len(found)))):
            try:
                sets = found.pattern(only).sets(params)
            except ValueError:  # groups that multiply in one leaf
                continue
            assert [
                (path, math.prod(units.budgeted)) for path, units in sets.items()
            ] == [(path, found[i].size) for path, i in found._set_names(only).items()]


def test_scores_are_the_mean_magnitudes_of_units():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    found = groups(model, torch.ones(1, 2))
    scores = found.priced("params", None, False, None).scores()
    entries = (
        torch.cat([model[0].weight, model[0].bias[:, None], model[2].weight.T], 1)
        .abs()
        .mean(1)
    )
    assert torch.allclose(torch.from_numpy(scores["0.weight"]).float(), entries)


@pytest.mark.deep
def test_weights_cost_what_the_report_says():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).eval()
    x = torch.ones(2, 2, 6, 6)
    state = sf.static(0.7, distribution=sf.budgets.erk(), key=sf.random.key(0)).init(
        sf.modules.params_of(model)
    )
    made = weights(model, x)
    nonzero = {
        path: int(mask.expand(state.params[path].shape).sum())
        for path, mask in state.masks.items()
    }
    kept = [nonzero[path] for path in made.leaves]
    assert (
        made.priced("flops", None, False, None).cost(kept)
        == sf.report.flops(model, state, x).total.sparse
    )
    assert made.priced("params", None, False, None).cost(kept) == sum(kept)


def test_compressed_bytes_of_weights_are_those_of_compressed_states():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    pattern = sf.patterns.nm(2, 4)
    state = sf.static(None, pattern=pattern, where="0.weight").init(
        sf.modules.params_of(model)
    )
    tensors = sf.checkpoint.compress(state, pattern)
    stored = sum(
        x.numel() * x.element_size()
        for name, x in tensors.items()
        if not name.endswith((".shape", ".nm"))
    )
    made = weights(model, torch.ones(1, 8)).priced("bytes", None, True, None)
    kept = [n // 2 if name == "0.weight" else n for name, n in made.sizes.items()]
    assert made.cost(kept) + made.masks["0.weight"] == stored
    with pytest.raises(
        ValueError,
        match="weights that are zero take as many bytes as others: say compressed=True",
    ):
        weights(model, torch.ones(1, 8)).priced("bytes", 8, False, None)
