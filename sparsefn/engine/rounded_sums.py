"""Exact sums of many tensors on a device, rounded there: nothing is read by Python, and launches are the same for any
number of tensors.

Mantissas are added up as integers, apart for each sign and exponent. These sums are the digits of one integer, and its
largest bits are the float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsefn.engine.lists import end_to_end, packs

BITS = 26  # of a digit: four of them hold 53 bits, one to round by, and more
_MASK = (1 << BITS) - 1
_ROW = 1 << 14  # as many entries take the memory of the bins and digits of a tensor


class Form(NamedTuple):
    """How a float is laid out: a sign, one of `exponents`, and bits of the `mantissa`, of which `fine` choose a bin."""

    words: torch.dtype
    mantissa: int
    exponents: int
    fine: int

    @property
    def unit(self) -> int:
        """The power of two by which an integer mantissa of the exponent 0 counts."""
        return 1 - self.exponents // 2 - self.mantissa


_FORMS = {torch.float64: Form(torch.int64, 52, 1 << 11, 1), torch.float32: Form(torch.int32, 23, 1 << 8, 4)}


def rounded_sums(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """`exact_sums.sums` of tensors on a device, for which nothing waits.

    >>> from sparsefn.engine.rounded_sums import rounded_sums
    >>> rounded_sums([torch.tensor([1e30, 1.0, -1e30, 5.0])], [torch.tensor([True, True, True, False])])
    [tensor(1., dtype=torch.float64)]

    Tensors of a device and dtype are laid end to end, `lists.MOST` entries at most. A tensor has fewer than 2^36.
    """
    made: dict[int, Tensor] = {}
    for pack in packs([(x.device, x.dtype) for x in values], [x.numel() + _ROW for x in values]):
        digits, odd, unit = digits_of([values[i] for i in pack], [masks[i] for i in pack])
        made |= zip(pack, _rounded(digits, odd, unit).unbind(), strict=True)
    return [made[i] for i in range(len(values))]


def digits_of(values: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    """The exact sums of tensors of one device and dtype as integers, and the power of two that these are multiples of.

    >>> from sparsefn.engine.rounded_sums import digits_of
    >>> digits, odd, unit = digits_of([torch.tensor([3.0])], [torch.tensor(True)])
    >>> sum(digit << 26 * i for i, digit in enumerate(digits[0].tolist())) * 2.0**unit, odd.tolist()
    (3.0, [[False, False, False]])

    A row for each tensor. Digits are to the base 2^26, the lowest first, and below 2^54 in magnitude, of either sign.
    The flags tell whether a NaN, an infinity and a negative infinity are among the entries.
    """
    wide = torch.float64 if values[0].dtype == torch.float64 else torch.float32
    form, sizes = _FORMS[wide], [x.numel() for x in values]
    mask = end_to_end(mask.expand(x.shape) for x, mask in zip(values, masks, strict=True))
    bins, nan = _bins(end_to_end(values).to(wide), mask, sizes, form)
    odd = torch.stack([nan, bins[-1, :, form.exponents - 1], bins[-1, :, -1]], 1).ne(0)
    return _spread(bins, form), odd, form.unit


def _bins(x: Tensor, mask: Tensor, sizes: Sequence[int], form: Form) -> tuple[Tensor, Tensor]:
    # (pieces of a mantissa, tensors, bins): a bin for each exponent of positive numbers, and then of negative ones.
    # NaN has one by itself, which is returned, too. Adding integers is exact in any order. Additions to one address
    # wait for each other, so there are several bins for an exponent, and a number that is masked off adds 0 to its own.
    words, width = x.view(form.words), (2 * form.exponents << form.fine) + 1
    index = (words >> form.mantissa - form.fine).bitwise_and_(width - 2).to(torch.int32)
    index.masked_fill_(x.isnan(), width - 1)
    firsts = torch.arange(0, len(sizes) * width, width, dtype=torch.int32, device=x.device).unbind()
    index += torch.cat([first.expand(size) for first, size in zip(firsts, sizes, strict=True)])
    off, normal = ~mask, (words & (form.exponents - 1 << form.mantissa)).ne(0)
    pieces = range(0, form.mantissa, BITS)
    bins = torch.zeros(len(pieces), len(sizes) * width, dtype=torch.int64, device=x.device)
    for made, low in zip(bins, pieces, strict=True):
        high = min(form.mantissa - low, BITS)
        piece = (words >> low).bitwise_and_((1 << high) - 1)
        if low == pieces[-1]:
            piece.add_(normal, alpha=1 << high)  # the bit that is not written down
        made.index_add_(0, index, piece.masked_fill_(off, 0).to(torch.int64))
    bins = bins.view(-1, len(sizes), width)
    return bins[..., :-1].reshape(-1, len(sizes), 2 * form.exponents, 1 << form.fine).sum(-1), bins[-1, :, -1]


def _spread(bins: Tensor, form: Form) -> Tensor:
    # Bins are bits of a digit, of which many bins have more: these go to the digits above.
    (pieces, rows, _), count = bins.shape, -(-form.exponents // BITS)
    finite = bins.view(pieces, rows, 2, form.exponents)[..., :-1]
    finite = pad(finite, (0, count * BITS - form.exponents + 1)).view(pieces, rows, 2, count, BITS)
    finite[..., 0, 0] *= 2  # the exponent 0 stands for 1
    placed = torch.zeros(rows, 2, count + pieces + 2, BITS, dtype=torch.int64, device=bins.device)
    for i, piece in enumerate(finite):
        for k in range(3):
            placed[:, :, i + k : i + k + count] += (piece >> BITS * k) & _MASK
    up, down = (placed << torch.arange(BITS, device=bins.device)).sum(-1).unbind(1)
    return up - down


def _rounded(digits: Tensor, odd: Tensor, unit: int) -> Tensor:
    # The float64 nearest to each row, the even one of two as near.
    ways = _carried(torch.stack([digits, -digits]))
    negative = ways[0, :, -1] > _MASK // 2
    size = torch.where(negative[:, None], ways[1], ways[0])
    place = torch.arange(size.shape[1], device=size.device)
    some = size.ne(0)
    top = torch.where(some, place, 0).amax(-1, keepdim=True).clamp(min=3)
    a, b, c, d = size.gather(1, top - place[:4]).unbind(1)
    rest = (some & (place < top - 3)).any(-1)
    # Both terms are exact, so the device rounds once. What lies below them only tells how to round.
    nearest = ((a << BITS) + b).double() * 2.0**52 + ((c << BITS) + d | rest).double()
    # No power of two is out of range, and sums below the normal numbers have few bits: the products are exact, or inf.
    power = top[:, 0] * BITS + (unit - 3 * BITS)
    half = power >> 1
    nearest = nearest * _power_of_two(half) * _power_of_two(power - half)
    signed = torch.where(negative, -nearest, nearest)
    nan, up, down = odd.unbind(1)
    signed = torch.where(up, torch.inf, torch.where(down, -torch.inf, signed))
    return torch.where(nan | (up & down), torch.nan, signed)


def _carried(digits: Tensor) -> Tensor:
    # Digits in [0, 2^26) of the same integers, modulo a power of two far above them: of a negative one the highest
    # digit is at least 2^25. First a multiple of that power is added, which makes all digits positive.
    digits = digits + (_MASK << 29)
    digits[..., 0] += 1 << 29
    for _ in range(2):  # below 2^56, then 2^31, and then at most 2^26 + 32
        digits = (digits & _MASK) + pad(digits >> BITS, (1, -1))
    # A carry is 0 or 1 now. A full digit hands on what it gets, so each gets what the last other one below it gives.
    place = torch.arange(2, 2 * digits.shape[-1] + 2, 2, device=digits.device)
    given = torch.where(digits == _MASK, 0, place + (digits > _MASK)).cummax(-1).values & 1
    return (digits + pad(given, (1, -1))) & _MASK


def _power_of_two(n: Tensor) -> Tensor:
    return (n + 1023 << 52).view(torch.float64)
