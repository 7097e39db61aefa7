"""exp, log, power and cos(pi x) from `+ - * /` and floor: the same bits wherever IEEE float64 is kept.

The libraries behind Python, eager tensors and compiled code round `exp` and `cos` differently in the
last place. Here a Python float and a float64 tensor go through one sequence of exact-rounded
operations. Methods are the classical ones: argument reduction, series, and error-free sums and
products (Dekker 1971; Knuth, TAOCP vol. 2, 4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Real: TypeAlias = "float | Tensor"  # a Python float or a float64 tensor

# ln 2 in two parts; the first has 20 trailing zero bits, so k * _LN2_HI is exact for every exponent k.
_LN2_HI = 0.6931471803691238
_LN2_LO = 1.9082149292705877e-10
_LOG2_E = 1.4426950408889634
_SQRT2 = 1.4142135623730951
_EXP_MIN, _EXP_MAX = -708.0, 709.782712893384  # below: 0, no subnormals (compiled code may flush them); above: inf
_EXP_TAIL = tuple(1.0 / math.factorial(n) for n in range(2, 15))
_ATANH_TAIL = tuple(2.0 / n for n in range(3, 25, 2))
_COS = (1.0, -4.934802200544679, 4.0587121264167685, -1.3352627688545895, 0.2353306303588932, -0.02580689139001406,
        0.0019295743094039231, -0.0001046381049248457, 4.303069587032947e-06, -1.3878952462213771e-07)  # fmt: skip
_SIN = (3.141592653589793, -5.16771278004997, 2.5501640398773455, -0.5992645293207921, 0.08214588661112823,
        -0.0073704309457143504, 0.00046630280576761255, -2.1915353447830217e-05, 7.952054001475513e-07,
        -2.2948428997269873e-08)  # fmt: skip


def where(condition: bool | Tensor, a: Real, b: Real) -> Real:
    """`a` if the condition holds, else `b`; elementwise where the condition is a tensor.

    >>> from sparsefn import numerics
    >>> numerics.where(True, 1.0, 2.0), numerics.where(torch.tensor(False), 1.0, 2.0)
    (1.0, tensor(2., dtype=torch.float64))
    """
    if not isinstance(condition, Tensor):
        return a if condition else b
    return torch.where(condition, like(condition, a), like(condition, b))


def like(model: Tensor, value: Real) -> Tensor:
    """The number as a float64 tensor on the device of `model`.

    >>> from sparsefn import numerics
    >>> numerics.like(torch.tensor(0), 0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64, device=model.device)


def divide(a: Real, b: Real) -> Real:
    """`a / b`, truly divided: on some devices a tensor over a Python number is a product with 1 / b.

    >>> from sparsefn import numerics
    >>> numerics.divide(1.0, 4.0)
    0.25
    """
    return a / (like(a, b) if isinstance(a, Tensor) else b)


def floor(x: Real) -> Real:
    """The largest whole number that is not above `x`, as a float.

    >>> from sparsefn import numerics
    >>> numerics.floor(-1.5)
    -2.0
    """
    return torch.floor(x) if isinstance(x, Tensor) else float(math.floor(x))


def _horner(coefficients: tuple[float, ...], x: Real) -> Real:
    value: Real = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _two_sum(a: Real, b: Real) -> tuple[Real, Real]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a: Real, b: Real) -> tuple[Real, Real]:
    p = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(a: Real) -> tuple[Real, Real]:
    t = a * 134217729.0  # 2^27 + 1
    high = t - (t - a)
    return high, a - high


def cospi(x: Real) -> Real:
    """cos(pi x), exact at multiples of 1/2.

    >>> from sparsefn import numerics
    >>> numerics.cospi(0.0), numerics.cospi(0.5), numerics.cospi(1.0)
    (1.0, 0.0, -1.0)

    For finite `x`; within 2 units in the last place.
    """
    return _elementary("cospi", x, x) if isinstance(x, Tensor) else cospi_series(x)


def cospi_series(x: Real) -> Real:
    """`cospi` in the open, without the operator around it."""
    x = where(x < 0.0, -x, x)
    x = x - 2.0 * floor(x * 0.5)
    x = where(x > 1.0, 2.0 - x, x)  # cos is even around 1, then odd around 1/2; all of it exact
    upper = x > 0.5
    x = where(upper, 1.0 - x, x)
    rest = 0.5 - x
    value = where(x <= 0.25, _horner(_COS, x * x), rest * _horner(_SIN, rest * rest))
    return where(upper, -value, value)


def exp(x: Real) -> Real:
    """e to the x.

    >>> from sparsefn import numerics
    >>> numerics.exp(0.0), numerics.exp(-1000.0)
    (1.0, 0.0)

    Within 1 unit in the last place; 0 below -708, inf above 709.78.
    """
    return _elementary("exp", x, x) if isinstance(x, Tensor) else _exp_sum(x, 0.0)


def _exp_sum(high: Real, low: Real) -> Real:
    x = where(high > _EXP_MAX, _EXP_MAX, where(high < _EXP_MIN, _EXP_MIN, high))
    k = floor(x * _LOG2_E + 0.5)
    r, low = _two_sum(x - k * _LN2_HI, low - k * _LN2_LO)
    one, error = _two_sum(1.0, r)
    value = one + (error + (r * r * _horner(_EXP_TAIL, r) + (low + low * r)))
    half = floor(k * 0.5)
    value = value * _power_of_two(half) * _power_of_two(k - half)
    return where(high > _EXP_MAX, math.inf, where(high < _EXP_MIN, 0.0, value))


def _power_of_two(k: Real) -> Real:
    if isinstance(k, Tensor):
        return ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return math.ldexp(1.0, int(k))


def _split_exponent(x: Real) -> tuple[Real, Real]:
    """(k, f) with x = 2^k (1 + f) and 1 + f in (sqrt(1/2), sqrt(2)]; x is positive and normal."""
    k: Real
    m: Real
    if isinstance(x, Tensor):
        word = x.view(torch.int64)
        k = ((word >> 52) - 1023).to(torch.float64)
        m = ((word & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    else:
        m, exponent = math.frexp(x)
        m, k = m * 2.0, float(exponent - 1)
    large = m > _SQRT2
    return where(large, k + 1.0, k), where(large, m * 0.5, m) - 1.0


def log(x: Real) -> Real:
    """The natural logarithm of a positive normal number.

    >>> from sparsefn import numerics
    >>> numerics.log(1.0)
    0.0

    Within 1 unit in the last place.
    """
    k, f = _split_exponent(x)
    s = f / (2.0 + f)
    z = s * s
    return k * _LN2_HI - ((s * (f - z * _horner(_ATANH_TAIL, z)) - k * _LN2_LO) - f)


def _log_sum(x: Real) -> tuple[Real, Real]:
    """log(x) as an unevaluated sum, to about 60 bits: 2 atanh(f / (2 + f)) with a corrected quotient."""
    k, f = _split_exponent(x)
    d, d_low = _two_sum(2.0, f)
    s = f / d
    p, p_low = _two_product(s, d)
    s_low = ((f - p) - p_low - s * d_low) / d
    z = s * s
    high, low = _two_sum(k * _LN2_HI, 2.0 * s)
    return _two_sum(high, low + (2.0 * s_low + k * _LN2_LO + s * z * _horner(_ATANH_TAIL, z)))


def power(base: Real, exponent: Real) -> Real:
    """`base ** exponent` for base >= 0; `power(b, 0)` is 1 and `power(b, 1)` is b.

    >>> from sparsefn import numerics
    >>> numerics.power(0.5, 3.0), numerics.power(0.0, 2.0)
    (0.125, 0.0)

    Within 1 unit in the last place for results between 1e-40 and 1e40, and a few beyond. A negative
    exponent needs a positive base; a negative base gives NaN.
    """
    if isinstance(base, Tensor) or isinstance(exponent, Tensor):
        model = base if isinstance(base, Tensor) else exponent
        return _elementary("power", like(model, base), like(model, exponent))
    return _power(base, exponent)


def _power(base: Real, exponent: Real) -> Real:
    high, low = _log_sum(where(base > 0.0, base, 1.0))
    p, p_low = _two_product(exponent, high)
    value = where(base > 0.0, _exp_sum(p, p_low + exponent * low), where(base == 0.0, 0.0, math.nan))
    return where(exponent == 0.0, 1.0, where(exponent == 1.0, base, value))


def numbers(**values: Any) -> list[Real]:
    """Finite hyper-parameters as floats; all as float64 tensors where one is a 0-d float tensor.

    >>> from sparsefn import numerics
    >>> numerics.numbers(init=0.5, final=1)
    [0.5, 1.0]
    >>> numerics.numbers(init=0.5, final=torch.tensor(1.0))
    [tensor(0.5000, dtype=torch.float64), tensor(1., dtype=torch.float64)]

    Raises what `number` raises.
    """
    checked = [number(name, value) for name, value in values.items()]
    model = next((x for x in checked if isinstance(x, Tensor)), None)
    return checked if model is None else [like(model, x) for x in checked]


_ELEMENTARY: dict[str, Callable[[Real, Real], Real]] = {
    "cospi": lambda x, _: cospi_series(x),
    "exp": lambda x, _: _exp_sum(x, 0.0),
    "power": _power,
}


# Opaque to the compiler: as a graph `power` takes half a minute to compile.
@torch.library.custom_op("sparsefn::elementary", mutates_args=())
def _elementary(name: str, x: Tensor, y: Tensor) -> Tensor:
    """A function of float64 tensors that broadcast."""
    out = _like_both(name, x, y)
    if x.device.type == "cpu" and x.numel() == y.numel() == 1:
        return out.fill_(_ELEMENTARY[name](x.item(), y.item()))  # the same operations, faster on floats
    return out.copy_(_ELEMENTARY[name](x, y))


@_elementary.register_fake
def _like_both(name: str, x: Tensor, y: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=torch.float64, device=x.device)


@_elementary.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], name: str, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return _elementary(name, *batch_first(in_dims[1:], x, y)), 0


def batch_first(dims: Sequence[int | None], *tensors: Tensor | None) -> list[Tensor | None]:
    """The arguments of a batching rule, the batch in front of those that have one, ready to broadcast.

    >>> from sparsefn import numerics
    >>> [x.shape for x in numerics.batch_first((1, None), torch.zeros(3, 5), torch.zeros(4, 3))]
    [torch.Size([5, 1, 3]), torch.Size([4, 3])]
    """
    pairs = list(zip(tensors, dims, strict=False))
    rank = max(x.ndim - (dim is not None) for x, dim in pairs if x is not None)

    def lead(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None or dim is None:
            return x
        x = x.movedim(dim, 0)
        return x.reshape(x.shape[0], *(1,) * (rank + 1 - x.ndim), *x.shape[1:])

    return [lead(x, dim) for x, dim in pairs]


def number(name: str, value: Any) -> Real:
    """A finite hyper-parameter as a float, or a 0-d float tensor as float64.

    >>> from sparsefn import numerics
    >>> numerics.number("slope", 1)
    1.0

    Raises TypeError for another type or dtype, ValueError for NaN, inf or a tensor that is not 0-d.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"expected {name} to be a number or a 0-d float tensor, got a tensor of {value.dtype}")
        if value.ndim:
            raise ValueError(f"expected {name} to be a 0-d tensor, got shape {tuple(value.shape)}")
        return value.to(torch.float64)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected {name} to be a number or a 0-d float tensor, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"expected {name} to be finite, got {value}")
    return float(value)


def check_positive(name: str, value: Real) -> None:
    """Raise for a float that is not above 0; the sign of a tensor is not looked at.

    >>> from sparsefn import numerics
    >>> numerics.check_positive("steps", 0.0)
    Traceback (most recent call last):
        ...
    ValueError: expected steps > 0, got 0.0
    """
    if not isinstance(value, Tensor) and value <= 0:
        raise ValueError(f"expected {name} > 0, got {value}")
