"""Selection among processes equals selection on one: processes in one thread, and two real ones."""

import math
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn.engine.lie import Lie
from sparsefn.engine.selection import blocks, entries, shared
from sparsefn.engine.selection.winners import Entry, winners
from sparsefn.engine.talks import Gather, Sum


def simulate(talks):
    """Run one talk of several processes, a generator each; how many bytes each process got."""
    asked, got = [next(talk, None) for talk in talks], {Sum: 0, Gather: 0, "rounds": 0}
    while any(one is not None for one in asked):
        (kind,) = {type(one) for one in asked}  # all ask for the same at the same time
        parts = [np.asarray(one[0]) for one in asked]
        assert len({part.dtype for part in parts}) == 1
        if kind is Sum:
            assert len({part.shape for part in parts}) == 1 and parts[0].dtype == np.int64
            answer = np.sum(parts, 0)
        else:
            answer = np.concatenate(parts)
        got[kind] += answer.nbytes
        got["rounds"] += 1
        asked = [_sent(talk, answer.copy()) for talk in talks]
    return got


def _sent(talk, answer):
    try:
        return talk.send(answer)
    except StopIteration:
        return None


class Leaf(NamedTuple):
    """A tensor of a competition, and the cuts of each dimension; without cuts each process has a copy."""

    scores: torch.Tensor
    allow: torch.Tensor | None
    deny: torch.Tensor | None
    absolute: bool
    cuts: tuple[tuple[int, ...], ...] | None


def boxes(leaf):
    """The lies of all processes, in row-major order of the boxes."""
    shape = tuple(leaf.scores.shape)
    ends = [list(zip((0, *cuts), (*cuts, n), strict=True)) for cuts, n in zip(leaf.cuts, shape, strict=True)]
    grid = torch.cartesian_prod(*(torch.arange(len(some)) for some in ends)).reshape(-1, len(ends)).tolist()
    spans = [[some[i] for some, i in zip(ends, row, strict=True)] for row in grid]
    return [Lie(shape, tuple(a for a, _ in row), tuple(b - a for a, b in row), ()) for row in spans]


def cut_out(x, lie):
    if x is None:
        return None
    return x[tuple(slice(a, a + n) for a, n in zip(lie.start, lie.size, strict=True))].reshape(1, -1).contiguous()


def over_processes(leaves, k, order=None):
    """The masks that simulated processes write, put together, and what the processes told each other."""
    n = max(math.prod(len(cuts) + 1 for cuts in leaf.cuts) for leaf in leaves if leaf.cuts is not None)
    order = order or list(range(n))  # which box a process has
    lies = [[None] * n if leaf.cuts is None else [boxes(leaf)[i] for i in order] for leaf in leaves]
    size = sum(leaf.scores.numel() for leaf in leaves)
    pieces, talks = [], []
    for rank in range(n):
        own, start = [], 0
        for leaf, where in zip(leaves, lies, strict=True):
            fields = [x if where[rank] is None else cut_out(x, where[rank]) for x in leaf[:3]]
            (at,) = entries.arrays([Entry(*fields, leaf.absolute)])
            own.append(shared.Piece(entries.flat(at), where[rank], start, where[rank] is not None or rank == 0))
            start += leaf.scores.numel()
        pieces.append(own)
        talks.append(shared.selected(own, k, size))
    told = simulate(talks)
    masks = []
    for i, leaf in enumerate(leaves):
        mask = torch.zeros(leaf.scores.shape, dtype=torch.bool)
        for rank in range(n):
            out, lie = torch.from_numpy(pieces[rank][i].at.out), lies[i][rank]
            if lie is None:
                mask = out.reshape(mask.shape)
                assert torch.equal(mask, torch.from_numpy(pieces[0][i].at.out).reshape(mask.shape))  # copies are alike
            else:
                mask[tuple(slice(a, a + m) for a, m in zip(lie.start, lie.size, strict=True))] = out.reshape(lie.size)
        masks.append(mask)
    return masks, told


def on_one(leaves, k):
    flat = [Entry(*(None if x is None else x.reshape(1, -1) for x in leaf[:3]), leaf.absolute) for leaf in leaves]
    return [x.reshape(leaf.scores.shape) for x, leaf in zip(winners(flat, [k], joint=True), leaves, strict=True)]


KINDS = {
    "continuous": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "levels": lambda x: (12 * x).round(),
    "90% zeros": lambda x: torch.where(x.abs() > 1.645, x, 0.0),
    "all equal": lambda x: torch.full_like(x, -2.0),
    "NaN": lambda x: torch.where(x > 0.3, torch.nan, x),
    "all NaN": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.where(x > 0.8, torch.inf, torch.where(x < -0.8, -torch.inf, x)),
    "NaN and -inf": lambda x: torch.where(x > 0.8, torch.nan, torch.where(x < 0.7, -torch.inf, x)),
    "signed zeros": lambda x: torch.where(x > 1.0, x, torch.where(x > 0, -0.0, 0.0)),
    "subnormal": lambda x: x * 1e-39,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def competitions(draw, most):
    """Leaves of one competition, a count, and the order of the boxes."""
    seed = draw(st.integers(0, 99))
    gen = torch.Generator().manual_seed(seed)
    kind, grid = KINDS[draw(st.sampled_from(list(KINDS)))], draw(st.sampled_from([(1, 2), (2, 1), (3, 1), (2, 2)]))
    leaves, flags = (
        [],
        draw(st.sampled_from([(False, False), (False, False), (True, False), (False, True), (True, True)])),
    )
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.integers(0 if i else 1, most)) for _ in range(2))
        x = kind(torch.randn(shape, generator=gen)).to(draw(st.sampled_from(DTYPES)))
        allow, deny = (torch.rand(shape, generator=gen) < 0.6 if some else None for some in flags)
        cuts = None
        if not i or draw(st.booleans()):
            parts = [
                st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1) for n, p in zip(shape, grid, strict=True)
            ]
            cuts = tuple(tuple(sorted(draw(part))) for part in parts)
        leaves.append(Leaf(x, allow, deny, draw(st.booleans()), cuts))
    n = sum(leaf.scores.numel() for leaf in leaves)
    k = draw(st.one_of(st.sampled_from([-1, 0, 1, n - 1, n, n + 1]), st.integers(0, n)))
    return leaves, k, draw(st.permutations(range(math.prod(grid))))


def check(case):
    leaves, k, order = case
    got, _ = over_processes(leaves, k, order)
    for mask, want in zip(got, on_one(leaves, k), strict=True):
        assert torch.equal(mask, want)


@settings(max_examples=150, deadline=None)
@given(competitions(most=12))
def test_few_scores(case):
    with mock.patch.object(shared, "_PROBES", 4):
        check(case)


@settings(max_examples=150, deadline=None)
@given(competitions(most=60))
def test_brackets_inside_brackets(case):
    with mock.patch.multiple(shared, FEW=128, _SAMPLED=128, _PROBES=8), mock.patch.object(blocks, "BLOCK", 100):
        check(case)


@settings(max_examples=60, deadline=None)
@given(competitions(most=60))
def test_brackets_that_are_crowded(case):
    few = mock.patch.multiple(shared, FEW=128, _SAMPLED=128)
    with few, mock.patch.multiple(blocks, _MOST=200, _CROWDED=1 << 20):
        check(case)


LARGE = {  # what travels, in percent of the scores
    "continuous": 4.0,
    "ties": 4.0,
    "90% zeros": 4.0,
    "all equal": 4.0,
    "NaN": 4.0,
    "NaN and -inf": 4.0,
    "levels": 4.0,
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("axis", [0, 1])
def test_large_leaves(kind, axis):
    x = KINDS[kind](torch.randn(641, 700, generator=torch.Generator().manual_seed(1)))
    leaf = Leaf(x, None, None, False, ((300,), ()) if axis == 0 else ((), (211,)))
    for k in (1, x.numel() // 10, x.numel() // 2, x.numel() - 1):
        (got,), told = over_processes([leaf], k, [1, 0])
        assert torch.equal(got, on_one([leaf], k)[0])
        assert told[Gather] + told[Sum] < LARGE[kind] / 100 * 4 * x.numel(), told
        assert told["rounds"] < 16
