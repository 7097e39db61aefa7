"""Selection in memory against a full sort, for every way through it."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch

from sparsefn._engine.leaves import buffers
from sparsefn._engine.processes.collectives import alone
from sparsefn._engine.selection import block_passes, bracket, entries

SIZES = [1, 2, 1000, bracket.MOST_AT_ONCE + 1, 2 * buffers.BLOCK + 5]
KINDS = {
    "continuous": lambda x: x,
    "ties": lambda x: x.round(),
    "90% zeros": lambda x: torch.where(x.abs() > 1.645, x, 0.0),
    "90% zeros, not negative": lambda x: torch.where(x > 1.282, x, 0.0),
    "all equal": lambda x: torch.full_like(x, -2.0),
    "one atom": lambda x: torch.where(x > 0.2, 0.5, x),
    "two atoms": lambda x: torch.where(x > 1.0, 0.5, torch.where(x < 0.9, -0.5, x)),
    "NaN": lambda x: torch.where(x > 0.3, torch.nan, x),
    "all NaN": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.where(
        x > 0.8, torch.inf, torch.where(x < -0.8, -torch.inf, x)
    ),
    "NaN and -inf": lambda x: torch.where(
        x > 0.8, torch.nan, torch.where(x < 0.7, -torch.inf, x)
    ),
    "subnormal": lambda x: x * torch.finfo(x.dtype).smallest_normal / 8,
    "quantised": lambda x: (x * 30).round() / 30,
    "sorted": lambda x: x.sort().values,
    "reversed": lambda x: x.sort(descending=True).values,
    "signed zeros": lambda x: torch.where(x > 0, -0.0, 0.0),
    "sawtooth": lambda x: torch.arange(len(x)).remainder(37).to(x.dtype),
}
SHARES = [0.0, 1e-4, 0.1, 0.5, 0.9, 1.0]


def made(kind, n, dtype=torch.float32, seed=0):
    x = torch.randn(
        n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return KINDS[kind](x.to(dtype) if kind in ("subnormal",) else x).to(dtype)


def arrays(*fields, absolute=False):
    (at,) = entries.arrays([entries.Entry(*fields, absolute=absolute)])
    return at


def ranked(values, absolute=False):
    """Places from best to worst, by one stable sort of everything."""
    values = values.double().numpy()
    values = np.abs(values) if absolute else values
    missing = np.isnan(values)
    return np.lexsort((-np.where(missing, 0.0, values), missing))


def wanted(order, k, eligible=None):
    order = order if eligible is None else order[eligible.numpy()[order]]
    mask = np.zeros(order.size if eligible is None else len(eligible), bool)
    mask[order[:k]] = True
    return mask


def selected(tensors, k, absolute=False, allow=None, deny=None):
    allow, deny = (flags or [None] * len(tensors) for flags in (allow, deny))
    listed = [
        arrays(*row, absolute=absolute)
        for row in zip(tensors, allow, deny, strict=True)
    ]
    bracket.write_best(listed, k)
    return np.concatenate([at.out for at in listed])


def counts(n, tensor):
    """Shares of the size, and counts at the edges of the commonest value."""
    top = int((tensor > torch.nan_to_num(tensor).median()).sum())
    return sorted(
        {
            min(max(k, 0), n)
            for k in (*(round(s * n) for s in SHARES), 1, n - 1, top - 1, top, top + 1)
        }
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_exactly_the_best_win(n, kind):
    x = made(kind, n)
    for absolute in (False, True):
        order = ranked(x, absolute)
        for k in counts(n, x):
            np.testing.assert_array_equal(
                selected([x], k, absolute), wanted(order, k), err_msg=f"{k} {absolute}"
            )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "kind", ["continuous", "90% zeros", "NaN and -inf", "subnormal", "infinite"]
)
def test_every_dtype(kind, dtype):
    for n in (100, 2 * buffers.BLOCK + 3):
        x = made(kind, n, dtype)
        order = ranked(x)
        for k in counts(n, x):
            np.testing.assert_array_equal(
                selected([x], k), wanted(order, k), err_msg=f"{n} {k}"
            )


@pytest.mark.parametrize("absolute", [False, True])
def test_float64_keeps_its_digits(absolute):
    x = 1 + 1e-12 * made("continuous", bracket.MOST_AT_ONCE + 100, torch.float64)
    np.testing.assert_array_equal(
        selected([x], 10_000, absolute), wanted(ranked(x), 10_000)
    )


@pytest.mark.parametrize(
    "kind", ["continuous", "90% zeros", "all equal", "NaN", "NaN and -inf", "quantised"]
)
@pytest.mark.parametrize("n", [1000, buffers.BLOCK + 5])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_who_may_win_and_who_may_not(n, kind, share):
    x, seed = made(kind, n), torch.Generator().manual_seed(1)
    order = ranked(x)
    allow, deny = (
        torch.rand(n, generator=seed) < share,
        torch.rand(n, generator=seed) > share,
    )
    for allowed, denied in ((allow, None), (None, deny), (allow, deny)):
        open_ = (torch.ones(n) > 0 if allowed is None else allowed) & (
            torch.ones(n) > 0 if denied is None else ~denied
        )
        some = int(open_.sum())
        for k in {0, 1, some // 10, some // 2, max(some - 1, 0), some, n}:
            got = selected([x], k, False, [allowed], [denied])
            np.testing.assert_array_equal(got, wanted(order, k, open_), err_msg=str(k))


@pytest.mark.parametrize(
    "kind", ["continuous", "90% zeros", "all equal", "NaN", "quantised"]
)
@pytest.mark.parametrize(
    "sizes", [[1, 0, 700, buffers.BLOCK + 9, 30_000], [1, 0, 700], [5, 400]], ids=str
)
def test_several_tensors_are_one_competition_in_their_order(sizes, kind):
    whole = made(kind, sum(sizes))
    tensors = list(torch.split(whole, sizes))
    tensors[1] = tensors[1].double()
    tensors[2:3] = [x.double() for x in tensors[2:3]]
    order = ranked(whole)
    for k in counts(len(whole), whole):
        np.testing.assert_array_equal(
            selected(tensors, k), wanted(order, k), err_msg=str(k)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind, monkeypatch):
    monkeypatch.setattr(block_passes, "_THREADED", 1)
    monkeypatch.setattr(buffers, "_MANY", 1)
    x, threads = made(kind, 2 * buffers.BLOCK + 3), torch.get_num_threads()
    order = ranked(x)
    torch.set_num_threads(3)
    try:
        assert len(block_passes.work_on([arrays(x)]).shares) == 3
        for k in (1, len(x) // 10, len(x) // 2):
            np.testing.assert_array_equal(
                selected([x[:9], x[9:]], k), wanted(order, k), err_msg=str(k)
            )
    finally:
        torch.set_num_threads(threads)


LIES = {
    "nothing": [],
    "one value": [0.0],
    "too high": np.linspace(5.0, 6.0, 500),
    "too low": np.linspace(-6.0, -5.0, 500),
    "far too high": [np.inf] * 500,
    "far too low": [-np.inf] * 500,
    "a wrong atom": [0.1] * 500,
    "atoms on both sides": [-0.5] * 250 + [0.5] * 250,
    "half and half": np.linspace(-0.01, 0.01, 500),
}


@pytest.mark.deep(but=["*-continuous", "*-quantised"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extent", LIES)
@pytest.mark.parametrize(
    "most", [block_passes._MOST, 300], ids=["all are collected", "few are collected"]
)
def test_correctness_does_not_depend_on_the_sample(most, extent, kind, monkeypatch):
    monkeypatch.setattr(block_passes, "_MOST", most)
    monkeypatch.setattr(block_passes, "_CROWDED", 1 << 20)
    monkeypatch.setattr(
        block_passes, "sample", lambda work: np.array(LIES[extent], np.float32)
    )
    x = made(kind, bracket.MOST_AT_ONCE + 100)
    order = ranked(x)
    for k in (1, len(x) // 10, len(x) // 2, len(x) - 1):
        np.testing.assert_array_equal(
            selected([x], k), wanted(order, k), err_msg=str(k)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["as drawn", "sorted", "reversed"])
def test_correctness_does_not_depend_on_how_many_are_collected(
    order, kind, monkeypatch
):
    monkeypatch.setattr(block_passes, "_CROWDED", 1 << 20)
    x = made(kind, bracket.MOST_AT_ONCE + 100)
    x = {
        "as drawn": x,
        "sorted": x.sort().values,
        "reversed": x.sort(descending=True).values,
    }[order]
    ranks, deny = ranked(x), x.view(torch.int32) % 3 == 0
    for most in (200, 3000):
        monkeypatch.setattr(block_passes, "_MOST", most)
        for k in (1, 5, len(x) // 3, len(x) - 5):
            np.testing.assert_array_equal(
                selected([x], k), wanted(ranks, k), err_msg=f"{most} {k}"
            )
            got = selected([x[:7], x[7:]], k, deny=[deny[:7], deny[7:]])
            np.testing.assert_array_equal(
                got, wanted(ranks, k, ~deny), err_msg=f"{most} {k} denied"
            )


# of draws from a normal distribution: heavy ties, and levels that are each too light to
# be tried alone
CROWDS = {
    "few are not zero": lambda x: torch.where(x.abs() > 4.0, x, 0.0),
    "zeros and ones": lambda x: (x > 0).float(),
    "all equal but few": lambda x: torch.where(x > 4.0, 2.0, -1.0),
    "zeros of two signs": lambda x: torch.where(
        x > 4.5, 1.0, torch.where(x > 0, 0.0, -0.0)
    ),
    "most are NaN": lambda x: torch.where(x > -3.0, torch.nan, x),
    "most are -inf": lambda x: torch.where(x > -3.0, -torch.inf, x),
    "NaN and -inf": lambda x: torch.where(
        x > 0.0, torch.nan, torch.where(x < -0.1, -torch.inf, x)
    ),
    "levels": lambda x: (torch.special.ndtr(x) * 34).floor(),
    "sorted levels": lambda x: (torch.special.ndtr(x) * 34).floor().sort().values,
    "continuous": lambda x: x,
}


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", CROWDS)
def test_memory_beyond_the_mask_is_bounded(kind, dtype):
    n = 1 << 22
    x = CROWDS[kind](torch.randn(n, generator=torch.Generator().manual_seed(3))).to(
        dtype
    )
    order = ranked(x) if dtype == torch.float32 else None
    for k in (5, n // 10, n // 2, n - 5):
        part = arrays(x)
        tracemalloc.start()
        bracket.write_best([part], k)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # each thread may collect a block too many
        raced = 16 * buffers.BLOCK * (torch.get_num_threads() - 1)
        assert peak < 2 * n + raced, f"{k}: {peak / n} bytes a score"
        if order is not None:
            assert np.array_equal(part.out, wanted(order, k)), k


@pytest.mark.parametrize("alike", [1, 3])
def test_a_bracket_may_end_at_any_rank(alike, monkeypatch):
    n, k = bracket.MOST_AT_ONCE + 2, bracket.MOST_AT_ONCE // 2
    x = torch.arange(n).flip(0).div(alike, rounding_mode="floor")
    want = wanted(ranked(x), k)
    for shift in range(-600, 200):  # the window of 500 values goes by the wanted rank
        monkeypatch.setattr(
            block_passes,
            "sample",
            lambda work, low=(n - k + shift) // alike: np.arange(500.0) + low,
        )
        np.testing.assert_array_equal(
            selected([x.float()], k), want, err_msg=str(shift)
        )


def test_a_bracket_may_end_where_the_winners_do():
    values = np.arange(500, dtype=np.float32)
    work = block_passes.work_on([arrays(torch.from_numpy(values))])
    ends = 0
    for k in range(1, 500):
        left = alone(
            bracket.narrowed(work, np.arange(200, 300, dtype=np.float32), 0.5, k, 1000)
        )
        if isinstance(left, bracket.Threshold):
            assert left.missing == 0 and np.count_nonzero(values > left.value) == k
            ends += 1
    assert ends


@pytest.mark.parametrize("share", [0.01, 0.5, 0.97])
def test_a_sample_may_have_any_size(share, monkeypatch):
    x = made("continuous", bracket.MOST_AT_ONCE + 100)
    k, drawn = round(share * len(x)), x[:200].numpy()
    want = wanted(ranked(x), k)
    for size in range(len(drawn)):  # the window goes over either end, or up to it
        monkeypatch.setattr(
            block_passes, "sample", lambda work, size=size: drawn[:size]
        )
        np.testing.assert_array_equal(selected([x], k), want, err_msg=str(size))


def test_scores_have_signs_unless_asked_otherwise():
    at = arrays(torch.tensor([-3.0, 1.0]))
    bracket.write_best([at], 1)
    assert at.out.tolist() == [False, True]


def watched(monkeypatch):
    """How many scores each pass over the entries collects."""
    collected, collect = [], block_passes.collect

    def watch(*args, **counted_alone):
        found = collect(*args, **counted_alone)
        collected.extend([] if counted_alone else [found.values.size])
        return found

    monkeypatch.setattr(block_passes, "collect", watch)
    return collected


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        *itertools.product(
            ("continuous", "sorted", "subnormal"), (0.001, 0.1, 0.5, 0.999)
        ),
        ("NaN", 0.001),
        ("NaN", 0.1),
    ],
)
def test_a_sample_of_the_scores_makes_one_pass_enough(kind, share, monkeypatch):
    collected = watched(monkeypatch)
    sizes = [100_001, 7, 3, 190_000]
    x = made(kind, sum(sizes))
    # a sample of all would say little about some
    order, low = (ranked(x), x < x.nanmedian())
    for allow, deny in ((None, None), (low, None), (None, low), (low, ~low)):
        open_ = ~deny if allow is None and deny is not None else allow
        k = round(share * (len(x) if open_ is None else int(open_.sum())))
        flags = [
            None if some is None else list(some.split(sizes)) for some in (allow, deny)
        ]
        got = selected(list(x.split(sizes)), k, False, *flags)
        np.testing.assert_array_equal(got, wanted(order, k, open_), err_msg=str(k))
        assert len(collected) == 1 and 0 < collected[0] < len(x) // 20
        collected.clear()


def test_a_value_that_many_share_is_not_collected(monkeypatch):
    collected = watched(monkeypatch)
    n = 500_000
    for kind, k in itertools.product(
        ("90% zeros", "all equal", "one atom"), (n // 10, n // 5, n // 2, 9 * n // 10)
    ):
        x = made(kind, n)
        order = ranked(x)
        np.testing.assert_array_equal(
            selected([x], k), wanted(order, k), err_msg=str(k)
        )
    assert sum(collected) < n // 5  # of twelve selections together


@pytest.mark.parametrize("n", [0, 1, 5, 3000])
def test_best_of_some_values(n):
    for kind, k in itertools.product(KINDS, (-1, 0, 1, n // 2, n - 1, n, n + 1)):
        x = made(kind, n)
        np.testing.assert_array_equal(
            bracket.best(x.numpy(), k),
            wanted(ranked(x), max(k, 0)),
            err_msg=f"{kind} {k}",
        )


def test_the_scores_are_not_written_to():
    x = made("NaN", bracket.MOST_AT_ONCE + 1)
    before = x.clone()
    selected([x], 100, absolute=True)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
