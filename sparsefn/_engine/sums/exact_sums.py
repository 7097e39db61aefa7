"""Sums of floats that depend on no order: not on threads, on processes, nor on how
memory is laid out.

A sum is one of integers. Their unit is a power of two, at most 2^-54 of the largest
entry and at least 2^-1021, to a multiple of which each entry is cut, toward zero. The
sum of these, fewer than 2^32, is exact, and rounded to float64 once. So it is the right
one to the last digit where nothing is cut, as of float32 within 2^30 of the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import end_to_end, packs, repeated, run_jobs, written
from sparsefn._engine.processes import (
    Exchange,
    Groups,
    Sum,
    alone,
    extent_of,
    in_step,
    is_sharded,
    local_tensor,
)
from sparsefn._engine.torch_limits import reinterpreted
from sparsefn._engine.transforms import as_numpy, foreach_max, transformed

_BLOCK = 1 << 17  # entries: what is kept of them stays in the second cache of a core
_FEW = 1 << 15  # fewer entries are added by torch in less time than it takes to look
_HALF = 31  # bits: integers of 62 are added up in two halves
_LOW = (1 << _HALF) - 1
_LEAST = 2.0**-967  # as the largest entry, for which the unit is 2^-1021
_EXPONENTS = 256  # of eight each: float64 has 2048
_ODD = (math.nan, math.inf, -math.inf)


def sums(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor's entries where its mask is set: 0-d, float64, the same
    bits in every order.

    >>> from sparsefn._engine.sums.exact_sums import sums
    >>> sums(
    ...     [torch.tensor([1e9, 1.0, -1e9, 5.0])],
    ...     [torch.tensor([True, True, True, False])],
    ... )
    [tensor(1., dtype=torch.float64)]

    NaN where an entry is NaN or both infinities are among them. Of DTensors it is the
    sum of the whole, on every process: all must call it, and all leaves travel in the
    same two messages. A mask is laid out as its tensor. Nothing waits for a device,
    unless DTensors are on it, and launches are the same for any number of tensors.
    """
    sharded = [i for i, x in enumerate(values) if is_sharded(x)]
    exchanges = []
    for i in sharded:
        groups = extent_of(values[i]).groups
        exchange = total(local_tensor(values[i]), local_tensor(masks[i]))
        exchanges.append((groups, exchange))
    numbers: dict[int, float] = {}
    if exchanges:
        numbers |= zip(sharded, in_step(exchanges), strict=True)
    left = []
    for i, (x, mask) in enumerate(zip(values, masks, strict=True)):
        if i in numbers:
            continue
        if not x.numel():
            numbers[i] = 0.0
        elif x.numel() >= _FEW and as_numpy([x, mask]) is not None:
            numbers[i] = alone(total(x, mask))
        else:
            left.append(i)
    made: dict[int, Tensor] = {}
    for i, number in numbers.items():
        device = local_tensor(values[i]).device
        made[i] = torch.full((), number, dtype=torch.float64, device=device)
    kinds: list[object] = list(left)
    if not transformed():
        kinds = [(values[i].device, values[i].dtype) for i in left]
    sizes = [values[i].numel() for i in left]
    for pack in packs(kinds, sizes):
        places = [left[i] for i in pack]
        added = _laid([values[i] for i in places], [masks[i] for i in places])
        made |= zip(places, added, strict=True)
    return [made[i] for i in range(len(values))]


def means(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor's entries where its mask is set: 0-d, float64, NaN where
    it is set nowhere.

    >>> from sparsefn._engine.sums.exact_sums import means
    >>> means([torch.tensor([1.0, 5.0, 9.0])], [torch.tensor([True, True, False])])
    [tensor(3., dtype=torch.float64)]

    As `sums`, for DTensors: the counts travel with the sums, so that they take no
    message of their own.
    """
    sharded = [i for i, x in enumerate(values) if is_sharded(x)]
    added: list[tuple[Groups, Exchange[float]]] = []
    counted: list[tuple[Groups, Exchange[float]]] = []
    for i in sharded:
        groups = extent_of(values[i]).groups
        mask = local_tensor(masks[i])
        added.append((groups, total(local_tensor(values[i]), mask)))
        counted.append((groups, _count(mask)))
    made: dict[int, Tensor] = {}
    if sharded:
        numbers = in_step([*added, *counted])
        both = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        totals, counts = torch.split(both, len(sharded))
        made |= zip(sharded, (totals / counts).unbind(), strict=True)
    left = [i for i in range(len(values)) if i not in made]
    plain_sums = sums([values[i] for i in left], [masks[i] for i in left])
    for i, number in zip(left, plain_sums, strict=True):
        made[i] = number / masks[i].sum()
    found = []
    for i, x in enumerate(values):
        device = local_tensor(x).device
        found.append(made[i].to(device, torch.float64))
    return found


def _count(mask: Tensor) -> Exchange[float]:
    count = int(mask.count_nonzero())
    (count_of_all,) = yield Sum([count])
    return float(count_of_all)


def total(x: Tensor, mask: Tensor) -> Exchange[float]:
    """An exchange that finds the sum over all processes.

    Each has plain tensors, of its part.
    """
    blocks = _blocks(x, mask)
    ends: list[float] = []
    for block in blocks:
        ends += map(float, block.aminmax())
    # How many processes have which exponent, by eights, or which odd number. Four
    # counts travel as one number.
    counts = np.zeros(_EXPONENTS + 4, np.uint16)
    odd = sum(end for end in ends if not math.isfinite(end))
    if odd != 0:
        place = _EXPONENTS + _place_among_odd(odd)
    else:
        _, exponent = math.frexp(max([_LEAST, *map(abs, ends)]))
        place = exponent + 1022 >> 3
    counts[place] = 1
    counts = (yield Sum(counts.view(np.int64))).view(np.uint16)
    of_odd = counts[_EXPONENTS : _EXPONENTS + len(_ODD)].tolist()
    if any(of_odd):
        return sum(n for n, count in zip(_ODD, of_odd, strict=True) if count)
    # The largest entry is below 2^(8 * largest - 1015), and below 2^62 once scaled: an
    # int64, of which 2^32 are added in halves of 31 bits.
    largest = int(counts.nonzero()[0][-1])
    scale = math.ldexp(1.0, 1077 - 8 * largest)
    halves = np.zeros(2, np.int64)
    for block in blocks:
        digits = _cut(block.double() * scale)
        halves += [int(half.sum()) for half in digits]
    first, second = yield Sum(halves)
    whole = (int(first) << _HALF) + int(second)
    return float(whole) / scale


def _place_among_odd(number: float) -> int:
    if math.isnan(number):
        return 0
    return 1 if number > 0 else 2


def _blocks(x: Tensor, mask: Tensor) -> list[Tensor]:
    # The entries under the mask and zeros elsewhere, or blocks of these entries alone.
    # Empty blocks are left out.
    mask = mask.expand(x.shape)
    x = x.detach()
    seen = as_numpy([x, mask])
    if seen is None:
        if x.numel():
            return [torch.where(mask, x, 0)]
        return []
    flat, kept = (array.reshape(-1) for array in seen)

    def entries_of(part: slice) -> Tensor:
        entries = flat[part][kept[part]]
        return torch.from_numpy(entries).view(x.dtype)

    parts = [slice(at, at + _BLOCK) for at in range(0, flat.size, _BLOCK)]
    blocks = run_jobs(entries_of, parts, flat.size)
    return [block for block in blocks if block.numel()]


def _laid(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Iterable[Tensor]:
    """The same sums by torch's operations alone, of tensors of one device and dtype
    that are laid end to end.
    """
    sizes = [x.numel() for x in values]
    pairs = zip(values, masks, strict=True)
    mask = end_to_end(mask.expand(x.shape) for x, mask in pairs)
    row = torch.where(mask, end_to_end(values), 0)
    low, high = _ends(row, sizes)
    # The exponent by eights, as in `total`, and the bits of the same power of two.
    largest = torch.maximum(-low, high)
    bits = reinterpreted(largest.double().clamp(min=_LEAST), torch.int64)
    eighths = bits >> 55
    scale = reinterpreted(2100 - 8 * eighths << 52, torch.float64)
    halves = _cut(row * repeated(scale, sizes))
    if len(sizes) == 1:
        first, second = (half.sum(0, keepdim=True) for half in halves)
    else:  # differences of the sums up to each end
        ends = written([size - 1 for size in itertools.accumulate(sizes)], row.device)
        before = ends[:1] * 0
        sums_up_to = [half.cumsum(0)[ends] for half in halves]
        first, second = (torch.diff(some, prepend=before) for some in sums_up_to)
    sums_of_finite = _rounded(first, second) / scale
    odd = (low + high).double()
    return torch.where(largest.isfinite(), sums_of_finite, odd).unbind()


def _ends(row: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    # The least and the largest entry of each part of a row.
    if len(sizes) == 1:
        low, high = row.aminmax()
        return low[None], high[None]
    high = torch.stack(foreach_max(torch.split(row, sizes)))
    low = -torch.stack(foreach_max(torch.split(-row, sizes)))
    return low, high


def _cut(x: Tensor) -> tuple[Tensor, Tensor]:
    # The digits of integers to the base 2^31, of which the first has the sign.
    whole = x.to(torch.int64)
    return whole >> _HALF, whole & _LOW


def _rounded(first: Tensor, second: Tensor) -> Tensor:
    # The float64 nearest to the integer `first * 2^31 + second`. It is the sum of two
    # terms that float64 holds exactly, so that their sum is rounded once: the upper
    # part has at most 53 bits, the lower 10 + 31 bits.
    first = first + (second >> _HALF)
    rest = ((first & 1023) << _HALF) + (second & _LOW)
    return (first >> 10).double() * 2.0 ** (_HALF + 10) + rest.double()
