"""Sums of floats that depend on no order: not on threads, on processes, nor on how memory is laid out.

A sum is computed exactly, as an integer, and rounded to float64 once. So it is also the right one to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.memory import each
from sparsefn.engine.rounded_sums import BITS, digits_of, rounded_sums
from sparsefn.engine.shards import here, is_sharded, lie_of
from sparsefn.engine.talks import Sum, Talk, together
from sparsefn.engine.transforms import Array, transformed, visible

_LOWEST = 1074  # every float64 is a multiple of 2^-1074
_LIMBS = 68  # of 32 bits each: 2^1024 * 2^1074 takes 2098 of the 2176 bits, and 2^78 such numbers fit
_BLOCK = 1 << 15  # float64, with room for two more of it in the second cache of a core
_HUGE = 2.0**900


def sums(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor's entries where its mask is set: 0-d, float64, the same bits in every order.

    >>> from sparsefn.engine.exact_sums import sums
    >>> sums([torch.tensor([1e30, 1.0, -1e30, 5.0])], [torch.tensor([True, True, True, False])])
    [tensor(1., dtype=torch.float64)]

    NaN where an entry is NaN or both infinities are among them. Of DTensors it is that of the whole, on every process:
    all must call it, and all leaves travel in one message. A mask is laid out as its tensor. Nothing waits for a
    device, unless DTensors are on it.
    """
    shared = [i for i, x in enumerate(values) if is_sharded(x)]
    talks = [(lie_of(values[i]).groups, total(here(values[i]), here(masks[i]))) for i in shared]
    told = dict(zip(shared, together(talks), strict=True)) if talks else {}
    made = {i: torch.tensor(n, dtype=torch.float64, device=here(values[i]).device) for i, n in told.items()}
    if not transformed():
        there = [i for i, x in enumerate(values) if i not in told and x.device.type != "cpu"]
        made |= zip(there, rounded_sums([values[i] for i in there], [masks[i] for i in there]), strict=True)
    return [made[i] if i in made else _sum(x, masks[i]) for i, x in enumerate(values)]


def total(x: Tensor, mask: Tensor) -> Talk[float]:
    """A talk that finds the sum over all processes. Each has plain tensors, of its part."""
    counts = yield Sum(limbs(x, mask))
    return value(counts)


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = x.detach(), mask.expand(x.shape)
    if visible([x, mask]) is None:
        summed: Tensor = _operator(x, mask)
        return summed
    return torch.tensor(value(limbs(x, mask)), dtype=torch.float64, device=x.device)


def value(counts: Array) -> float:
    """The float64 nearest to the sum that limbs stand for.

    >>> from sparsefn.engine.exact_sums import limbs, value
    >>> value(limbs(torch.tensor([0.5, 0.25]), torch.tensor(True)))
    0.75
    """
    *digits, nans, up, down = counts.tolist()
    if nans or (up and down):
        return math.nan
    if up or down:
        return math.inf if up else -math.inf
    whole: int = sum(digit << (32 * i) for i, digit in enumerate(digits))
    try:
        return float(whole / (1 << _LOWEST))  # of two ints: rounded once, to the even one of two as near
    except OverflowError:
        return math.inf if whole > 0 else -math.inf


def limbs(x: Tensor, mask: Tensor) -> Array:
    """The sum of the masked entries, exact, as int64 numbers that may be added up over processes.

    >>> from sparsefn.engine.exact_sums import limbs
    >>> limbs(torch.tensor([2.0**-1074], dtype=torch.float64), torch.tensor(True))[:2]
    array([1, 0])

    They are the digits of an integer to the base 2^32, in units of 2^-1074, and then how many NaNs, infinities and
    negative infinities there are, on a device 1 for any number. All digits but the last are in [0, 2^32), so 2^31
    processes may add theirs.
    """
    x, mask = x.detach(), mask.expand(x.shape)
    if x.device.type != "cpu":
        exact, odd = _read(x, mask)
    else:
        flat, kept = x.reshape(-1), mask.reshape(-1)
        blocks = range(0, flat.numel(), _BLOCK)
        found = each(lambda at: _of_block(flat[at : at + _BLOCK], kept[at : at + _BLOCK]), blocks, flat.numel())
        exact, odd = sum(n for n, _ in found), [sum(odd[i] for _, odd in found) for i in range(3)]
    digits = [exact >> (32 * i) & 0xFFFFFFFF for i in range(_LIMBS - 1)]
    return np.array([*digits, exact >> (32 * (_LIMBS - 1)), *odd], np.int64)


def _of_block(x: Tensor, mask: Tensor) -> tuple[int, list[int]]:
    block = np.where(mask.numpy(), x.to(torch.float64).numpy(), 0.0)
    largest, odd = max(block.max(), -block.min()), [0, 0, 0]
    if not math.isfinite(largest):
        odd = [int(np.count_nonzero(is_odd(block))) for is_odd in (np.isnan, np.isposinf, np.isneginf)]
        block[~np.isfinite(block)] = 0.0
        largest = max(block.max(), -block.min())
    if largest < _HUGE:
        return _extracted(block, largest), odd
    huge = np.where(np.abs(block) >= _HUGE, block, 0.0)
    block -= huge
    huge *= 2.0**-500  # exact, and so far from the largest number that no sum below overflows
    return (_extracted(huge, _HUGE) << 500) + _extracted(block, _HUGE), odd


def _extracted(x: Array, largest: float) -> int:
    """The exact sum of at most 2^15 numbers below 2^1000, in units of 2^-1074; x is overwritten.

    Rump, Ogita and Oishi 2008, "Accurate floating-point summation", part 1, doi 10.1137/050645671, algorithm 3.2.
    """
    exact, power = 0, math.frexp(largest)[1] + 15
    high = np.empty_like(x)
    # All |x| <= 2^(power - 15). Next to s = 2^power a number keeps its multiple of 2^-53 s, and 2^15 of these sum up to
    # at most s: every partial sum is an integer of at most 53 bits times 2^-53 s, so it is exact in any order. What is
    # left is at most 2^-53 s, 2^15 times less than the next s.
    while x.any():
        s = math.ldexp(1.0, power)
        np.add(x, s, high)
        np.subtract(high, s, high)
        np.subtract(x, high, x)
        numerator, denominator = float(high.sum()).as_integer_ratio()
        exact += numerator << (_LOWEST + 1 - denominator.bit_length())
        power -= 38
    return exact


def _read(x: Tensor, mask: Tensor) -> tuple[int, list[int]]:
    """The same of a tensor on a device. One wait for the device."""
    digits, odd, unit = digits_of([x], [mask])
    *found, nan, up, down = torch.cat([digits, odd.to(torch.int64)], 1)[0].tolist()
    exact: int = sum(digit << (BITS * i) for i, digit in enumerate(found))
    return exact << _LOWEST >> -unit, [nan, up, down]


@torch.library.custom_op("sparsefn::exact_sum", mutates_args=())
def _operator(x: Tensor, mask: Tensor) -> Tensor:
    """The sum of a tensor that a transform hides."""
    if x.device.type != "cpu":
        return rounded_sums([x], [mask])[0]
    return torch.tensor(value(limbs(x, mask)), dtype=torch.float64, device=x.device)


@_operator.register_fake
def _(x: Tensor, mask: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=x.device)


@_operator.register_vmap
def _(info: object, in_dims: tuple[int | None, int | None], x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    rows = [y.unbind(dim) if dim is not None else None for y, dim in zip((x, mask), in_dims, strict=True)]
    count = next(len(row) for row in rows if row is not None)
    xs, masks = (row or [y] * count for row, y in zip(rows, (x, mask), strict=True))
    return torch.stack([_operator(*pair) for pair in zip(xs, masks, strict=True)]), 0
