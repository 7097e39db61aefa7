"""Rows of units and back."""

import re
from dataclasses import replace

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.patterns.units import (
    active_rows,
    from_rows,
    to_columns,
    to_rows,
    units_of,
    units_of_leaves,
)


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
    x = torch.rand(
        shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rows = rows_of(pattern, x)
    ids = from_rows(
        units_of(pattern, shape), torch.arange(rows.numel()).reshape(rows.shape)
    )
    assert ids.shape == shape and ids.unique().numel() == rows.numel()
    # Spreading a unit's elements count back gives each element the size of its own
    # unit.
    sizes = rows_of(pattern, torch.ones_like(x), lambda unit: unit.sum(-1))
    assert int(sizes.sum()) == x.numel()
    assert torch.equal(
        from_rows(units_of(pattern, shape), sizes),
        torch.bincount(ids.flatten())[ids].double(),
    )


def test_groups_are_where_they_should_be():
    x = torch.arange(12.0).reshape(2, 6)
    assert rows_of(P.nm(1, 3), x).tolist() == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    assert rows_of(P.nm(1, 2, axis=0), x)[0].tolist() == [0, 6]
    assert rows_of(P.out_groups(2), x).tolist() == x.tolist()
    assert rows_of(P.in_groups(2), x).tolist() == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
    ]
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
    mask = torch.tensor(
        [[True, True, True, True, True], [True, True, True, False, False]]
    )
    for zeros, want in (
        (0, [0, 0, 0, 0]),
        (1, [1, 1, 0, 0]),
        (2, [1, 1, 1, 0]),
        (4, [1, 1, 1, 0]),
    ):
        assert active_of(P.block((1, 4), zeros=zeros), mask).int().tolist() == [want]


# ---- some boxes at a time ------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern,shape",
    [*FITTING, (P.unstructured(), ()), (P.unstructured(), (0, 3))],
    ids=str,
)
def test_the_shape_of_rows_is_known_without_them(pattern, shape):
    assert units_of(pattern, shape).rows == rows_of(pattern, torch.ones(shape)).shape


@pytest.mark.parametrize(
    "pattern,shape", [*FITTING, (P.nm(2, 4, axis=1), (3, 8, 5))], ids=str
)
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
    assert (
        columns_of(P.nm(1, 1), torch.ones(4)) is None
        and columns_of(P.row_balanced(), torch.ones(3, 0)) is None
    )


def test_masks_do_not_keep_more_memory_than_they_need():
    for pattern, shape in (
        (P.block((16, 16)), (3, 40)),
        (P.channel(0), (5, 4)),
        (P.block((4,)), (2, 7)),
    ):
        units = torch.ones(units_of(pattern, shape).rows, dtype=torch.bool)
        mask = from_rows(units_of(pattern, shape), units)
        assert mask.is_contiguous() and mask.untyped_storage().nbytes() == mask.numel()


# A convolution of 3 inputs, one of 8, and a linear layer of 6.
LEAVES = {
    "0.weight": torch.ones(8, 3, 3, 3),
    "2.weight": torch.ones(8, 8, 3, 3),
    "4.weight": torch.ones(10, 6),
}
ALONG_INPUTS = "; write axis=1, along which the inputs of convolutions lie"


def left_out(*paths):
    return (
        "where=lambda path, leaf: sf.default_where(path, leaf) and path not in "
        f"{list(paths)}"
    )


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (
            P.nm(2, 4),
            "nm(2, 4, axis=-1): expected axis -1 divisible by 4, got shape (8, 3, 3, "
            "3) at '0.weight', nor does it fit '2.weight' of shape (8, 8, 3, 3), "
            f"'4.weight' of shape (10, 6){ALONG_INPUTS}, and leave out what is left "
            f"with {left_out('0.weight', '4.weight')}",
        ),
        (
            P.nm(2, 4, axis=1),
            "nm(2, 4, axis=1): expected axis 1 divisible by 4, got shape (8, 3, 3, "
            "3) at '0.weight', nor does it fit '4.weight' of shape (10, 6); leave "
            f"them out with {left_out('0.weight', '4.weight')}",
        ),
        (
            P.transposable(2, 4),
            "transposable(2, 4): expected axis 1 divisible by 4, got shape (8, 3, 3, "
            "3) at '0.weight', nor does it fit '4.weight' of shape (10, 6); leave "
            f"them out with {left_out('0.weight', '4.weight')}",
        ),
        (
            P.block((1, 1, 1)),
            "block((1, 1, 1), reduce='mean'): expected 3 dimensions or more, got "
            f"shape (10, 6) at '4.weight'; leave it out with {left_out('4.weight')}",
        ),
        (
            P.channel(axis=2),
            "channel(axis=2, norm=1): no axis 2 in shape (10, 6) at '4.weight'; "
            f"leave it out with {left_out('4.weight')}",
        ),
        (
            P.out_groups(4),
            "out_groups(4): expected axis 0 divisible by 4, got shape (10, 6) at "
            f"'4.weight'; leave it out with {left_out('4.weight')}",
        ),
        (
            P.in_groups(4),
            "in_groups(4): expected axis 1 divisible by 4, got shape (8, 3, 3, 3) at "
            "'0.weight', nor does it fit '4.weight' of shape (10, 6); leave them out "
            f"with {left_out('0.weight', '4.weight')}",
        ),
        (
            P.nearly_diagonal(3),
            "nearly_diagonal(3): expected 2 dimensions, got shape (8, 3, 3, 3) at "
            "'0.weight', nor does it fit '2.weight' of shape (8, 8, 3, 3); leave "
            f"them out with {left_out('0.weight', '2.weight')}",
        ),
        (
            P.row_balanced(axis=3),
            "row_balanced(axis=3): no axis 3 in shape (10, 6) at '4.weight'; leave "
            f"it out with {left_out('4.weight')}",
        ),
    ],
    ids=lambda one: one.name if isinstance(one, P.Pattern) else "",
)
def test_all_leaves_that_a_pattern_does_not_fit_are_named_with_the_mend(pattern, told):
    sparsity = None if pattern.fixed is not None else 0.5
    for act in (
        lambda: units_of_leaves(pattern, LEAVES),
        lambda: sf.static(sparsity, pattern=pattern).init(LEAVES),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            act()


def test_axis_1_is_told_where_it_fits_more():
    with pytest.raises(ValueError, match=f"{re.escape(ALONG_INPUTS)}$"):
        units_of_leaves(
            P.nm(2, 4), {"conv": torch.ones(8, 8, 3, 3), "fc": torch.ones(3, 8)}
        )
    # along the kernel, as along the inputs
    with pytest.raises(ValueError, match=re.escape(left_out("conv"))):
        units_of_leaves(P.nm(2, 4), {"conv": torch.ones(8, 3, 3, 3)})


def test_the_mends_are_right():
    algorithm = sf.static(
        None,
        pattern=P.nm(2, 4, axis=1),
        where=lambda path, leaf: (
            sf.default_where(path, leaf) and path not in ["0.weight", "4.weight"]
        ),
    )
    assert sf.masks.sparsity(algorithm.init(LEAVES).masks) == 0.5


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (
            lambda: sf.static(0.5, pattern=sf.patterns.tied([["*", 0, 16]])).init(
                LEAVES
            ),
            "tied: expected dimension 0 divisible into blocks of 16, got shape (8, 3, "
            "3, 3) at '0.weight'; expected dimension 0 divisible into blocks of 16, "
            "got shape (8, 8, 3, 3) at '2.weight'; expected dimension 0 divisible "
            "into blocks of 16, got shape (10, 6) at '4.weight'",
        ),
        (
            lambda: sf.static(0.5, where="*", distribution=sf.budgets.erk()).init(
                {"a": torch.ones(2), "b": torch.ones(3)}
            ),
            "Erdos-Renyi budgets need leaves of 2 dimensions or more, got shape (2,) "
            "at 'a', shape (3,) at 'b': leave them out of `where`",
        ),
        (
            lambda: sf.reparametrised(sf.reparam.low_rank(1), where="*").init(
                {"a": torch.ones(2), "b": torch.ones(3)}
            ),
            "low_rank: expected leaves of 2 axes or more, got shape (2,) at 'a', "
            "shape (3,) at 'b': leave them out with where=",
        ),
        (
            lambda: sf.static(0.5, where=["*.wieght", "*.bais", "*"]).init(LEAVES),
            "where: no path matches '*.wieght', nor '*.bais'; the paths are "
            "'0.weight', '2.weight', '4.weight'",
        ),
    ],
    ids=["tied", "erk", "low_rank", "globs"],
)
def test_other_errors_name_all_leaves(act, told):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        act()


# ---- another kind is one class -------------------------------------------------------


class Alternating(P.Pattern):
    """Keeps every second unit, whatever the scores."""

    one_by_one = False

    def grids(self, leaves):
        return replace(super().grids(leaves), select=self.winners)

    def winners(self, entries, counts):
        made = []
        for entry in entries:
            kept = torch.arange(entry.scores.shape[1]) % 2 == 0
            made.append(kept.expand(entry.scores.shape))
        return made


def test_another_kind_is_one_class():
    pattern = Alternating(
        "alternating()", unit=lambda shape: (1, 1), group=lambda grid: grid, fixed=3
    )
    want = torch.tensor([[True, False, True], [False, True, False]])
    leaves = {"w": torch.randn(2, 3)}
    assert torch.equal(sf.masks.topk_mask(leaves["w"], None, pattern=pattern), want)
    assert torch.equal(sf.static(None, pattern=pattern).init(leaves).masks["w"], want)
    with pytest.raises(ValueError, match=r"one by one, got alternating\(\)"):
        sf.rigl(None, pattern=pattern)
    assert pattern != P.unstructured() and repr(pattern) == "alternating()"
