"""Keys by Triton's interpreter, in the order of the definition."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_runs import by_interpreter

from sparsefn._engine.selection import reference
from sparsefn_kernels.source import keys

pytestmark = by_interpreter


@triton.jit
def _written(
    raw, out, ABS: tl.constexpr, BITS: tl.constexpr, INF: tl.constexpr, N: tl.constexpr
):
    i = tl.arange(0, N)
    tl.store(out + i, keys.ordered(tl.load(raw + i), ABS, BITS, INF))


@triton.jit
def _ranked(values, out, rank, BITS: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out, keys.at_rank(tl.load(values + i), i < 100, rank, BITS))


@triton.jit
def _found(table, out, x, STEPS: tl.constexpr):
    tl.store(out, keys.find(table, 2, 1, 5, x, STEPS))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("dtype", "infinity"), [(torch.float16, 0x7C00), (torch.bfloat16, 0x7F80)], ids=str
)
def test_all_words_of_16_bits_have_the_order_of_the_definition(
    dtype, infinity, absolute
):
    raw = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    out = torch.empty(1 << 16, dtype=torch.int32)
    _written[(1,)](raw, out, ABS=absolute, BITS=16, INF=infinity, N=1 << 16)
    scores = raw.view(dtype)
    want = reference.rank_keys(scores.abs() if absolute else scores)
    ours, theirs = (torch.unique(x, return_inverse=True)[1] for x in (out, want))
    assert torch.equal(ours, theirs)
    assert out.min() > -(1 << 15), "the least is for units that do not compete"


@pytest.mark.parametrize(
    ("bits", "dtype"), [(16, torch.int32), (32, torch.int32), (64, torch.int64)]
)
def test_the_key_of_a_rank(bits, dtype):
    top = 1 << (bits - 1)
    values = torch.randint(
        -top, top - 1, (128,), dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    values[:40] = values[0]
    order = values[:100].sort(descending=True).values.tolist()
    out = torch.empty(1, dtype=dtype)
    for rank in (1, 2, 30, 50, 99, 100):
        _ranked[(1,)](values, out, rank, BITS=bits, N=128)
        assert out.item() == order[rank - 1]
    _ranked[(1,)](values, out, 101, BITS=bits, N=128)
    assert out.item() == -top


def test_the_row_of_a_table():
    starts = [0, 3, 4, 9, 100]
    table = torch.tensor([[-7, start] for start in starts])
    out = torch.empty(1, dtype=torch.int32)
    for x in (0, 1, 2, 3, 4, 8, 9, 99, 100, 1000):
        _found[(1,)](table, out, x, STEPS=3)
        assert out.item() == max(i for i, start in enumerate(starts) if start <= x)
