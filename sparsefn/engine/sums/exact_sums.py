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

from sparsefn.engine.leaves import end_to_end, packs, run_jobs, written
from sparsefn.engine.processes import (
    Exchange,
    Sum,
    alone,
    extent_of,
    here,
    in_step,
    is_sharded,
)
from sparsefn.engine.surroundings import (
    LARGEST_EACH,
    reinterpreted,
    transformed,
    visible,
)

_BLOCK = 1 << 17  # entries: what is kept of them stays in the second cache of a core
_HALF = 31  # bits: integers of 62 are added up in two halves
_LOW = (1 << _HALF) - 1
_LEAST = 2.0**-967  # as the largest entry, for which the unit is 2^-1021
_ODD = (math.nan, math.inf, -math.inf)


def sums(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor's entries where its mask is set: 0-d, float64, the same
    bits in every order.

    >>> from sparsefn.engine.sums.exact_sums import sums
    >>> sums(
    ...     [torch.tensor([1e9, 1.0, -1e9, 5.0])],
    ...     [torch.tensor([True, True, True, False])],
    ... )
    [tensor(1., dtype=torch.float64)]

    NaN where an entry is NaN or both infinities are among them. Of DTensors it is that
    of the whole, on every process: all must call it, and all leaves travel in the same
    two messages. A mask is laid out as its tensor. Nothing waits for a device, unless
    DTensors are on it, and launches are the same for any number of tensors.
    """
    shared = [i for i, x in enumerate(values) if is_sharded(x)]
    exchanges = [
        (extent_of(values[i]).groups, total(here(values[i]), here(masks[i])))
        for i in shared
    ]
    told = dict(zip(shared, in_step(exchanges), strict=True)) if exchanges else {}
    told |= {i: 0.0 for i, x in enumerate(values) if i not in told and not x.numel()}
    seen = [
        i
        for i, x in enumerate(values)
        if i not in told and visible([x, masks[i]]) is not None
    ]
    told |= {i: alone(total(values[i], masks[i])) for i in seen}
    made = {
        i: torch.full((), n, dtype=torch.float64, device=here(values[i]).device)
        for i, n in told.items()
    }
    left = [i for i in range(len(values)) if i not in made]
    kinds = [i if transformed() else (values[i].device, values[i].dtype) for i in left]
    for pack in packs(kinds, [values[i].numel() for i in left]):
        places = [left[i] for i in pack]
        made |= zip(
            places,
            _laid([values[i] for i in places], [masks[i] for i in places]),
            strict=True,
        )
    return [made[i] for i in range(len(values))]


def means(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor's entries where its mask is set: 0-d, float64, NaN where
    it is set nowhere.

    >>> from sparsefn.engine.sums.exact_sums import means
    >>> means([torch.tensor([1.0, 5.0, 9.0])], [torch.tensor([True, True, False])])
    [tensor(3., dtype=torch.float64)]

    As `sums`, for DTensors: the counts travel with the sums, so that they take no
    message of their own.
    """
    shared = [i for i, x in enumerate(values) if is_sharded(x)]
    groups = [extent_of(values[i]).groups for i in shared]
    parts = [(here(values[i]), here(masks[i])) for i in shared]
    exchanges: list[Exchange[float]] = [total(*part) for part in parts] + [
        _count(mask) for _, mask in parts
    ]
    told = (
        in_step(list(zip([*groups, *groups], exchanges, strict=True))) if shared else []
    )
    added_up = torch.tensor(told, dtype=torch.float64, device="cpu")
    made = {i: added_up[at] / added_up[at + len(shared)] for at, i in enumerate(shared)}
    left = [i for i in range(len(values)) if i not in made]
    added = sums([values[i] for i in left], [masks[i] for i in left])
    made |= {i: one / masks[i].sum() for i, one in zip(left, added, strict=True)}
    return [made[i].to(here(x).device, torch.float64) for i, x in enumerate(values)]


def _count(mask: Tensor) -> Exchange[float]:
    return float((yield Sum([int(mask.count_nonzero())]))[0])


def total(x: Tensor, mask: Tensor) -> Exchange[float]:
    """An exchange that finds the sum over all processes.

    Each has plain tensors, of its part.
    """
    blocks = _blocks(x, mask)
    ends = [float(end) for block in blocks for end in block.aminmax()]
    odd = [end for end in ends if not math.isfinite(end)]
    # How many processes have which exponent, by eights, or which odd numbers: four
    # counts travel as one.
    counts = np.zeros(260, np.uint16)
    if odd:
        counts[256 + [math.isnan(sum(odd)), sum(odd) > 0, True].index(True)] = 1
    else:
        counts[math.frexp(max([_LEAST, *map(abs, ends)]))[1] + 1022 >> 3] = 1
    counts = (yield Sum(counts.view(np.int64))).view(np.uint16)
    if counts[256:].any():
        return sum(
            number for number, count in zip(_ODD, counts[256:], strict=False) if count
        )
    scale = math.ldexp(1.0, 1077 - 8 * int(counts.nonzero()[0][-1]))
    halves = np.zeros(2, np.int64)
    for block in blocks:
        halves += [int(half.sum()) for half in _cut(block.double() * scale)]
    first, second = yield Sum(halves)
    return float((int(first) << _HALF) + int(second)) / scale


def _blocks(x: Tensor, mask: Tensor) -> list[Tensor]:
    # The entries that are summed and zeros for others, or in blocks those alone. Empty
    # blocks are left out.
    mask = mask.expand(x.shape)
    x = x.detach()
    seen = visible([x, mask])
    if seen is None:
        return [torch.where(mask, x, 0)] if x.numel() else []
    flat, kept = (array.reshape(-1) for array in seen)
    parts = [slice(at, at + _BLOCK) for at in range(0, flat.size, _BLOCK)]
    found = run_jobs(
        lambda part: torch.from_numpy(flat[part][kept[part]]).view(x.dtype),
        parts,
        flat.size,
    )
    return [block for block in found if block.numel()]


def _laid(values: Sequence[Tensor], masks: Sequence[Tensor]) -> Iterable[Tensor]:
    """The same sums by torch's operations alone, of tensors of one device and dtype
    that are laid end to end.
    """
    sizes = [x.numel() for x in values]
    mask = end_to_end(
        mask.expand(x.shape) for x, mask in zip(values, masks, strict=True)
    )
    row = torch.where(mask, end_to_end(values), 0)
    if len(sizes) == 1:
        low, high = (end[None] for end in row.aminmax())
    else:
        high, low = (
            torch.stack(LARGEST_EACH(torch.split(x, sizes))) for x in (row, -row)
        )
        low = -low
    largest = torch.maximum(-low, high)
    exponents = reinterpreted(largest.double().clamp(min=_LEAST), torch.int64) >> 55
    scale = reinterpreted(2100 - 8 * exponents << 52, torch.float64)
    halves = _cut(
        row
        * torch.cat(
            [one.expand(size) for one, size in zip(scale.unbind(), sizes, strict=True)]
        )
    )
    if len(sizes) == 1:
        first, second = (half.sum(0, keepdim=True) for half in halves)
    else:  # differences of the sums up to each end
        ends = written([size - 1 for size in itertools.accumulate(sizes)], row.device)
        first, second = (
            torch.diff(half.cumsum(0)[ends], prepend=ends[:1] * 0) for half in halves
        )
    return torch.where(
        largest.isfinite(), _rounded(first, second) / scale, (low + high).double()
    ).unbind()


def _cut(x: Tensor) -> tuple[Tensor, Tensor]:
    # The digits of integers to the base 2^31, of which the first has the sign.
    whole = x.to(torch.int64)
    return whole >> _HALF, whole & _LOW


def _rounded(first: Tensor, second: Tensor) -> Tensor:
    # The float64 nearest to the integer: of two terms that are exact, so that it is
    # rounded once.
    first = first + (second >> _HALF)
    rest = ((first & 1023) << _HALF) + (second & _LOW)
    return (first >> 10).double() * 2.0 ** (_HALF + 10) + rest.double()
