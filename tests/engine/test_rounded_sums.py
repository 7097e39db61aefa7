"""Sums on a device: those of `exact_sums` on a CPU, bit for bit. CPU tensors stand for a device's."""

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsefn.engine import lists
from sparsefn.engine import rounded_sums as engine
from sparsefn.engine.exact_sums import limbs, sums, value
from sparsefn.engine.rounded_sums import digits_of, rounded_sums
from sparsefn.testing.launches import counted

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ANY = torch.tensor(True)
INF, MOST, LEAST = math.inf, torch.finfo(torch.float64).max, 2.0**-1074


def bits(x):
    return "nan" if math.isnan(x) else struct.pack("d", x)


def check(values, masks):
    """The sums on a device, which must be those on the CPU."""
    found = rounded_sums(values, masks)
    assert all(x.dtype == torch.float64 and x.shape == () for x in found)
    wanted = [value(limbs(x, mask)) for x, mask in zip(values, masks, strict=True)]
    assert list(map(bits, map(float, found))) == list(map(bits, wanted))
    return wanted


# Multiples of one power of two cancel, tie and carry often; any float at all seldom meets another's exponent.
NEAR = st.builds(lambda n, e: n * 2.0**e, st.integers(-(2**53), 2**53), st.integers(-60, 60))
TIES = st.builds(lambda n, e: n * 2.0**e, st.sampled_from([1, -1, 2**53 - 1, 1 - 2**53]), st.integers(-1074, 970))
ENDS = st.sampled_from([MOST, -MOST, 2.0**970, -(2.0**970), 2.0**969, LEAST, -LEAST, 2.0**-1022, 0.0, -0.0])
FINITE = st.one_of(NEAR, TIES, ENDS, st.floats(allow_nan=False, allow_infinity=False))
LEAVES = st.lists(st.lists(st.tuples(st.one_of(FINITE, FINITE, st.floats()), st.booleans()), max_size=12), max_size=5)


@settings(deadline=None)
@given(LEAVES, st.sampled_from(DTYPES))
def test_sums_are_those_on_the_cpu(leaves, dtype):
    values = [torch.tensor([v for v, _ in leaf], dtype=torch.float64).to(dtype) for leaf in leaves]
    check(values, [torch.tensor([kept for _, kept in leaf], dtype=torch.bool) for leaf in leaves])
    check(values, [ANY] * len(values))


@settings(deadline=None)
@given(st.lists(st.lists(FINITE, max_size=12), min_size=1, max_size=5), st.sampled_from([0.0, LEAST, 1.0, -(2.0**900)]))
def test_what_cancels_leaves_what_is_left(leaves, left):
    values = [torch.tensor([*leaf, left, *(-v for v in reversed(leaf))], dtype=torch.float64) for leaf in leaves]
    assert check(values, [ANY] * len(values)) == [left] * len(values)


EDGES = {
    "a tie goes to the even one below": ([1.0, 2.0**-53], 1.0),
    "a tie goes to the even one above": ([1 + 2.0**-52, 2.0**-53], 1 + 2.0**-51),
    "a tie that the smallest number breaks": ([1.0, 2.0**-53, LEAST], 1 + 2.0**-52),
    "a tie that it breaks downward": ([1 + 2.0**-52, 2.0**-53, -LEAST], 1 + 2.0**-52),
    "just not rounded up to infinity": ([MOST, 2.0**970, -LEAST], MOST),
    "a tie at the end is infinite": ([MOST, 2.0**970], INF),
    "and its negative": ([-MOST, -(2.0**970)], -INF),
    "an overflow that is taken back": ([MOST, MOST, -MOST], MOST),
    "rounded up to a power of two": ([2.0**53 - 1, 0.5], 2.0**53),
    "a borrow through every digit": ([2.0**1000, -LEAST], 2.0**1000),
    "a carry through every digit": ([2.0**1000 - 2.0**948, *(2.0**k for k in range(-1074, 948)), LEAST], 2.0**1000),
    "subnormal numbers": ([3 * LEAST, -LEAST], 2 * LEAST),
    "the largest subnormal and the next": ([2.0**-1022 - LEAST, LEAST], 2.0**-1022),
    "zeros": ([-0.0, -0.0], 0.0),
    "an infinity, and the sum of the others overflows": ([-INF, MOST, MOST], -INF),
    "both infinities": ([INF, -INF], math.nan),
    "NaN": ([INF, math.nan], math.nan),
    "a negative NaN": ([1.0, -math.nan], math.nan),
    "nothing": ([], 0.0),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    numbers, want = EDGES[name]
    x = torch.tensor(numbers, dtype=torch.float64)
    (found,) = check([x], [ANY])
    assert bits(found) == bits(want)
    masked = torch.cat([x, torch.tensor([math.nan, INF, MOST], dtype=torch.float64)])
    check([masked], [torch.arange(len(masked)) < len(x)])


@pytest.mark.parametrize("first", [1.0, 1 + 2.0**-52, 2.0**13])
def test_every_bit_below_breaks_a_tie(first):
    rows = [[first, first * 2.0**-53, sign * first * 2.0**-k] for k in range(54, 140) for sign in (1, -1)]
    check(list(torch.tensor(rows, dtype=torch.float64)), [ANY] * len(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_numbers_of_each_dtype(dtype):
    draws = torch.Generator().manual_seed(0)
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    fills = {
        "wide": torch.randn(40_001, generator=draws) * torch.exp2(torch.randint(-30, 15, (40_001,), generator=draws)),
        "largest": torch.full((40_001,), most, dtype=torch.float64),
        "subnormal": torch.randint(-9, 9, (40_001,), generator=draws).double() * tiny / 2,
        "nan": torch.full((1 << 16,), math.nan),
        "infinite": torch.full((1 << 16,), -INF),
    }
    values = [x.to(dtype) for x in fills.values()]
    masks = [torch.rand(len(x), generator=draws) < 0.5 for x in values]
    check(values, masks)
    check([x[1:].reshape(-1, 5).T for x in values[:3]], [m[1:].reshape(-1, 5).T for m in masks[:3]])


def test_tensors_of_many_dtypes_and_shapes(monkeypatch):
    draws = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (), (0,), (2, 0, 2), (500,)]
    wide = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    values = [x.to(dtype) for x in wide for dtype in reversed(DTYPES)]
    masks = [torch.rand(x.shape, generator=draws) < 0.7 if i % 3 else ANY for i, x in enumerate(values)]
    check(values, masks)
    assert rounded_sums([], []) == []
    small = [torch.empty(1, device="meta")] * 5
    monkeypatch.setattr(lists, "MOST", 40_000)  # digits take memory, too: two small ones in a pack
    check(values, masks)
    assert [x.device.type for x in rounded_sums([torch.ones(2), small[0]], [ANY, ANY.to("meta")])] == ["cpu", "meta"]
    assert counted(lambda: rounded_sums(small, [ANY.to("meta")] * 5)).operations["index_add_"] == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_do_not_grow_with_tensors_and_nothing_waits(dtype):
    def of(n):
        values = [torch.empty(1000 + i, dtype=dtype, device="meta") for i in range(n)]
        masks = [torch.empty(x.shape, dtype=torch.bool, device="meta") for x in values]
        found = counted(lambda: [x.device.type for x in sums(values, masks)])
        assert not found.waits and "exact_sum" not in found.operations
        return found.launches

    assert of(2) == of(50) < 140


# What no test has the numbers for: bins as full as 2^36 of them make them. A bin is (exponent, is negative, piece).
BINS = st.tuples(st.integers(0, 2046), st.booleans(), st.booleans())
FULL = st.lists(st.tuples(BINS, st.one_of(st.integers(0, 2**63 - 1), st.just(2**63 - 1))), max_size=40)


@settings(deadline=None)
@given(FULL, st.sampled_from([torch.float64, torch.float32]))
@example([((e, False, True), 2**63 - 1) for e in range(2047)], torch.float64)
@example([((e, True, True), 2**63 - 1) for e in range(255)], torch.float32)
def test_full_bins(filled, dtype):
    form = engine._FORMS[dtype]
    bins = torch.zeros(2 if dtype == torch.float64 else 1, 1, 2 * form.exponents, dtype=torch.int64)
    for (exponent, negative, high), count in filled:
        exponent %= form.exponents - 1
        # Subnormal numbers lack the highest bit.
        bins[-high, 0, exponent + negative * form.exponents] = count if exponent else count >> 1
    exact = 0
    for piece, row in enumerate(bins[:, 0].tolist()):
        for i, count in enumerate(row):
            exponent = max(i % form.exponents, 1)
            exact += (-count if i >= form.exponents else count) << exponent + 26 * piece
    digits = engine._spread(bins, form)
    assert sum(digit << 26 * i for i, digit in enumerate(digits[0].tolist())) == exact
    assert digits.abs().amax() < 2**54
    try:
        want = exact / (1 << -form.unit)
    except OverflowError:
        want = INF if exact > 0 else -INF
    assert bits(float(engine._rounded(digits, torch.zeros(1, 3, dtype=torch.bool), form.unit))) == bits(want)


def test_digits_are_the_exact_sum():
    x = torch.tensor([[3.0, -7.0, LEAST], [1e300, -1e300, 1e-300]], dtype=torch.float64)
    digits, odd, unit = digits_of(list(x), [ANY, ANY])
    wholes = [sum(digit << 26 * i for i, digit in enumerate(row.tolist())) for row in digits]
    assert wholes == [2 * (-4 * 2**1074 + 1), 2 * int(1e-300 * 2.0**1000 * 2**74)] and unit == -1075
    assert not odd.any()


def test_arguments_are_not_changed_and_gradients_do_not_flow():
    x, mask = torch.ones(3, requires_grad=True), torch.tensor([True, False, True])
    (found,) = rounded_sums([x], [mask])
    assert found == 2.0 and not found.requires_grad
    assert x.tolist() == [1.0, 1.0, 1.0] and mask.tolist() == [True, False, True]
