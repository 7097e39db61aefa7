"""Rows of units and back."""

import pytest
import torch

import sparsefn as sf
from sparsefn.boxes import active_rows, from_rows, over_boxes, to_rows, unit_grid

P = sf.patterns
FITTING = [
    (P.unstructured(), (3, 4)),
    (P.nm(2, 4), (3, 8)),
    (P.nm(1, 2, axis=0), (4, 3, 2)),
    (P.block((2, 2)), (5, 3)),
    (P.block((3,)), (2, 7)),
    (P.block((2, 2, 2)), (3, 4, 5)),
    (P.channel(0), (4, 3)),
    (P.channel(-1, norm=2), (4, 3, 2)),
    (P.kernel(), (2, 3, 3, 3)),
    (P.kernel(reduce="max"), (4, 2)),
    (P.out_groups(2), (4, 3, 2)),
    (P.in_groups(3), (4, 6)),
    (P.row_balanced(), (5, 2)),
]


@pytest.mark.parametrize("pattern,shape", FITTING, ids=lambda x: str(x))
def test_rows_partition_the_elements(pattern, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = to_rows(pattern, x)
    ids = from_rows(pattern, torch.arange(rows.numel()).reshape(rows.shape), shape)
    assert ids.shape == shape and ids.unique().numel() == rows.numel()
    # Spreading a unit's elements count back gives each element the size of its own unit.
    sizes = to_rows(pattern, torch.ones_like(x), lambda unit: unit.sum(-1))
    assert int(sizes.sum()) == x.numel()
    assert torch.equal(from_rows(pattern, sizes, shape), torch.bincount(ids.flatten())[ids].double())


def test_groups_are_where_they_should_be():
    x = torch.arange(12.0).reshape(2, 6)
    assert to_rows(P.nm(1, 3), x).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert to_rows(P.nm(1, 2, axis=0), x)[0].tolist() == [0, 6]
    assert to_rows(P.out_groups(2), x).tolist() == x.tolist()
    assert to_rows(P.in_groups(2), x).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert to_rows(P.row_balanced(), x).tolist() == x.tolist()
    conv = torch.arange(16.0).reshape(2, 4, 1, 2)
    assert to_rows(P.nm(2, 4, axis=1), conv)[0].tolist() == [0, 2, 4, 6]


def test_16_bit_scores_are_reduced_in_32_bits():
    x = torch.tensor([[1.0, 1.0078125, 1.0], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    rows = to_rows(P.block((1, 3)), x)
    assert rows.dtype == torch.float32 and rows[0, 0] > rows[0, 1]


def test_grids_leave_out_what_a_unit_spans():
    assert unit_grid(P.unstructured(), (3, 4)) == (3, 4)
    assert unit_grid(P.kernel(), (8, 4, 3, 3)) == (8, 4)
    assert unit_grid(P.channel(1), (8, 4, 3, 3)) == (4,)
    assert unit_grid(P.block((4, 4)), (9, 8)) == (3, 2)
    assert unit_grid(P.kernel(), (8, 4, 1, 1)) == (8, 4, 1, 1)


def test_over_boxes_of_an_empty_tensor():
    assert over_boxes(torch.ones(0, 3), (2, 2), lambda unit: unit.sum(-1)).shape == (0, 2)


@pytest.mark.parametrize(("shape", "box"), [((4, 6), (2, 3)), ((5, 7), (2, 3)), ((3,), (2,)), ((2, 3, 5), (2, 2, 2))])
def test_a_number_for_each_element_of_partial_boxes_too(shape, box):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(over_boxes(x, box, lambda boxes: boxes), x)
    sizes = over_boxes(x, box, lambda boxes: torch.full_like(boxes, boxes.shape[-1]))
    grid = over_boxes(x, box, lambda boxes: torch.full(boxes.shape[:1], float(boxes.shape[-1])))
    assert sizes.shape == shape
    for place in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        unit = tuple(i // b for i, b in zip(place, box, strict=True))
        assert sizes[tuple(place)] == grid[unit]


def test_a_unit_is_kept_while_it_has_more_than_pruning_leaves():
    mask = torch.tensor([[True, True, True, True, True], [True, True, True, False, False]])
    for zeros, want in ((0, [0, 0, 0, 0]), (1, [1, 1, 0, 0]), (2, [1, 1, 1, 0]), (4, [1, 1, 1, 0])):
        assert active_rows(P.block((1, 4), zeros=zeros), mask).int().tolist() == [want]
