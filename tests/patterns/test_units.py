"""Rows of units and back."""

import pytest
import torch

import sparsefn as sf
from sparsefn.patterns.units import active_rows, from_rows, to_columns, to_rows, units_of


def rows_of(pattern, x, *reduce):
    return to_rows(units_of(pattern, tuple(x.shape)), x, *reduce)


def active_of(pattern, mask):
    return active_rows(units_of(pattern, tuple(mask.shape)), mask)


def columns_of(pattern, x):
    return to_columns(units_of(pattern, tuple(x.shape)), x)


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
    rows = rows_of(pattern, x)
    ids = from_rows(units_of(pattern, shape), torch.arange(rows.numel()).reshape(rows.shape))
    assert ids.shape == shape and ids.unique().numel() == rows.numel()
    # Spreading a unit's elements count back gives each element the size of its own unit.
    sizes = rows_of(pattern, torch.ones_like(x), lambda unit: unit.sum(-1))
    assert int(sizes.sum()) == x.numel()
    assert torch.equal(from_rows(units_of(pattern, shape), sizes), torch.bincount(ids.flatten())[ids].double())


def test_groups_are_where_they_should_be():
    x = torch.arange(12.0).reshape(2, 6)
    assert rows_of(P.nm(1, 3), x).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert rows_of(P.nm(1, 2, axis=0), x)[0].tolist() == [0, 6]
    assert rows_of(P.out_groups(2), x).tolist() == x.tolist()
    assert rows_of(P.in_groups(2), x).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert rows_of(P.row_balanced(), x).tolist() == x.tolist()
    conv = torch.arange(16.0).reshape(2, 4, 1, 2)
    assert rows_of(P.nm(2, 4, axis=1), conv)[0].tolist() == [0, 2, 4, 6]


def test_16_bit_scores_are_reduced_in_32_bits():
    x = torch.tensor([[1.0, 1.0078125, 1.0], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    rows = rows_of(P.block((1, 3)), x)
    assert rows.dtype == torch.float32 and rows[0, 0] > rows[0, 1]


def test_grids_leave_out_what_a_unit_spans():
    assert units_of(P.unstructured(), (3, 4)).budgeted == (3, 4)
    assert units_of(P.kernel(), (8, 4, 3, 3)).budgeted == (8, 4)
    assert units_of(P.channel(1), (8, 4, 3, 3)).budgeted == (4,)
    assert units_of(P.block((4, 4)), (9, 8)).budgeted == (3, 2)
    assert units_of(P.kernel(), (8, 4, 1, 1)).budgeted == (8, 4, 1, 1)


def test_a_unit_is_kept_while_it_has_more_than_pruning_leaves():
    mask = torch.tensor([[True, True, True, True, True], [True, True, True, False, False]])
    for zeros, want in ((0, [0, 0, 0, 0]), (1, [1, 1, 0, 0]), (2, [1, 1, 1, 0]), (4, [1, 1, 1, 0])):
        assert active_of(P.block((1, 4), zeros=zeros), mask).int().tolist() == [want]


# ---- some boxes at a time ------------------------------------------------------------------------


@pytest.mark.parametrize("pattern,shape", [*FITTING, (P.unstructured(), ()), (P.unstructured(), (0, 3))], ids=str)
def test_the_shape_of_rows_is_known_without_them(pattern, shape):
    assert units_of(pattern, shape).rows == rows_of(pattern, torch.ones(shape)).shape


@pytest.mark.parametrize("pattern,shape", [*FITTING, (P.nm(2, 4, axis=1), (3, 8, 5))], ids=str)
def test_groups_along_one_dimension_are_columns(pattern, shape):
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    columns = columns_of(pattern, x)
    if "nm" not in pattern.name and pattern.name not in ("row_balanced()",):
        assert columns is None or pattern.reduce is None
    if columns is not None:
        rows = rows_of(pattern, x)
        assert torch.equal(columns.transpose(1, 2).reshape(rows.shape), rows)
        assert columns.data_ptr() == x.data_ptr()


def test_which_groups_are_columns():
    assert columns_of(P.nm(2, 4), torch.ones(3, 8)).shape == (6, 4, 1)
    assert columns_of(P.nm(2, 4, axis=0), torch.ones(8, 3, 2)).shape == (2, 4, 6)
    assert columns_of(P.row_balanced(), torch.ones(8, 3)).shape == (8, 3, 1)
    assert columns_of(P.unstructured(), torch.ones(8)) is None
    for pattern in (P.unstructured(), P.channel(0), P.block((2, 2)), P.row_balanced()):
        assert columns_of(pattern, torch.ones(4, 4, 2)) is None
    assert columns_of(P.nm(1, 1), torch.ones(4)) is None and columns_of(P.row_balanced(), torch.ones(3, 0)) is None


def test_masks_do_not_keep_more_memory_than_they_need():
    for pattern, shape in ((P.block((16, 16)), (3, 40)), (P.channel(0), (5, 4)), (P.block((4,)), (2, 7))):
        units = torch.ones(units_of(pattern, shape).rows, dtype=torch.bool)
        mask = from_rows(units_of(pattern, shape), units)
        assert mask.is_contiguous() and mask.untyped_storage().nbytes() == mask.numel()
