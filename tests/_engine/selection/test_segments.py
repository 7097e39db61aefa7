"""Short competitions that lie end to end have the winners that each has by itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsefn._engine.selection import Entry, batches, segments, totals, winners
from sparsefn.testing.launches import counted

VALUES = [0.0, -0.0, 1.0, -1.0, 2.0, torch.inf, -torch.inf, torch.nan, 1e-45]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def competitions(draw):
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    n = sum(sizes)
    values = draw(st.lists(st.sampled_from(VALUES), min_size=n, max_size=n))
    scores = torch.tensor(values, dtype=draw(st.sampled_from(DTYPES)))
    flags = st.none() | st.lists(st.booleans(), min_size=n, max_size=n)
    allow, deny = (
        None if made is None else torch.tensor(made, dtype=torch.bool)
        for made in (draw(flags), draw(flags))
    )
    counts = st.lists(st.integers(-1, 9), min_size=len(sizes), max_size=len(sizes))
    count = draw(st.integers(-1, 9) | counts)
    count = torch.tensor(count) if isinstance(count, list) else count
    return Entry(scores, allow, deny, draw(st.booleans()), segments=sizes), count


def one_by_one(entry, count):
    counts = count if isinstance(count, torch.Tensor) else [count] * len(entry.segments)
    columns = [
        [None] * len(entry.segments) if x is None else torch.split(x, entry.segments)
        for x in entry[:3]
    ]
    rows = []
    for scores, allow, deny, k in zip(*columns, counts, strict=True):
        row = Entry(*(x if x is None else x[None] for x in (scores, allow, deny)))
        rows += winners([row._replace(absolute=entry.absolute)], [int(k)])
    return torch.cat([row[0] for row in rows])


@given(competitions())
def test_each_segment_has_its_own_winners(case):
    entry, count = case
    want = one_by_one(entry, count)
    (got,) = winners([entry], [count])
    assert torch.equal(got, want)
    (elsewhere,) = batches.winners([entry], [count])
    assert torch.equal(elsewhere, want)


@given(st.lists(competitions(), min_size=2, max_size=4))
def test_segments_of_several_entries_and_rows_are_told_apart(cases):
    row = Entry(torch.tensor([[1.0, 3.0, 2.0]]))
    entries = [row, *(entry for entry, _ in cases), row]
    counts = [1, *(count for _, count in cases), 2]
    first, *won, last = batches.winners(entries, counts)
    assert first.tolist() == [[False, True, False]]
    assert last.tolist() == [[False, True, True]]
    for mask, case in zip(won, cases, strict=True):
        assert torch.equal(mask, one_by_one(*case))


@pytest.mark.parametrize("n", [2, 20])
def test_segments_of_several_entries_take_one_sort(n):
    scores = torch.empty(6, device="meta")
    entries = [Entry(scores, segments=[2, 4])] * n
    counts = torch.ones(2, dtype=torch.int64, device="meta")
    one = counted(lambda: batches.winners(entries[:2], [counts] * 2))
    many = counted(lambda: batches.winners(entries, [counts] * n))
    assert many.launches == one.launches and not many.waits


def test_counts_of_all_entries_may_be_one_tensor():
    entry = Entry(torch.tensor([1.0, 2.0, 3.0, 4.0]), segments=[1, 3])
    row = Entry(torch.tensor([[5.0, 6.0]]))
    masks = winners([entry, row], torch.tensor([0, 2, 1]))
    assert [mask.tolist() for mask in masks] == [
        [False, False, True, True],
        [[False, True]],
    ]


@pytest.mark.parametrize("sizes", [[2, 0, 3], [5], [0]])
def test_flags_are_counted_in_each_segment(sizes):
    flags = torch.tensor([True, False, True, True, False])[: sum(sizes)]
    want = [int(part.sum()) for part in torch.split(flags, sizes)]
    assert segments.count_segments(flags.numpy(), sizes).tolist() == want
    assert batches.totals_of_segments(flags, sizes).tolist() == want
    rows = torch.ones(2, 3, dtype=torch.bool)
    found = totals([flags, rows], segments=[sizes, None])
    assert found.tolist() == [*want, 3, 3] and found.dtype == torch.int64


def test_scores_are_read_and_not_written():
    scores = np.array([2.0, 1.0, 3.0], np.float32)
    given_, copy = torch.from_numpy(scores), scores.copy()
    winners([Entry(given_, segments=[2, 1])], [1])
    assert (scores == copy).all()
