"""Winners by torch operations: the shapes of entries, their keys in one row, and counts
end to end.
"""

import math

import pytest
import torch

from sparsefn._engine.selection import fixed_counts, reference
from sparsefn._engine.selection.entries import Entry

X = torch.tensor([[3.0, -1.0, math.nan, 0.0, -0.0, -4.0]])
FLAGS = torch.tensor([[True, True, False, True, False, True]])


def test_an_entry_of_columns_is_rows_and_back():
    scores = torch.arange(24.0).reshape(2, 3, 4)
    rows = fixed_counts.as_rows(Entry(scores, scores > 5, None, True))
    assert rows.scores.tolist()[0] == [0.0, 4.0, 8.0] and rows.absolute
    assert torch.equal(fixed_counts.laid_back(rows.scores, scores.shape), scores)
    assert torch.equal(fixed_counts.laid_back(rows.allow, scores.shape), scores > 5)


@pytest.mark.parametrize(
    ("shape", "narrow", "few"),
    [((2, 4), True, True), ((2, 5), True, False), ((1, 4), False, 0)],
)
def test_narrow_rows(shape, narrow, few):
    assert fixed_counts.is_narrow(shape) == narrow and fixed_counts.is_few(
        shape
    ) == bool(few)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    "flags", [(None, None), (FLAGS, None), (None, FLAGS), (FLAGS, ~FLAGS)], ids=str
)
def test_one_entry_has_the_winners_of_the_reference(flags, absolute):
    allow, deny = flags
    open_ = (FLAGS | True if allow is None else allow) & (
        FLAGS | True if deny is None else ~deny
    )
    for count in (-1, 0, 1, 3, 6, 9):
        want = reference.top_of_rows(
            reference.rank_keys(X.abs() if absolute else X, open_), count
        )
        for n in (count, torch.tensor(count)):
            assert torch.equal(
                fixed_counts.of_rows(Entry(X, allow, deny, absolute), n), want
            )
            narrow = Entry(
                *(None if x is None else x.reshape(2, 3) for x in (X, allow, deny)),
                absolute,
            )
            keys = reference.rank_keys(X.abs() if absolute else X, open_).reshape(2, 3)
            assert torch.equal(
                fixed_counts.of_rows(narrow, n), reference.top_of_rows(keys, count)
            )


def test_keys_of_several_dtypes_are_one_row_of_the_wider_integers():
    single, double = (
        torch.tensor([[1.0, 0.5]]),
        torch.tensor([[0.75, -2.0]], dtype=torch.float64),
    )
    keys = fixed_counts.keys_of(
        [
            Entry(single),
            Entry(double, double < 0, None, True),
            Entry(single, None, single > 0.5),
        ]
    )
    assert keys.dtype == torch.int64
    assert keys.argsort(descending=True, stable=True).tolist() == [3, 0, 1, 5, 2, 4]
    assert (keys == torch.iinfo(torch.int64).min).tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert (
        fixed_counts.keys_of([Entry(single), Entry(single.half())]).dtype == torch.int32
    )


def test_a_joint_competition_goes_over_all_entries():
    a, b = torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0], [2.0]])
    assert [x.tolist() for x in fixed_counts.jointly([Entry(a), Entry(b)], 3)] == [
        [[False, True]],
        [[True], [True]],
    ]
