"""Units of boxes: together they are those of the whole, each once, in their order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn._engine.processes.alignment import Alignment, _boxes
from sparsefn._engine.processes.shards import Layout
from sparsefn._engine.selection import grouped
from sparsefn.masks.patterns.shards import cell_of, on_shards, units_at
from sparsefn.masks.patterns.units import (
    active_rows,
    allowed_rows,
    from_rows,
    to_rows,
    units_of,
)

P = sf.patterns
PATTERNS = {
    "unstructured": (P.unstructured(), [(7, 5), (6,), (3, 4, 2)]),
    "nm": (P.nm(2, 4), [(5, 8), (16,)]),
    "nm along rows": (P.nm(1, 2, axis=0), [(6, 5)]),
    "block": (P.block((3, 2)), [(7, 5), (6, 6)]),
    "block with zeros": (P.block((2, 2), zeros=1), [(5, 6)]),
    "channel": (P.channel(0), [(7, 5), (3, 4, 2)]),
    "channel of columns": (P.channel(1), [(7, 5)]),
    "channels in groups": (P.channel(0, groups=3), [(6, 5)]),
    "kernel": (P.kernel(), [(4, 3, 2, 2)]),
    "rows": (P.row_balanced(), [(7, 5)]),
    "out_groups": (P.out_groups(2), [(6, 4)]),
    "in_groups": (P.in_groups(2), [(5, 6)]),
    "diagonal": (P.nearly_diagonal(3), [(6, 5)]),
}


@st.composite
def cases(draw: st.DrawFn):
    pattern, shapes = PATTERNS[draw(st.sampled_from(sorted(PATTERNS)))]
    shape = draw(st.sampled_from(shapes))
    sizes = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=2)))
    cuts = tuple((i, draw(st.integers(0, len(shape) - 1))) for i in range(len(sizes)))
    return units_of(pattern, shape), cuts, sizes


def parts(case):
    """The units of each process, and its box as slices."""
    units, cuts, sizes = case
    old, new = _boxes(units.shape, cuts, sizes, cell_of(units))
    for at in old:
        layout = Layout(
            units.shape, cuts, sizes, tuple(map(str, range(len(sizes)))), at
        )
        alignment = Alignment(
            layout.extent(old[at]), layout.extent(new[at]), layout, old, new
        )
        yield units_at(units, alignment), tuple(slice(a, b) for a, b in new[at])


@given(cases(), st.randoms(use_true_random=False))
def test_the_units_of_boxes_are_those_of_the_whole(case, rng):
    units = case[0]
    torch.manual_seed(rng.randrange(1 << 30))
    scores = torch.randn(units.shape)
    mask = from_rows(units, torch.rand(units.rows) < 0.5)
    wanted, kept = (
        to_rows(units, scores).reshape(-1),
        grouped(active_rows(units, mask)).reshape(-1),
    )
    open_ = allowed_rows(
        units, scores, torch.ones(units.rows, dtype=torch.bool)
    ).reshape(-1)
    counts = torch.arange(units.rows[0])
    seen, groups = [], []
    for part, box in parts(case):
        extent = part.row_extent
        assert part.of_all is units and extent is not None
        places = torch.from_numpy(
            extent.places(np.arange(math.prod(part.rows)))
        ).reshape(part.rows)
        assert torch.equal(to_rows(part, scores[box]), wanted[places])
        assert torch.equal(grouped(active_rows(part, mask[box])), kept[places])
        assert torch.equal(
            allowed_rows(part, scores[box], torch.ones(part.rows) > 0), open_[places]
        )
        assert torch.equal(from_rows(part, kept[places]), mask[box])
        assert part.fixed == units.fixed
        flat = places.reshape(-1)
        assert (flat.diff() > 0).all() or units.rows[0] > 1, (
            "ties go to the lower index in the whole"
        )
        seen += flat.tolist()
        if units.rows[0] > 1:
            assert part.extent is None, "each group is on one process"
            assert torch.equal(part.own_counts(counts), part.group_places())
            groups += part.group_places().tolist()
        else:
            assert part.extent is not None and part.extent.numel == units.rows[1]
            assert part.own_counts(3) == 3
    assert sorted(seen) == list(range(wanted.numel()))
    assert units.rows[0] == 1 or sorted(groups) == list(range(units.rows[0]))


@pytest.mark.parametrize("name", PATTERNS)
def test_plain_leaves_have_the_units_of_the_whole(name):
    pattern, shapes = PATTERNS[name]
    leaves = {"w": torch.ones(shapes[0])}
    grids = pattern.grids(leaves)
    units = grids.full["w"]
    assert on_shards(grids, leaves) is grids and units.of_all is units
    assert units.row_extent is units.extent is None
    counts = torch.arange(units.rows[0])
    assert units.own_counts(counts) is counts
