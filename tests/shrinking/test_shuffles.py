"""Shuffles of channels become one permutation, of which any channel may go."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsefn as sf
from sparsefn.shrinking.atoms import Atoms
from sparsefn.shrinking.shuffles import without_shuffles
from sparsefn.shrinking.traced import traced
from sparsefn.shrinking.values import opname
from tests.shrinking.compare import check, differs


def by_views(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def by_reshapes(x):
    return x.unflatten(1, (2, -1)).permute(0, 2, 1, 3, 4).reshape(x.shape)


class Shuffled(nn.Module):
    """Two convolutions with a shuffle between."""

    def __init__(self, shuffle):
        super().__init__()
        self.shuffle, self.a, self.b = shuffle, nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.b(self.shuffle(self.a(x)).relu())


WAYS = {
    "views": by_views,
    "reshapes": by_reshapes,
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shuffle_is_one_lookup_of_known_places(way, dynamic):
    model, x = Shuffled(WAYS[way]).eval().double(), torch.randn(2, 3, 4, 5).double()
    whole = traced(model, x, dynamic=dynamic)
    before = whole.code
    program = without_shuffles(whole)
    assert whole.code == before and program.a.weight is whole.a.weight
    names = [opname(node) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in names if not name.startswith("sym_")] == [
        "conv2d",
        "index_select",
        "relu",
        "conv2d",
    ]
    assert program(x).equal(model(x))
    if dynamic:
        more = torch.randn(5, 3, 4, 5).double()
        assert program(more).equal(model(more))


@pytest.mark.parametrize("way", WAYS)
def test_any_channel_may_go(way):
    model, x = Shuffled(WAYS[way]).eval().double(), torch.randn(2, 3, 4, 5).double()
    tied, free = (
        sf.shrinking.groups(model, x, equal_parts=equal) for equal in (True, False)
    )
    assert sorted(group.size for group in tied) == [2, 3] and [
        group.size for group in free
    ] == [6]
    params = sf.modules.params_of(model)
    state = sf.State(params, free.masks({0: [0, 1, 4]}))
    small = sf.shrink(model, state, x, form="program")
    assert small.a.weight.shape == (3, 3, 1, 1) and small.b.weight.shape == (2, 3, 1, 1)
    masked = sf.modules.bake(model, state)
    assert not differs(masked, small, x) and not differs(
        masked, small, torch.randn(7, 3, 4, 5).double()
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.view(x.shape),
        lambda x: x.transpose(2, 3).reshape(x.shape),  # mixes two dimensions
        lambda x: x.transpose(2, 3).transpose(2, 3),
        lambda x: x.reshape(x.shape[0], -1).flip(1).view(x.shape),
    ],
)
def test_other_moves_stay_as_they_are(other):
    model, x = Shuffled(other).eval(), torch.randn(2, 3, 4, 5)
    program = without_shuffles(traced(model, x, dynamic=False))
    assert "index_select" not in program.code and program(x).equal(model(x))


def test_a_shuffle_whose_parts_are_read_as_well_is_still_right():
    def twice(x):
        parts = x.view(x.shape[0], 2, 3, *x.shape[2:]).transpose(1, 2)
        return parts.reshape(x.shape) + parts.sum((1, 2)).unsqueeze(1)

    model, x = Shuffled(twice).eval().double(), torch.randn(2, 3, 4, 5).double()
    assert without_shuffles(traced(model, x))(x).equal(model(x))


def test_a_shuffle_of_a_model_on_meta_is_analysed():
    with torch.device("meta"):
        model = Shuffled(by_views).eval()
        found = sf.shrinking.groups(model, torch.ones(2, 3, 4, 5), equal_parts=False)
    assert [group.size for group in found] == [6]


class Units(nn.Module):
    """As ShuffleNet V2: half of the channels go through a layer, and all are shuffled,
    unit after unit.
    """

    def __init__(self, width, depth):
        super().__init__()
        half = width // 2
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Linear(width, 2)
        self.units = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(half, half, 1), nn.ReLU()) for _ in range(depth)]
        )

    def forward(self, x):
        x = self.first(x)
        for unit in self.units:
            kept, other = x.chunk(2, 1)
            x = by_views(torch.cat([kept, unit(other)], 1))
        return self.last(x.mean((2, 3)))


@pytest.mark.deep
def test_shuffles_one_after_another_share_few_atoms(monkeypatch):
    def find(self, ids, real=Atoms.find):
        assert ids.ndim < 2 or ids.shape[1] <= 64, f"a label of {ids.shape[1]} columns"
        return real(self, ids)

    monkeypatch.setattr(Atoms, "find", find)
    x = torch.randn(2, 3, 4, 4).double()
    for width, depth, sizes in [
        (48, 4, [1, 1, 1, 3]),
        (16, 8, [1, 1, 1, 1]),
        (48, 12, [1, 1, 1, 1]),
    ]:
        model = Units(width, depth).eval().double()
        found = sf.shrinking.groups(model, x)
        assert sorted(group.size for group in found) == sizes
    check(Units(48, 4).eval().double(), (x,), forms=("class", "program"))
