"""Leaves that lie end to end are units like others."""

import pytest
import torch

import sparsefn as sf
from sparsefn._engine.leaves import lists
from sparsefn.masks.patterns.packs import PackedGrids, packed
from sparsefn.masks.patterns.units import competing


@pytest.fixture(autouse=True)
def two_leaves_are_a_pack(monkeypatch):
    monkeypatch.setattr(lists, "FEWEST", 2)


def grids_of(leaves, pattern=None):
    pattern = sf.patterns.unstructured() if pattern is None else pattern
    return packed(pattern.grids(leaves), leaves)


def some_leaves():
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (4,), "c": (200, 200), "d": (3,), "e": (2, 2)}
    return {p: torch.randn(shape, generator=draw) for p, shape in shapes.items()}


def test_neighbours_lie_in_one_pack_and_a_large_leaf_alone():
    leaves = some_leaves()
    grids = grids_of(leaves)
    assert isinstance(grids, PackedGrids)
    assert grids.packs == [["a", "b"], ["c"], ["d", "e"]]
    assert grids.segments == [[6, 4], None, [3, 4]]
    assert grids.sizes == [10, 40_000, 7] and len(grids.extents) == 3
    assert (
        list(grids.unpacked.local) == list(leaves) and len(grids.unpacked.extents) == 5
    )
    assert grids.at([0, 2]).packs == [["a", "b"], ["d", "e"]]


def test_scores_and_masks_go_there_and_back():
    leaves = some_leaves()
    grids = grids_of(leaves)
    read = grids.read(leaves, competing)
    each = grids.by_grid(read)
    assert [x.shape for x in each] == [(1, x.numel()) for x in leaves.values()]
    for row, leaf in zip(each, leaves.values(), strict=True):
        assert torch.equal(row[0], leaf.reshape(-1))
    masks = grids.masks([x > 0 for x in read], leaves, {}, {})
    for path, leaf in leaves.items():
        assert torch.equal(masks[path], leaf > 0) and masks[path].is_contiguous()
    memory = {mask.untyped_storage().data_ptr() for mask in masks.values()}
    assert len(memory) == len(masks)


@pytest.mark.parametrize(
    "pattern",
    [
        sf.patterns.nm(1, 2),
        sf.patterns.channel(0),
        sf.patterns.block((2,)),
        sf.patterns.block((2,), zeros=1),
        sf.patterns.row_balanced(),
        sf.patterns.nearly_diagonal(1),
        sf.patterns.transposable(1, 2),
        sf.patterns.tied([["*", 0]]),
    ],
    ids=repr,
)
def test_other_units_stay_as_they_are(pattern):
    leaves = {path: torch.randn(2, 4) for path in "ab"}
    grids = pattern.grids(leaves)
    assert packed(grids, leaves) is grids


def test_leaves_of_other_kinds_stay_apart():
    leaves = {
        "a": torch.ones(2),
        "b": torch.ones(2).double(),
        "c": torch.ones(0),
        "d": torch.nn.Parameter(torch.ones(2)),
    }
    grids = grids_of(leaves)
    assert not isinstance(grids, PackedGrids)


def test_a_mask_of_another_shape_shifts_no_other():
    algorithm = sf.rigl(0.5, when=sf.always())
    leaves = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}
    state = algorithm.init(leaves)
    masks = {"a": state.masks["a"][:1], "b": torch.ones(3, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"params, \(2, 3\) at 'a', got \(1, 3\)"):
        algorithm.update(state._replace(masks=masks), leaves, 0)


def test_a_pack_on_a_device_has_a_limit(monkeypatch):
    monkeypatch.setattr("sparsefn.masks.patterns.packs.MOST", 10)
    leaves = {p: torch.ones(4, device="meta") for p in "abc"}
    leaves["d"] = torch.ones(6, device="meta")
    assert grids_of(leaves).packs == [["a", "b"], ["c"], ["d"]]


ALGORITHMS = {
    "rigl": lambda: sf.rigl(0.5, when=sf.always()),
    "set": lambda: sf.set(0.5, when=sf.always(), key=sf.random.key(3)),
    "gmp": lambda: sf.gmp(0.5),
    "snfs": lambda: sf.snfs(0.5, when=sf.always()),
    "excluded": lambda: sf.rigl(0.5, when=sf.always(), exclude_dropped=True),
    "grow_count": lambda: sf.rigl(
        0.5, when=sf.always(), grow_count=sf.redistribute.independently
    ),
    "counted": lambda: sf.rigl(
        0.5, when=sf.always(), drop_fraction=sf.counts.below(0.3)
    ),
    "within": lambda: sf.rigl(0.5, when=sf.always()).within(
        {path: x > -1 for path, x in some_leaves().items()}
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packs_have_the_masks_of_leaves_one_by_one(name, monkeypatch):
    def masks():
        algorithm = ALGORITHMS[name]()
        leaves = some_leaves()
        state = algorithm.init(leaves)
        grads = {path: x.sin() for path, x in leaves.items()}
        return algorithm.update(state, grads, 0).masks

    together = masks()
    monkeypatch.setattr(lists, "SMALL", 0)
    alone = masks()
    assert any((~mask).any() for mask in alone.values())
    for path, mask in alone.items():
        assert torch.equal(mask, together[path]), path
