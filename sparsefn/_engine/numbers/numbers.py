"""Numbers that are a Python float or a float64 tensor, treated by the same operations.

`+ - * /` and floor are rounded exactly wherever IEEE float64 is kept: eager, batched or
compiled, a float and a tensor have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

Power = TypeVar("Power", float, Tensor, "np.ndarray")
Real: TypeAlias = float | Tensor


def real_where(condition: bool | Tensor, a: Real, b: Real) -> Real:
    """`a` if the condition holds, else `b`.

    It is elementwise where the condition is a tensor.

    >>> from sparsefn._engine.numbers import numbers
    >>> (
    ...     numbers.real_where(True, 1.0, 2.0),
    ...     numbers.real_where(torch.tensor(False), 1.0, 2.0),
    ... )
    (1.0, tensor(2., dtype=torch.float64))
    """
    if isinstance(condition, Tensor):
        return torch.where(condition, like(condition, a), like(condition, b))
    if condition:
        return a
    return b


def like(model: Tensor, value: Real) -> Tensor:
    """The number as a float64 tensor on the device of `model`.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.like(torch.tensor(0), 0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64, device=model.device)


def flags_of(flags: Sequence[Tensor]) -> list[bool]:
    """The values of 0-d flags; a device that has all of them is waited for once.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.flags_of([torch.tensor(True), torch.tensor(False)])
    [True, False]
    """
    if len({flag.device for flag in flags}) == 1:
        known: list[bool] = torch.stack(list(flags)).tolist()
        return known
    return [bool(flag) for flag in flags]


def divide(a: Real, b: Real) -> Real:
    """`a / b`, truly divided: torch takes some quotients of a tensor and a Python
    number as products with 1 / b.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.divide(1.0, 4.0)
    0.25
    """
    if isinstance(a, Tensor):
        return a / like(a, b)
    if isinstance(b, Tensor):
        return like(b, a) / b
    return a / b


def held(x: Real, low: Real, high: Real) -> Real:
    """The number, or the end that it is beyond.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.held(7.0, 0.0, 5.0)
    5.0
    """
    not_above = real_where(x > high, high, x)
    return real_where(x < low, low, not_above)


def between(first: Real, last: Real, share: Real) -> Real:
    """`last + (first - last) * share`, never an ulp outside of the two, and exactly
    either of them at 1 and 0.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.between(0.5, 0.1, 1.0), numbers.between(0.5, 0.1, 0.0)
    (0.5, 0.1)

    It is monotone in the share.
    """
    value = last + (first - last) * share
    low = real_where(first < last, first, last)
    high = real_where(first < last, last, first)
    value = held(value, low, high)
    return real_where(share >= 1.0, first, value)


def floor(x: Real) -> Real:
    """The largest whole number that is not above `x`, as a float.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.floor(-1.5)
    -2.0
    """
    if isinstance(x, Tensor):
        return torch.floor(x)
    if math.isfinite(x):
        return float(math.floor(x))
    return x


def two_sum(a: Real, b: Real) -> tuple[Real, Real]:
    """The rounded sum and its rounding error; together they are exact.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.two_sum(1.0, 2.0**-60) == (1.0, 2.0**-60)
    True

    Knuth, The Art of Computer Programming, volume 2, section 4.2.2.
    """
    s = a + b
    t = s - a
    error = (a - (s - t)) + (b - t)
    return s, error


def two_product(a: Real, b: Real) -> tuple[Real, Real]:
    """The rounded product and its rounding error; together they are exact.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.two_product(1 + 2.0**-30, 1 + 2.0**-30) == (1 + 2.0**-29, 2.0**-60)
    True

    For factors below 2^996. Dekker 1971, doi 10.1007/BF01397083.
    """
    p = a * b
    a1, a2 = _halves(a)
    b1, b2 = _halves(b)
    # products of halves have 53 bits at most, so that none of them is rounded
    error = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2
    return p, error


def _halves(a: Real) -> tuple[Real, Real]:
    # The upper 26 bits, and the rest, which has 26 with its sign.
    t = a * 134217729.0  # 2^27 + 1
    high = t - (t - a)
    return high, a - high


def whole_power(x: Power, n: int) -> Power:
    """x to the power n >= 1, by squaring: of a float, a tensor or an array.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.whole_power(2.0, 5)
    32.0
    """
    product = x
    for place in reversed(range(n.bit_length() - 1)):
        product = product * product
        if n >> place & 1:
            product = product * x
    return product


def folded(x: Tensor, join: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """The entries along the first dimension joined into one: the later half with the
    first, until one is left.

    >>> from sparsefn._engine.numbers import numbers
    >>> numbers.folded(torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]))
    tensor([ 6., 60.])

    The first part has as many rows as the largest power of two below their number: of
    seven rows the last three are added to the first three. This is an order of sums
    that does not depend on the layout, the device or the number of threads.
    """
    while len(x) > 1:
        half = 1 << (len(x) - 1).bit_length() - 1
        rest = len(x) - half
        joined = join(x[:rest], x[half:])
        if rest == half:
            x = joined
        else:
            x = torch.cat([joined, x[rest:half]])
    return x[0]


def batch_first(
    dims: Sequence[int | None], *tensors: Tensor | None
) -> list[Tensor | None]:
    """The arguments of a batching rule, ready to broadcast: the batch is the first
    dimension of the arguments that have one.

    >>> from sparsefn._engine.numbers import numbers
    >>> [
    ...     x.shape
    ...     for x in numbers.batch_first(
    ...         (1, None), torch.zeros(3, 5), torch.zeros(4, 3)
    ...     )
    ... ]
    [torch.Size([5, 1, 3]), torch.Size([4, 3])]
    """
    pairs = list(zip(tensors, dims, strict=False))
    rank = max(x.ndim - (dim is not None) for x, dim in pairs if x is not None)

    def lead(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None or dim is None:
            return x
        x = x.movedim(dim, 0)
        batch, *own = x.shape
        missing = [1] * (rank - len(own))
        return x.reshape(batch, *missing, *own)

    return [lead(x, dim) for x, dim in pairs]
