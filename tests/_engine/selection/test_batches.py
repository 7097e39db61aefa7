"""Many competitions on a device as one: called on CPU tensors, against the reference of
each competition by itself.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn._engine.leaves import lists
from sparsefn._engine.selection import batches, fixed_counts, reference
from sparsefn._engine.selection.entries import Entry, eligible
from sparsefn.testing.launches import counted

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
ODD = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 2.0], dtype=torch.float64
)
FILLS = ["normal", "ties", "zeros", "odd", "equal", "nan"]


def filled(shape, dtype, fill, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    if fill == "ties":
        x = x.round()
    elif fill == "zeros":
        # of both signs
        x = torch.where(torch.rand(shape, generator=draw) < 0.9, x * 0, x)
    elif fill == "odd":
        x = ODD[torch.randint(len(ODD), tuple(shape), generator=draw)]
    elif fill == "equal":
        x = torch.ones_like(x)
    elif fill == "nan":
        x = x * math.nan
    return x.to(dtype)


def flagged(shape, kind, seed):
    draw = torch.Generator().manual_seed(seed)
    share = {"half": 0.5, "none": 0.0, "most": 0.9}
    return None if kind is None else torch.rand(shape, generator=draw) < share[kind]


def expected(entry, count):
    rows = fixed_counts.as_rows(entry)
    scores = rows.scores.abs() if rows.absolute else rows.scores
    won = reference.top_of_rows(
        reference.rank_keys(scores, eligible(rows.allow, rows.deny)), count
    )
    return fixed_counts.laid_back(won, entry.scores.shape)


SHAPES = st.one_of(
    st.tuples(st.just(1), st.integers(0, 40)),  # a row
    st.tuples(
        st.integers(0, 4), st.sampled_from([1, 2, 4, 7, 33])
    ),  # rows of one length, short and long
    st.tuples(
        st.integers(1, 3), st.sampled_from([4, 33]), st.integers(1, 3)
    ),  # columns
)


@st.composite
def entries(draw, shapes=SHAPES, mixed=True):
    dtype = draw(st.sampled_from(DTYPES))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        shape, seed = draw(shapes), draw(st.integers(0, 2**16))
        own = draw(st.sampled_from([dtype, *(DTYPES if mixed else [])]))
        flags = st.sampled_from([None, None, "half", "none", "most"])
        allow, deny = (
            flagged(shape, draw(flags), seed + 1),
            flagged(shape, draw(flags), seed + 2),
        )
        scores = filled(shape, own, draw(st.sampled_from(FILLS)), seed)
        made.append(Entry(scores, allow, deny, draw(st.booleans())))
    return made


def counts_of(draw, entry):
    numbers = st.integers(-1, entry.scores.shape[1] + 2)
    kind, rows = (
        draw(st.sampled_from(["int", "0-d", "one", "each"])),
        fixed_counts.competitions(entry.scores.shape),
    )
    if kind == "int":
        return draw(numbers)
    if kind == "each":
        return torch.tensor([draw(numbers) for _ in range(rows)], dtype=torch.int64)
    return torch.tensor(draw(numbers)).reshape(() if kind == "0-d" else 1)


@pytest.mark.deep
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_contests_have_the_winners_of_each_competition(data):
    drawn = data.draw(entries())
    counts = [counts_of(data.draw, entry) for entry in drawn]
    won = batches.winners(drawn, counts)
    for mask, entry, count in zip(won, drawn, counts, strict=True):
        assert mask.dtype == torch.bool and torch.equal(mask, expected(entry, count))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_joint_contest_has_the_winners_of_one_row(data):
    drawn = data.draw(entries(SHAPES.filter(lambda shape: len(shape) == 2)))
    count = data.draw(st.integers(-1, sum(entry.scores.numel() for entry in drawn) + 1))
    wide = (
        torch.float64
        if any(x.scores.dtype == torch.float64 for x in drawn)
        else torch.float32
    )
    keys = [
        reference.rank_keys(
            x.scores.abs() if x.absolute else x.scores, eligible(x.allow, x.deny), wide
        ).reshape(-1)
        for x in drawn
    ]
    want = reference.top_of_rows(torch.cat(keys)[None], count)[0]
    for n in (count, torch.tensor(count), torch.tensor([count])):
        won = batches.joint_masks(drawn, n)
        assert [mask.shape for mask in won] == [entry.scores.shape for entry in drawn]
        assert torch.equal(torch.cat([mask.reshape(-1) for mask in won]), want)


@pytest.mark.parametrize("most", [1, 30, 100])
def test_contests_of_some_size_have_the_same_winners(most, monkeypatch):
    drawn = [
        Entry(filled(shape, torch.float32, "ties", i))
        for i, shape in enumerate([(1, 20), (1, 9), (3, 12)] * 3)
    ]
    want = batches.winners(drawn, [4] * 9)
    monkeypatch.setattr(lists, "MOST", most)
    assert all(map(torch.equal, batches.winners(drawn, [4] * 9), want))
    assert batches.totals(want).tolist() == ([4, 4] + [4] * 3) * 3


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=7),
    st.integers(0, 99),
)
def test_totals_are_the_sums_of_rows(shapes, seed):
    flags = [
        filled(shape, torch.float32, "normal", seed + i) > 0
        for i, shape in enumerate(shapes)
    ]
    made = batches.totals(flags)
    assert made.dtype == torch.int64
    assert torch.equal(made, torch.cat([rows.sum(-1) for rows in flags]))


def test_masks_have_memory_of_their_own():
    drawn = [Entry(torch.ones(1, 5)), Entry(torch.ones(1, 3)), Entry(torch.ones(4, 2))]
    for won in (batches.winners(drawn, [1, 1, 1]), batches.joint_masks(drawn, 3)):
        assert len({mask.untyped_storage().data_ptr() for mask in won}) == 3
        assert all(mask.untyped_storage().nbytes() == mask.nbytes for mask in won)


def made(n, *shape):
    return [
        Entry(
            torch.empty(shape, device="meta"),
            torch.empty(shape, dtype=torch.bool, device="meta"),
        )
    ] * n


@pytest.mark.parametrize("shape", [(1, 1000), (50, 100), (50, 4), (10, 4, 5)], ids=str)
def test_the_number_of_launches_is_not_that_of_the_leaves(shape):
    counts = {
        n: counted(lambda n=n: batches.winners(made(n, *shape), [3] * n))
        for n in (2, 50)
    }
    back = 3 * 48 if len(shape) == 3 else 0  # columns become rows, and rows columns
    assert counts[50].launches <= counts[2].launches + back
    assert counts[50].launches <= 30 + 3 * back and not counts[50].waits
    assert batches.takes(made(1, 1, 2)) and not batches.takes([Entry(torch.ones(1, 2))])
