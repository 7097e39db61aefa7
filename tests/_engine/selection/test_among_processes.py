"""Selection among processes equals selection on one: processes in one thread, and two
real ones.
"""

import math
import time
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn._engine.processes.collectives import Gather, Sum
from sparsefn._engine.processes.extent import Extent
from sparsefn._engine.processes.lines import GATHER
from sparsefn._engine.selection import among_processes, block_passes, entries
from sparsefn._engine.selection.dispatch import Entry, totals, winners
from tests.nn.distributed.harness import on_ranks


def simulate(exchanges):
    """Run one exchange of several processes, a generator each; how many bytes each
    process got.
    """
    asked, got = (
        [next(exchange, None) for exchange in exchanges],
        {Sum: 0, Gather: 0, "rounds": 0},
    )
    while any(one is not None for one in asked):
        (kind,) = {type(one) for one in asked}  # all ask for the same at the same time
        parts = [np.asarray(one[0]) for one in asked]
        assert len({part.dtype for part in parts}) == 1
        if kind is Sum:
            assert (
                len({part.shape for part in parts}) == 1 and parts[0].dtype == np.int64
            )
            answer = np.sum(parts, 0)
        else:
            answer = np.concatenate(parts)
        got[kind] += answer.nbytes
        got["rounds"] += 1
        asked = [_sent(exchange, answer.copy()) for exchange in exchanges]
    return got


def _sent(exchange, answer):
    try:
        return exchange.send(answer)
    except StopIteration:
        return None


class Leaf(NamedTuple):
    """A tensor of a competition, and the cuts of each dimension; without cuts each
    process has a copy.
    """

    scores: torch.Tensor
    allow: torch.Tensor | None
    deny: torch.Tensor | None
    absolute: bool
    cuts: tuple[tuple[int, ...], ...] | None


def boxes(leaf):
    """The extents of all processes, in row-major order of the boxes."""
    shape = tuple(leaf.scores.shape)
    ends = [
        list(zip((0, *cuts), (*cuts, n), strict=True))
        for cuts, n in zip(leaf.cuts, shape, strict=True)
    ]
    grid = (
        torch.cartesian_prod(*(torch.arange(len(some)) for some in ends))
        .reshape(-1, len(ends))
        .tolist()
    )
    spans = [[some[i] for some, i in zip(ends, row, strict=True)] for row in grid]
    return [
        Extent(shape, tuple(a for a, _ in row), tuple(b - a for a, b in row), ())
        for row in spans
    ]


def cut_out(x, extent):
    if x is None:
        return None
    return (
        x[
            tuple(
                slice(a, a + n) for a, n in zip(extent.start, extent.size, strict=True)
            )
        ]
        .reshape(1, -1)
        .contiguous()
    )


def over_processes(leaves, k, order=None):
    """The masks that simulated processes write, put together, and what the processes
    told each other.
    """
    n = max(
        math.prod(len(cuts) + 1 for cuts in leaf.cuts)
        for leaf in leaves
        if leaf.cuts is not None
    )
    order = order or list(range(n))  # which box a process has
    extents = [
        [None] * n if leaf.cuts is None else [boxes(leaf)[i] for i in order]
        for leaf in leaves
    ]
    size = sum(leaf.scores.numel() for leaf in leaves)
    pieces, exchanges = [], []
    for rank in range(n):
        own, start = [], 0
        for leaf, where in zip(leaves, extents, strict=True):
            fields = [
                x if where[rank] is None else cut_out(x, where[rank]) for x in leaf[:3]
            ]
            (at,) = entries.arrays([Entry(*fields, leaf.absolute)])
            own.append(
                among_processes.Piece(
                    entries.reshaped(at),
                    where[rank],
                    start,
                    where[rank] is not None or rank == 0,
                )
            )
            start += leaf.scores.numel()
        pieces.append(own)
        exchanges.append(among_processes.selected(own, k, size))
    told = simulate(exchanges)
    masks = []
    for i, leaf in enumerate(leaves):
        mask = torch.zeros(leaf.scores.shape, dtype=torch.bool)
        for rank in range(n):
            out, extent = torch.from_numpy(pieces[rank][i].at.out), extents[i][rank]
            if extent is None:
                mask = out.reshape(mask.shape)
                assert torch.equal(
                    mask, torch.from_numpy(pieces[0][i].at.out).reshape(mask.shape)
                )  # copies are alike
            else:
                mask[
                    tuple(
                        slice(a, a + m)
                        for a, m in zip(extent.start, extent.size, strict=True)
                    )
                ] = out.reshape(extent.size)
        masks.append(mask)
    return masks, told


def on_one(leaves, k):
    flat = [
        Entry(
            *(None if x is None else x.reshape(1, -1) for x in leaf[:3]), leaf.absolute
        )
        for leaf in leaves
    ]
    return [
        x.reshape(leaf.scores.shape)
        for x, leaf in zip(winners(flat, [k], joint=True), leaves, strict=True)
    ]


KINDS = {
    "continuous": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "levels": lambda x: (12 * x).round(),
    "90% zeros": lambda x: torch.where(x.abs() > 1.645, x, 0.0),
    "all equal": lambda x: torch.full_like(x, -2.0),
    "NaN": lambda x: torch.where(x > 0.3, torch.nan, x),
    "all NaN": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.where(
        x > 0.8, torch.inf, torch.where(x < -0.8, -torch.inf, x)
    ),
    "NaN and -inf": lambda x: torch.where(
        x > 0.8, torch.nan, torch.where(x < 0.7, -torch.inf, x)
    ),
    "signed zeros": lambda x: torch.where(x > 1.0, x, torch.where(x > 0, -0.0, 0.0)),
    "subnormal": lambda x: x * 1e-39,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def competitions(draw, most):
    """Leaves of one competition, a count, and the order of the boxes."""
    seed = draw(st.integers(0, 99))
    gen = torch.Generator().manual_seed(seed)
    kind, grid = (
        KINDS[draw(st.sampled_from(list(KINDS)))],
        draw(st.sampled_from([(1, 2), (2, 1), (3, 1), (2, 2)])),
    )
    leaves, flags = (
        [],
        draw(
            st.sampled_from(
                [
                    (False, False),
                    (False, False),
                    (True, False),
                    (False, True),
                    (True, True),
                ]
            )
        ),
    )
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.integers(0 if i else 1, most)) for _ in range(2))
        x = kind(torch.randn(shape, generator=gen)).to(draw(st.sampled_from(DTYPES)))
        allow, deny = (
            torch.rand(shape, generator=gen) < 0.6 if some else None for some in flags
        )
        cuts = None
        if not i or draw(st.booleans()):
            parts = [
                st.lists(st.integers(0, n), min_size=p - 1, max_size=p - 1)
                for n, p in zip(shape, grid, strict=True)
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
    with mock.patch.object(among_processes, "_PROBES", 4):
        check(case)


@settings(max_examples=150, deadline=None)
@given(competitions(most=60))
def test_brackets_inside_brackets(case):
    few = mock.patch.multiple(
        among_processes, FEW=128, _SAMPLED=128, _PROBES=8, BLOCK=100
    )
    with few, mock.patch.object(block_passes, "BLOCK", 100):
        check(case)


@settings(max_examples=60, deadline=None)
@given(competitions(most=60))
def test_brackets_that_are_crowded(case):
    few = mock.patch.multiple(among_processes, FEW=128, _SAMPLED=128)
    with few, mock.patch.multiple(block_passes, _MOST=200, _CROWDED=1 << 20):
        check(case)


@pytest.mark.parametrize(
    "kind",
    ["continuous", "levels", "ties", "90% zeros", "all equal", "NaN", "NaN and -inf"],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_little_is_told_of_a_large_leaf(kind, axis):
    x = KINDS[kind](torch.randn(641, 700, generator=torch.Generator().manual_seed(1)))
    leaf = Leaf(x, None, None, False, ((300,), ()) if axis == 0 else ((), (211,)))
    for k in (1, x.numel() // 10, x.numel() // 2, x.numel() - 1):
        (got,), told = over_processes([leaf], k, [1, 0])
        assert torch.equal(got, on_one([leaf], k)[0])
        assert told[Gather] + told[Sum] < 0.03 * 4 * x.numel(), told
        assert told["rounds"] < 16


def test_nothing_is_told_where_none_or_all_win():
    x = torch.randn(64, 65, generator=torch.Generator().manual_seed(1))
    for k in (-1, 0, x.numel(), x.numel() + 1):
        (mask,), told = over_processes([Leaf(x, None, None, False, ((30,), ()))], k)
        assert mask.all() if k > 0 else not mask.any()
        assert told["rounds"] == 0
        (mask,), told = over_processes([Leaf(x, x > 0, None, False, ((30,), ()))], k)
        assert torch.equal(mask, (x > 0) & (k > 0))
        assert told["rounds"] == (k > 0)  # how many compete


def test_scores_may_be_more_than_one_process_collects():
    """As many processes as there are rows, and less than a bracket leaves."""
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(2))
    leaf = Leaf(x, None, None, True, (tuple(range(10, 300, 10)), ()))
    for k in (1, 1200, 11_999):
        (got,), _ = over_processes([leaf], k)
        assert torch.equal(got, on_one([leaf], k)[0])


def split(x, extent):
    return Entry(cut_out(x, extent), extent=extent)


@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_scores_count_on_every_thread(flush):
    x = torch.arange(8.0).reshape(1, 8) * 1e-44
    torch.set_flush_denormal(flush)
    try:
        (mask,) = winners([Entry(x, extent=Extent((8,), (0,), (8,), ()))], [3])
        assert mask.tolist() == [[False] * 5 + [True] * 3]
        assert (torch.tensor([1e-44]) == 0).item() == flush  # as before
    finally:
        torch.set_flush_denormal(False)


def test_an_entry_with_a_lie_beside_others():
    x, extent = torch.arange(6.0).reshape(1, 6), Extent((2, 3), (0, 0), (2, 3), ())
    for counts in (
        [2, 3, 1],
        torch.tensor([2, 3, 3, 1]),
        [2, torch.tensor([3, 3]), torch.tensor(1)],
    ):
        won = winners(
            [Entry(x, extent=extent), Entry(x.reshape(2, 3)), Entry(-x, extent=extent)],
            counts,
        )
        assert [mask.sum().item() for mask in won] == [2, 6, 1] and won[1].shape == (
            2,
            3,
        )
    flags = [x > 2, x.reshape(2, 3) > 1]
    assert totals(flags, [extent, None]).tolist() == totals(flags).tolist() == [3, 1, 3]
    assert totals(flags, [None, None]).tolist() == [3, 1, 3]


@pytest.mark.deep
def test_compiled_code_leaves_for_it():
    extent = Extent((40,), (0,), (40,), ())

    def both(x):
        (mask,) = winners([Entry(2 * x, extent=extent)], [7])
        return x * mask + totals([mask], [extent])

    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.compile(both, backend="eager")(x), both(x))


def test_scores_without_values_are_refused():
    with pytest.raises(
        TypeError,
        match="expected tensors with values in memory to compete over processes",
    ):
        winners(
            [Entry(torch.ones(1, 4).to_sparse(), extent=Extent((4,), (0,), (4,), ()))],
            [1],
        )
    with pytest.raises(
        TypeError, match=r"expected floating-point scores, got torch\.int64"
    ):
        winners(
            [Entry(torch.ones(1, 4).long(), extent=Extent((4,), (0,), (4,), ()))], [1]
        )


def on_two():
    """Cases on two processes that hold halves."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    gen = torch.Generator().manual_seed(5)
    sent = {"all_reduce": 0, GATHER: 0}
    for name in sent:

        def counted(*args, name=name, send=getattr(dist, name), **options):
            sent[name] += 1
            return send(*args, **options)

        setattr(dist, name, counted)

    def halves(shape, dim):
        cut = shape[dim] // 3
        start, size = [0] * len(shape), list(shape)
        start[dim], size[dim] = (0, cut) if rank == 0 else (cut, shape[dim] - cut)
        return Extent(shape, tuple(start), tuple(size), (group,))

    tensors = [
        torch.randn(shape, generator=gen)
        for shape in ((37, 24), (1, 9), (300, 400), (12,), (5, 2, 3))
    ]
    tensors += [x.round() for x in tensors] + [
        tensors[0].double(),
        tensors[2].bfloat16(),
        torch.zeros(70, 50),
    ]
    extents = [halves(tuple(x.shape), i % x.ndim) for i, x in enumerate(tensors)]
    counts = [x.numel() // 3 for x in tensors]
    whole = [Entry(x.reshape(1, -1)) for x in tensors]
    parts = [split(x, extent) for x, extent in zip(tensors, extents, strict=True)]

    def same(won, wanted):
        assert len(won) == len(wanted)
        for mask, want, x, extent in zip(won, wanted, tensors, extents, strict=False):
            assert torch.equal(
                mask,
                cut_out(want.reshape(x.shape), extent)
                if mask.numel() != want.numel()
                else want,
            )

    def each():
        same(winners(parts, counts), winners(whole, counts))
        flags = [entry.scores > 0 for entry in parts]
        assert torch.equal(
            totals(flags, extents), totals([entry.scores > 0 for entry in whole])
        )

    def joint():
        mixed = [
            one if i % 3 == 1 else part
            for i, (one, part) in enumerate(zip(whole, parts, strict=True))
        ]
        for k in (1, 1000, sum(counts)):
            same(winners(mixed, [k], joint=True), winners(whole, [k], joint=True))

    def messages(i, n):
        start = dict(sent)
        winners(parts[i : i + 1] * n, [counts[i]] * n)
        return tuple(sent[name] - start[name] for name in sent)

    def as_many():
        assert messages(0, 5) == messages(0, 50) == (1, 2), str(messages(0, 5))
        assert messages(2, 5) == messages(2, 20) == (5, 4), str(messages(2, 5))

    def fails():
        before = time.monotonic()
        bad = [*parts[:2], parts[0]._replace(scores=parts[0].scores.long())]
        kind, text = (
            (TypeError, "expected floating-point")
            if rank == 1
            else (RuntimeError, "another process failed")
        )
        with pytest.raises(kind, match=text):
            winners(bad if rank == 1 else parts[:3], [1] * 3)
        assert time.monotonic() - before < 20
        same(winners(parts, counts), winners(whole, counts))

    yield "each", each
    yield "joint", joint
    yield "as many messages for many leaves", as_many
    yield "an error on one", fails


@pytest.mark.quick
def test_two_processes():
    on_ranks(2, on_two)
