"""Costs by kept units are those of cuts with so many units, whichever they are; of
weights those of the report.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsefn as sf
from sparsefn.shrinking.budgets import weights
from sparsefn.shrinking.groups import groups
from tests.shrinking.cost_counts import some_units
from tests.shrinking.networks import networks
from tests.shrinking.zoo import MODELS

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
            ] == [(path, found[i].size) for path, i in found.set_names(only).items()]


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
