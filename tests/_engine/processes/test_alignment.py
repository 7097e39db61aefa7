"""Where units are whole, and the pieces that go there, worked out from shapes. (Real
moves: test_shards.py.)
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import sparsefn as sf
from sparsefn._engine.processes.alignment import (
    Alignment,
    _boxes,
    _numel,
    _Route,
    check_grid,
    realigned,
)
from sparsefn._engine.processes.shards import Layout
from tests.nn.distributed.harness import on_ranks
from tests.nn.distributed.sharded import full, laid, mesh


@st.composite
def cuts(draw):
    """Layouts of one or two groups, in any order of cuts, and a cell."""
    shape = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=2)))
    order = draw(st.permutations(range(len(sizes))))
    made = tuple((group, draw(st.integers(0, len(shape) - 1))) for group in order)
    return shape, made, sizes, tuple(draw(st.integers(1, 6)) for _ in shape)


def owners(boxes, shape):
    """Which process has each element."""
    owner = torch.full(shape, -1)
    for i, box in enumerate(boxes.values()):
        at = owner[tuple(slice(a, b) for a, b in box)]
        assert (at == -1).all()
        at.fill_(i)
    assert (owner >= 0).all()
    return owner


@settings(deadline=None)
@given(cuts())
def test_each_cell_is_whole_on_one_process(given_cuts):
    shape, _, _, cell = given_cuts
    old, new = _boxes(*given_cuts)
    owners(old, shape)
    owner = owners(new, shape)
    for dim, width in enumerate(cell):
        first = torch.arange(shape[dim]) // width * width
        assert torch.equal(owner, owner.index_select(dim, first))
    if all(width == 1 for width in cell):
        assert old == new

    def busy(boxes):
        return sum(_numel(box) > 0 for box in boxes.values())

    cells = math.prod(-(-n // width) for n, width in zip(shape, cell, strict=True))
    assert busy(new) >= min(1, cells)


@settings(deadline=None)
@given(
    cuts(),
    st.booleans(),
    st.sampled_from([torch.bool, torch.int16, torch.float32, torch.float64]),
)
def test_pieces_go_along_one_group_after_the_other(given_cuts, back, dtype):
    # All processes in one: each group's exchange is done by hand.
    shape, made, sizes, _ = given_cuts
    old, new = _boxes(*given_cuts)
    whole = (torch.arange(math.prod(shape)) % 97).reshape(shape).to(dtype)
    names = tuple(map(str, range(len(sizes))))

    def part(box):
        return whole[tuple(slice(a, b) for a, b in box)]

    routes = {}
    for at in old:
        layout = Layout(shape, made, sizes, names, at)
        alignment = Alignment(
            layout.extent(old[at]), layout.extent(new[at]), layout, old, new
        )
        routes[at] = _Route(part((new if back else old)[at]), alignment, back)
    for i in reversed(range(len(sizes))):  # in any order of groups
        pieces = {at: route.pieces for at, route in routes.items()}
        for at, route in routes.items():
            route.gone = route.gone | {i}
            held = list(route.held(route.gone))
            route.pieces = {
                p: pieces[(*at[:i], p[0][i], *at[i + 1 :])][p] for p in held
            }
    for at, route in routes.items():
        assert torch.equal(route.arrived(), part((old if back else new)[at]))


def test_where_borders_fit_nothing_moves():
    layout = Layout((8, 6), ((0, 0),), (2,), ("no such group",), (0,))
    old, new = _boxes((8, 6), ((0, 0),), (2,), (4, 3))
    alignment = Alignment(
        layout.extent(old[0,]), layout.extent(new[0,]), layout, old, new
    )
    x = torch.ones(4, 6)
    assert not alignment.moves
    assert realigned([x, x], [alignment, None])[0] is x


def test_a_unit_over_all_shards_is_cut_along_another_dimension():
    _, new = _boxes((37, 24), ((0, 0),), (4,), (37, 1))
    assert list(new.values()) == [((0, 37), (6 * i, 6 * i + 6)) for i in range(4)]
    _, new = _boxes((40,), ((0, 0),), (4,), (40,))
    assert [_numel(box) for box in new.values()] == [40, 0, 0, 0]


def on_two_meshes():
    """Cases on four processes in a line, which are two rows of two as well."""
    line, grid = mesh(4), mesh(2, 2)
    params = {
        "a": laid({"w": torch.randn(8, 6)}, line, [Shard(0)])["w"],
        "b": laid({"w": torch.randn(8, 6)}, grid, [Shard(0), Shard(1)])["w"],
    }
    kept = {
        "a": params["a"],
        "c": laid({"w": torch.ones(4)}, line, [Replicate()])["w"],
        "d": torch.ones(3),
    }
    rows = {
        "a": laid({"w": torch.randn(8, 6)}, grid, [Shard(0), Replicate()])["w"],
        "b": laid({"w": torch.randn(8, 6)}, grid, [Replicate(), Shard(0)])["w"],
    }
    text = (
        r"expected leaves of one competition to be cut along dimensions of one mesh, "
        r"but 'a' is laid out as "
        r"\[Shard\(dim=0\)\] over .*4.* and 'b' is laid out as \[Shard\(dim=0\), "
        r"Shard\(dim=1\)\] over .*2.*2.*; give "
        r"them one mesh, or a budget for each leaf, such as sf.budgets.erk\(\)"
    )

    def refused():
        with pytest.raises(ValueError, match=text):
            check_grid(params)
        for algorithm in (
            sf.gmp(0.5, distribution=sf.budgets.global_()),
            sf.set(0.5, distribution=sf.budgets.global_()),
        ):
            with pytest.raises(ValueError, match=text):
                algorithm.init(params)

    def served():
        check_grid(kept)
        check_grid(rows)
        for tree, distribution in (
            (params, sf.budgets.erk()),
            (rows, sf.budgets.global_()),
        ):
            algorithm = sf.gmp(0.5, distribution=distribution, where="*")
            whole = algorithm.init(full(tree))
            assert sf.checkpoint.tree_equal(full(algorithm.init(tree)), whole)

    yield "one competition", refused
    yield "one for each leaf, or rows and columns", served


def test_leaves_on_two_meshes():
    on_ranks(4, on_two_meshes)
