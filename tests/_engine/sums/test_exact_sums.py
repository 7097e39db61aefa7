"""Sums: those of Fraction by their definition, in every order, on every way. (Over
processes: test_shards.py.)
"""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsefn._engine.leaves import lists
from sparsefn._engine.sums import exact_sums
from sparsefn._engine.sums.exact_sums import means, sums, total
from sparsefn.testing.launches import counted

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ANY = torch.tensor(True)
NAN, INF, MOST, LEAST = math.nan, math.inf, torch.finfo(torch.float64).max, 2.0**-1074


def bits(x):
    return "nan" if math.isnan(x) else struct.pack("d", x)


def exact(fractions):
    try:
        return float(sum(fractions, Fraction(0)))
    except OverflowError:
        return INF if sum(fractions) > 0 else -INF


def defined(x):
    """The sum of a tensor by its definition: each entry is cut to a multiple of a
    unit.
    """
    values = x.to(torch.float64).reshape(-1).tolist()
    odd = [v for v in values if not math.isfinite(v)]
    exponent = max([-967, *(math.frexp(v)[1] - 1 for v in values if v)])
    unit = Fraction(2) ** (8 * ((exponent + 1023) // 8) - 1077)
    return sum(odd) if odd else exact([int(Fraction(v) / unit) * unit for v in values])


def talked(parts):
    """What processes find together, each of which has a part."""
    exchanges = [total(x, mask) for x, mask in parts]
    asked = [next(exchange) for exchange in exchanges]
    while True:
        told = np.sum([one.counts for one in asked], 0)
        try:
            asked = [exchange.send(told.copy()) for exchange in exchanges]
        except StopIteration as end:
            return end.value


def check(values, masks):
    """All ways to the sums of rows, which must be those that are defined."""
    wanted = [
        defined(x[mask.expand(x.shape)]) for x, mask in zip(values, masks, strict=True)
    ]
    full = [i for i, x in enumerate(values) if x.numel()]
    rows, flags = (
        [values[i] for i in full],
        [masks[i].expand(values[i].shape) for i in full],
    )
    turned = (
        [x.flip(0) for x in values],
        [mask.expand(x.shape).flip(0) for x, mask in zip(values, masks, strict=True)],
    )
    pairs = list(zip(rows, flags, strict=True))
    ways = {
        "on the CPU": sums(values, masks),
        "in another order": sums(*turned),
        "of processes": [talked([(x[:3], m[:3]), (x[3:], m[3:])]) for x, m in pairs],
        "vmapped": [
            torch.vmap(lambda x, m: sums([x], [m])[0])(x[None], m[None])[0]
            for x, m in pairs
        ],
        "one on a device": [next(iter(exact_sums._laid([x], [m]))) for x, m in pairs],
        "on a device": list(exact_sums._laid(rows, flags)) if len(rows) > 1 else [],
    }
    for way, found in ways.items():
        numbers = (
            wanted
            if len(found) == len(wanted)
            else [wanted[i] for i in full][: len(found)]
        )
        assert [bits(float(x)) for x in found] == [bits(x) for x in numbers], way
    assert all(
        x.dtype == torch.float64 and x.shape == ()
        for x in ways["on the CPU"] + ways["on a device"]
    )
    return wanted


# Multiples of one power of two cancel, tie and carry often; any float at all seldom
# meets another's exponent.
NEAR = st.builds(
    lambda n, e: n * 2.0**e, st.integers(-(2**53), 2**53), st.integers(-60, 60)
)
TIES = st.builds(
    lambda n, e: n * 2.0**e,
    st.sampled_from([1, -1, 2**53 - 1, 1 - 2**53]),
    st.integers(-1074, 970),
)
ENDS = st.sampled_from(
    [MOST, -MOST, 2.0**970, -(2.0**970), 2.0**969, LEAST, -LEAST, 2.0**-1022, 0.0, -0.0]
)
FINITE = st.one_of(NEAR, TIES, ENDS, st.floats(allow_nan=False, allow_infinity=False))
LEAVES = st.lists(
    st.lists(
        st.tuples(st.one_of(FINITE, FINITE, st.floats()), st.booleans()), max_size=12
    ),
    max_size=5,
)


@settings(deadline=None)
@given(LEAVES, st.sampled_from(DTYPES))
def test_sums_are_what_they_are_defined_to_be_on_every_way(leaves, dtype):
    values = [
        torch.tensor([v for v, _ in leaf], dtype=torch.float64).to(dtype)
        for leaf in leaves
    ]
    check(
        values,
        [torch.tensor([kept for _, kept in leaf], dtype=torch.bool) for leaf in leaves],
    )
    check(values, [ANY] * len(values))


@settings(deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=30))
def test_what_is_cut_is_less_than_any_float64_sum_may_lose(numbers):
    x = torch.tensor(numbers, dtype=torch.float64)
    numbers = list(map(Fraction, numbers))
    found, want = float(sums([x], [ANY])[0]), exact(numbers)
    if math.isfinite(found) and math.isfinite(want):
        lost = abs(sum(numbers) - Fraction(found))
        last = Fraction(math.ulp(found)) / 2
        assert lost <= last + len(numbers) * max(
            Fraction(2) ** -54 * max(map(abs, numbers)), Fraction(2) ** -1021
        )


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**24), 2**24), max_size=30),
    st.integers(-120, 80),
    st.integers(0, 30),
)
def test_float32_within_2_to_the_30_of_the_largest_are_added_exactly(
    numbers, exponent, span
):
    factors = [2.0 ** (exponent + i % (span + 1)) for i in range(len(numbers))]
    x = torch.tensor(
        [n * f for n, f in zip(numbers, factors, strict=True)], dtype=torch.float32
    )
    x = x[x.abs() * 2.0**30 >= x.abs().max()] if len(x) else x
    assert check([x], [ANY]) == [exact(map(Fraction, x.tolist())) if len(x) else 0.0]


EDGES = {
    "a tie goes to the even one below": ([1.0, 2.0**-53], 1.0),
    "a tie goes to the even one above": ([1 + 2.0**-52, 2.0**-53], 1 + 2.0**-51),
    "a tie that the unit breaks": ([1.0, 2.0**-53, 2.0**-54], 1 + 2.0**-52),
    "a tie that it breaks downward": (
        [1 + 2.0**-52, 2.0**-53, -(2.0**-54)],
        1 + 2.0**-52,
    ),
    "what is below the unit is cut": ([1.0, 2.0**-53, 2.0**-80], 1.0),
    "just not rounded up to infinity": ([MOST, 2.0**970, -(2.0**969)], MOST),
    "a tie at the end is infinite": ([MOST, 2.0**970], INF),
    "and its negative": ([-MOST, -(2.0**970)], -INF),
    "an overflow that is taken back": ([MOST, MOST, -MOST], MOST),
    "rounded up to a power of two": ([2.0**53 - 1, 0.5], 2.0**53),
    "a borrow through both halves": ([2.0**40, -(2.0**-10)], 2.0**40 - 2.0**-10),
    "a carry through both halves": ([2.0**20 - 2.0**-32, 2.0**-32], 2.0**20),
    "the least unit": ([2.0**-1000, 2.0**-1021, 2.0**-1022, -(2.0**-1021)], 2.0**-1000),
    "subnormal numbers": ([3 * LEAST, -LEAST], 0.0),
    "subnormal numbers of float32": ([3 * 2.0**-149, -(2.0**-149)], 2.0**-148),
    "zeros": ([-0.0, -0.0], 0.0),
    "an infinity, and the sum of the others overflows": ([-INF, MOST, MOST], -INF),
    "infinities of one sign": ([INF, INF], INF),
    "the largest number alone": ([MOST], MOST),
    "both infinities": ([INF, -INF], NAN),
    "NaN": ([INF, NAN], NAN),
    "a negative NaN": ([1.0, -NAN], NAN),
    "nothing": ([], 0.0),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    numbers, want = EDGES[name]
    x = torch.tensor(numbers, dtype=torch.float64)
    (found,) = check([x], [ANY])
    assert bits(found) == bits(want)
    masked = torch.cat([x, torch.tensor([NAN, INF, MOST], dtype=torch.float64)])
    check([masked] * 2, [torch.arange(len(masked)) < len(x)] * 2)


@pytest.mark.parametrize("first", [1.0, 1 + 2.0**-52, 2.0**13])
def test_every_bit_below_breaks_a_tie(first):
    rows = [
        [first, first * 2.0**-53, sign * first * 2.0**-k]
        for k in range(54, 140)
        for sign in (1, -1)
    ]
    check(list(torch.tensor(rows, dtype=torch.float64)), [ANY] * len(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_numbers_of_each_dtype(dtype, monkeypatch):
    monkeypatch.setattr(exact_sums, "_BLOCK", 1000)
    draws = torch.Generator().manual_seed(0)
    n = 4_002  # and no even number of blocks
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    fills = {
        "wide": torch.randn(n, generator=draws)
        * torch.exp2(torch.randint(-30, 15, (n,), generator=draws)),
        "largest": torch.full((n,), most, dtype=torch.float64),
        "subnormal": torch.randint(-9, 9, (n,), generator=draws).double() * tiny / 2,
        "ones": torch.full((n,), 1 - torch.finfo(dtype).eps / 2, dtype=torch.float64),
        "nan": torch.full((1 << 12,), NAN),
        "infinite": torch.full((1 << 12,), -INF),
    }
    values = [x.to(dtype) for x in fills.values()]
    masks = [torch.rand(len(x), generator=draws) < 0.5 for x in values]
    wanted = check(values, masks)
    turned = [x.reshape(-1, 2).T for x in values], [m.reshape(-1, 2).T for m in masks]
    for found in (sums(*turned), exact_sums._laid(*turned)):
        assert list(map(bits, map(float, found))) == list(map(bits, wanted))
    assert bits(wanted[0]) == bits(math.fsum(values[0][masks[0]].tolist()))


def test_threads_do_not_matter():
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    threads, found = torch.get_num_threads(), set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(float(sums([x], [ANY])[0]))
    torch.set_num_threads(threads)
    assert found == {math.fsum(x.tolist())}


# What no test has the entries for: halves as full as 2^32 of them make them.
HALVES = st.tuples(st.integers(-(2**62), 2**62), st.integers(0, 2**63 - 1))


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            HALVES, st.tuples(st.integers(-(2**55), 2**55), st.integers(0, 2**33))
        ),
        min_size=1,
    )
)
@example(
    [
        (2**53 + 1, 1),
        (2**54 + 2, 1),
        (-(2**53) - 1, 2**31 - 1),
        (-1, 2**31 - 1),
        (2**62, 2**63 - 1),
    ]
)
def test_full_halves_are_rounded_once(halves):
    found = exact_sums._rounded(*torch.tensor(halves).T)
    assert found.tolist() == [float((first << 31) + second) for first, second in halves]


def test_tensors_of_many_dtypes_and_shapes(monkeypatch):
    draws = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (), (0,), (2, 0, 2), (500,)]
    wide = [
        torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes
    ]
    values = [x.to(dtype) for x in wide for dtype in reversed(DTYPES)]
    masks = [
        torch.rand(x.shape, generator=draws) < 0.7 if i % 3 else ANY
        for i, x in enumerate(values)
    ]
    wanted = [
        defined(x[mask.expand(x.shape)]) for x, mask in zip(values, masks, strict=True)
    ]
    assert [float(x) for x in sums(values, masks)] == wanted
    assert sums([], []) == []
    monkeypatch.setattr(exact_sums, "as_numpy", lambda tensors: None)  # as on a device
    monkeypatch.setattr(lists, "MOST", 40)
    assert [float(x) for x in sums(values, masks)] == wanted
    small = [torch.empty(20, device="meta")] * 5
    assert [
        x.device.type for x in sums([torch.ones(2), small[0]], [ANY, ANY.to("meta")])
    ] == ["cpu", "meta"]
    assert (
        counted(lambda: sums(small, [ANY.to("meta")] * 5)).operations["where"] == 2 * 3
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_do_not_grow_with_tensors_and_nothing_waits(dtype):
    def of(n):
        values = [torch.empty(1000 + i, dtype=dtype, device="meta") for i in range(n)]
        masks = [torch.empty(x.shape, dtype=torch.bool, device="meta") for x in values]
        found = counted(lambda: [x.device.type for x in sums(values, masks)])
        assert not found.waits
        return found.launches

    assert of(2) == of(50) < 60


def test_compiled():
    x, mask = torch.randn(9), torch.rand(9) < 0.5
    compiled = torch.compile(
        lambda x, m: sums([x], [m])[0], backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(x, mask), sums([x], [mask])[0])


def test_arguments_are_not_changed_and_gradients_do_not_flow():
    x, mask = torch.ones(3, requires_grad=True), torch.tensor([True, False, True])
    for (found,) in (sums([x], [mask]), exact_sums._laid([x], [mask])):
        assert found == 2.0 and not found.requires_grad
    assert x.tolist() == [1.0, 1.0, 1.0] and mask.tolist() == [True, False, True]


def test_means_are_sums_over_counts():
    x = torch.tensor([1.0, 2.0, 4.0, math.nan])
    masks = [
        torch.tensor(flags) > 0
        for flags in ([1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1])
    ]
    found = means([x] * 4, masks)
    assert [y.dtype for y in found] == [torch.float64] * 4
    assert [str(float(y)) for y in found] == ["1.5", "4.0", "nan", "nan"]
