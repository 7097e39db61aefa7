"""Arguments of one operation: symbolic sizes, numbers of entries, and what is
refused.
Places along dimensions that lose entries: the smaller program reads those that
stay."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.rewrites import refused, scale
from sparsefn.shrinking.trace import traced
from tests.shrinking.compare import differs
from tests.shrinking.cuts import both, masked, random_cut, size


def sizes():
    graph = traced(nn.Identity(), (torch.ones(6, 4),))
    return [
        graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[d] for d in (0, 1)
    ]


def test_a_symbolic_size_is_scaled_in_its_factor():
    n, m = sizes()
    assert scale(n * 8, 12, 48) == (8, 2)
    assert scale(n * m * 8, 6 * 4 * 6, 6 * 4 * 8) == (8, 6)
    assert scale(n, 3, 6) is None  # rows of the example, not of a layer
    assert scale(n * 3, 6 * 3 // 2, 18) is None  # half of three
    assert scale(n + 8, 10, 14) is None
    assert scale(n * 8 // m, 6, 12) is None
    assert scale(48, 12, 48) is None


def test_sizes_that_are_no_products_are_inferred_or_refused():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.more = (
                nn.Linear(3, 4),
                nn.Linear(4, 2),
                nn.Parameter(torch.randn(3, 4)),
            )

        def forward(self, x):
            rows = x.shape[0] + 3
            return self.b(
                torch.cat([self.a(x), self.more]).view(rows * 4).view(rows, 4)
            )

    model, x = Joined().eval().double(), torch.randn(5, 3).double()
    whole, small = both(model, x)
    assert not differs(whole, small, x) and not differs(
        whole, small, torch.randn(7, 3).double()
    )


def test_a_refusal_names_the_operation_and_its_module():
    graph = traced(
        nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU())), torch.ones(2, 3)
    )
    (node,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    assert (
        str(refused(node, "why"))
        == "the operation relu of the module '1.0' cannot follow entries that go: why"
    )


aten = torch.ops.aten
PICKED = torch.tensor([5, 0, 3, 3, 7])
TABLE = torch.tensor([[0, 6], [-1, 2]])


class Between(nn.Module):
    """A layer, something in between, and layers that read it."""

    def __init__(self, fn, rows=1):
        super().__init__()
        self.fn, self.a = fn, nn.Linear(3, 8 * rows)
        self.shape = (rows, 8) if rows > 1 else (8,)
        with torch.no_grad():
            wide = fn(torch.zeros(2, *self.shape))
        self.b = nn.ModuleList(
            nn.Linear(y.flatten(1).shape[1], 2)
            for y in (wide if isinstance(wide, tuple) else (wide,))
        )

    def forward(self, x):
        y = self.fn(self.a(x).unflatten(1, self.shape))
        return [
            layer(part.flatten(1))
            for layer, part in zip(
                self.b, y if isinstance(y, tuple) else (y,), strict=True
            )
        ]


def check(fn, rows=1, share=0.5, smaller=True):
    model, x = Between(fn, rows).eval().double(), torch.randn(2, 3).double()
    for seed in range(4):
        whole, small = both(model, x, share, seed)
        assert not differs(whole, small, x)
        assert not differs(whole, small, torch.randn(5, 3).double())
        assert size(small) < size(model) or not smaller
    return small


@pytest.mark.deep(but=["<lambda>1", "<lambda>2", "<lambda>3"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y[:, 2:],
        lambda y: y[:, -3:],
        lambda y: y[:, :-2],
        lambda y: y[:, 1:7:2],
        lambda y: y[:, ::3],
        lambda y: y[:, -5:-1:3],
        lambda y: y.narrow(1, 2, 4),
        lambda y: aten.narrow(y, 1, -4, 3),
        lambda y: torch.cat([y[:, 4:], y[:, :4]], 1),
        lambda y: torch.stack([y[:, 1], y[:, -2]], 1),
        lambda y: y.flip(1),
        lambda y: y.roll(3, 1),
        lambda y: y.roll(-1, -1),
        lambda y: y.index_select(1, PICKED),
        lambda y: y[:, PICKED],
        lambda y: y[:, [-1, 2, -4]],
        lambda y: F.pad(y, (2, 1)),
        lambda y: F.pad(y, (-2, 1), value=3.0),
        lambda y: F.pad(y, (-1, -3)),
        lambda y: (y[:, :2], y[:, 2:], y),
    ],
)
def test_along_one_dimension(fn):
    check(fn)


@pytest.mark.deep(but=["*1"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y[:, 1:3, ::2],
        lambda y: y.roll((1, 2), (1, 2)),
        lambda y: y.roll((1, 1), (0, 2))[:, :, 1:],
        lambda y: y.flip((1, 2)),
        lambda y: y[:, 1][:, PICKED],
        lambda y: y.select(1, -2)[:, 1:],
        lambda y: y[:, [0, 2]][:, :, [4, 1]],
        lambda y: F.pad(y, (1, 0, 2, -1)),
        lambda y: y.transpose(1, 2)[:, 1:6:2],
    ],
)
def test_along_several_dimensions(fn):
    check(fn, rows=4)


@pytest.mark.deep
def test_tables_of_indices():
    check(lambda y: y[:, :, TABLE], rows=4, smaller=False)
    first, second = torch.tensor([[0], [3]]), torch.tensor([[1, 2, 6]])
    check(lambda y: y[:, first, second], rows=4, smaller=False)
    check(lambda y: y[:, torch.tensor([0, 1]), :][:, :, second[0]], rows=4)


@pytest.mark.deep
def test_slices_are_read_as_slices_where_what_stays_lies_at_even_distances():
    kept = {
        name: check(fn, share=0.3).code
        for name, fn in {
            "cut": lambda y: y[:, 2:],
            "gather": lambda y: y[:, PICKED],
        }.items()
    }
    assert "slice" in kept["cut"] or "index_select" in kept["cut"]
    assert "aten.index" in kept["gather"]


@pytest.mark.deep
def test_writes_into_slices():
    def written(y):
        y = y * 1.0
        y[:, 2:6] = y[:, :4] * 2
        return y

    def one(y):
        y = y * 1.0
        y[:, 3] = y[:, 0]
        return y

    for fn in (written, one):
        model, x = Between(fn).eval().double(), torch.randn(2, 3).double()
        for seed in range(4):
            whole, small = both(model, x, 0.5, seed)
            assert not differs(whole, small, x)


def test_what_cannot_follow_is_refused():
    graph = traced(Between(lambda y: y[:, 1:5]).eval(), torch.randn(2, 3))
    cut = random_cut(graph, 0.0)
    (node,) = [
        node
        for node in graph.graph.nodes
        if node.target is aten.slice.Tensor and node.args[1] == 1
    ]
    value, index = (
        cut.analysis.values[node],
        cut.analysis.values[node.args[0]].labels[1],
    )
    cut.known.clear()
    cut.alive[index[2]] = (
        False  # of what is read, but the output has labels of its own that stay
    )
    cut.analysis.values[node] = value._replace(labels=(None, None))
    with pytest.raises(
        ValueError,
        match="the operation slice cannot follow entries that go: it reads one that "
        "goes",
    ):
        program(cut)
    assert (
        masked(
            Between(lambda y: y),
            random_cut(traced(Between(lambda y: y).eval(), torch.randn(2, 3))),
        )
        is not None
    )
