"""Exact sums: those of Fraction, in every order, on every way. (Over processes: test_shards.py.)"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn.engine import exact_sums
from sparsefn.engine.exact_sums import limbs, sums, total, value
from sparsefn.engine.talks import alone
from sparsefn.testing.launches import counted

ANY = torch.tensor(True)
NAN, INF, MOST = math.nan, math.inf, np.finfo(np.float64).max


def exact(values):
    values = [float(v) for v in values]
    if any(map(math.isnan, values)) or {INF, -INF} <= set(values):
        return NAN
    if not all(map(math.isfinite, values)):
        return sum(v for v in values if math.isinf(v))
    number = sum(map(Fraction, values), Fraction(0))
    try:
        return float(number)
    except OverflowError:
        return INF if number > 0 else -INF


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(), st.booleans()), max_size=30))
def test_sums_are_exact_and_rounded_once(pairs):
    x = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([kept for _, kept in pairs], dtype=torch.bool)
    want = exact(x[mask])
    (got,) = sums([x], [mask])
    assert got.dtype == torch.float64 and got.shape == ()
    assert same(float(got), want)
    assert same(float(sums([x.flip(0)], [mask.flip(0)])[0]), want)
    assert same(alone(total(x, mask)), want)
    assert same(float(torch.vmap(lambda x, m: sums([x], [m])[0])(x[None], mask[None])[0]), want)
    whole, odd = exact_sums._read(x, mask)
    assert same(value(np.array(digits(whole) + odd, np.int64)), want)
    # Processes add up their limbs.
    for cut in (0, len(pairs) // 2):
        assert same(value(limbs(x[:cut], mask[:cut]) + limbs(x[cut:], mask[cut:])), want)


def digits(whole):
    return [whole >> (32 * i) & 0xFFFFFFFF for i in range(67)] + [whole >> (32 * 67)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_many_blocks_of_wide_range(dtype):
    draws = torch.Generator().manual_seed(0)
    n = 3 * exact_sums._BLOCK + 3
    x = (torch.randn(n, generator=draws) * torch.exp2(torch.randint(-30, 15, (n,), generator=draws))).to(dtype)
    mask = torch.rand(n, generator=draws) < 0.5
    want = math.fsum(x[mask].tolist())
    assert float(sums([x], [mask])[0]) == want
    assert float(sums([x.reshape(3, -1).T], [mask.reshape(3, -1).T])[0]) == want
    assert value(limbs(x, mask)) == want
    whole, odd = exact_sums._read(x, mask)
    assert value(np.array(digits(whole) + odd, np.int64)) == want


def test_a_full_block_of_the_largest_numbers():
    n = exact_sums._BLOCK
    x = torch.full((n,), MOST, dtype=torch.float64)
    assert float(sums([x], [ANY])[0]) == INF
    x[::2] *= -1
    x[1] = 3.0
    assert float(sums([x], [ANY])[0]) == -MOST
    small = torch.full((n,), 2.0**-1074, dtype=torch.float64)
    assert float(sums([small], [ANY])[0]) == n * 2.0**-1074
    near = torch.full((n,), 1 - 2.0**-53, dtype=torch.float64)
    assert float(sums([near], [ANY])[0]) == n * (1 - 2.0**-53)


def test_threads_do_not_matter():
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    threads, found = torch.get_num_threads(), set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(float(sums([x], [ANY])[0]))
    torch.set_num_threads(threads)
    assert found == {math.fsum(x.tolist())}


def test_empty_and_nested():
    assert sums([], []) == []
    assert [float(s) for s in sums([torch.zeros(0), torch.ones(2, 3)], [ANY, ANY])] == [0.0, 6.0]


def test_the_operator_keeps_to_the_rules_of_custom_operators():
    torch.library.opcheck(exact_sums._operator, (torch.randn(7), torch.rand(7) < 0.5))


def test_compiled():
    x, mask = torch.randn(9), torch.rand(9) < 0.5
    compiled = torch.compile(lambda x, m: sums([x], [m])[0], backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, mask), sums([x], [mask])[0])


def test_the_operator_of_a_device_waits_for_nothing():
    x = torch.empty(9, device="meta")
    found = counted(lambda: exact_sums._operator._init_fn(x, x > 0))
    assert not found.waits and found.operations["index_add_"] == 1
