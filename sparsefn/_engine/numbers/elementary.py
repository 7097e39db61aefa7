"""exp, log, power and cos(pi x) from `+ - * /` and floor, for floats and tensors.

The libraries behind Python, eager tensors and compiled code round `exp` and `cos`
differently in the last place. Here all of them go through one sequence of exactly
rounded operations: argument reduction, a series, and error-free sums and products where
it takes more than float64.

Derivatives of every order, forward and backward, equal torch's; at the ends of a range
see each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn._engine.numbers.numbers import (
    Real,
    batch_first,
    floor,
    held,
    like,
    real_where,
    two_product,
    two_sum,
    whole_power,
)
from sparsefn._engine.torch_limits import reinterpreted
from sparsefn._engine.transforms import differentiated

# ln 2 in two parts; the first has 20 trailing zero bits, so k * LN2_HI is exact for
# every exponent k.
LN2_HI = 0.6931471803691238
LN2_LO = 1.9082149292705877e-10
_LOG2_E = 1.4426950408889634
SQRT2 = 1.4142135623730951
# below: 0, no subnormals (compiled code may flush them); above: inf
EXP_MIN = -708.0
EXP_MAX = 709.782712893384
_EXP_TAIL = tuple(1.0 / math.factorial(n) for n in range(2, 15))
ATANH_TAIL = tuple(2.0 / n for n in range(3, 25, 2))
COS = (
    1.0,
    -4.934802200544679,
    4.0587121264167685,
    -1.3352627688545895,
    0.2353306303588932,
    -0.02580689139001406,
    0.0019295743094039231,
    -0.0001046381049248457,
    4.303069587032947e-06,
    -1.3878952462213771e-07,
)
SIN = (
    3.141592653589793,
    -5.16771278004997,
    2.5501640398773455,
    -0.5992645293207921,
    0.08214588661112823,
    -0.0073704309457143504,
    0.00046630280576761255,
    -2.1915353447830217e-05,
    7.952054001475513e-07,
    -2.2948428997269873e-08,
)


def _horner(coefficients: tuple[float, ...], x: Real) -> Real:
    value: Real = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def cospi(x: Real) -> Real:
    """cos(pi x), exact at multiples of 1/2.

    >>> from sparsefn._engine.numbers import elementary
    >>> elementary.cospi(0.0), elementary.cospi(0.5), elementary.cospi(1.0)
    (1.0, 0.0, -1.0)

    For finite `x`; within 2 units in the last place.
    """
    return _smooth("cospi", x, 0.0)


def _cospi(x: Real) -> Real:
    # Into [0, 2), then [0, 1], as cos is even around 1, then [0, 1/2], as it is odd
    # around 1/2. A difference that counts is a remainder, or of numbers of which one is
    # at most twice the other: no difference is rounded.
    x = real_where(x < 0.0, -x, x)
    x = x - 2.0 * floor(x * 0.5)
    x = real_where(x > 1.0, 2.0 - x, x)
    is_upper = x > 0.5
    x = real_where(is_upper, 1.0 - x, x)
    rest = 0.5 - x
    cosine = _horner(COS, x * x)
    sine_of_rest = rest * _horner(SIN, rest * rest)
    value = real_where(x <= 0.25, cosine, sine_of_rest)
    return real_where(is_upper, -value, value)


def exp(x: Real) -> Real:
    """e to the x.

    >>> from sparsefn._engine.numbers import elementary
    >>> elementary.exp(0.0), elementary.exp(-1000.0)
    (1.0, 0.0)

    Within 1 unit in the last place; 0 below -708, inf above 709.78, and of slope 0
    there.
    """
    return _smooth("exp", x, 0.0)


def _exp_sum(high: Real, low: Real) -> Real:
    # e^(high + low) = 2^k e^(r + low), with r in [-ln(2) / 2, ln(2) / 2].
    x = held(high, EXP_MIN, EXP_MAX)
    k = floor(x * _LOG2_E + 0.5)
    # k * LN2_HI is exact, and so is its difference to x, which is close to it
    r, low = two_sum(x - k * LN2_HI, low - k * LN2_LO)
    one, error = two_sum(1.0, r)
    tail = r * r * _horner(_EXP_TAIL, r)
    value = one + (error + (tail + (low + low * r)))
    # 2^k in two factors, as 2^1024 is no float64
    half = floor(k * 0.5)
    value = value * _power_of_two(half) * _power_of_two(k - half)
    value = real_where(high < EXP_MIN, 0.0, value)
    return real_where(high > EXP_MAX, math.inf, value)


def _power_of_two(k: Real) -> Real:
    if isinstance(k, Tensor):
        return reinterpreted((k.to(torch.int64) + 1023) << 52, torch.float64)
    return math.ldexp(1.0, int(k))


def _split_exponent(x: Real) -> tuple[Real, Real]:
    """(k, f) with x = 2^k (1 + f) and 1 + f in (sqrt(1/2), sqrt(2)].

    The number x is positive and normal.
    """
    k: Real
    m: Real
    if isinstance(x, Tensor):
        word = reinterpreted(x, torch.int64)
        k = ((word >> 52) - 1023).to(torch.float64)
        digits = word & ((1 << 52) - 1)
        m = reinterpreted(digits | (1023 << 52), torch.float64)
    else:
        m, exponent = math.frexp(x)
        m = m * 2.0
        k = float(exponent - 1)
    large = m > SQRT2
    k = real_where(large, k + 1.0, k)
    m = real_where(large, m * 0.5, m)
    return k, m - 1.0


def log(x: Real) -> Real:
    """The natural logarithm of a positive normal number.

    >>> from sparsefn._engine.numbers import elementary
    >>> elementary.log(1.0)
    0.0

    Within 1 unit in the last place.
    """
    return _smooth("log", x, 0.0)


def _log(x: Real) -> Real:
    # log(2^k (1 + f)) = k ln(2) + 2 atanh(s), where 2 atanh(s) = f - s (f - tail).
    k, f = _split_exponent(x)
    s = f / (2.0 + f)
    z = s * s
    tail = z * _horner(ATANH_TAIL, z)
    return k * LN2_HI - ((s * (f - tail) - k * LN2_LO) - f)


def _log_sum(x: Real) -> tuple[Real, Real]:
    """log(x) as an unevaluated sum, to about 60 bits: 2 atanh(f / (2 + f)) with a
    corrected quotient.
    """
    k, f = _split_exponent(x)
    d, d_low = two_sum(2.0, f)
    s = f / d
    p, p_low = two_product(s, d)
    s_low = ((f - p) - p_low - s * d_low) / d  # what the quotient lacks
    z = s * s
    tail = s * z * _horner(ATANH_TAIL, z)
    high, low = two_sum(k * LN2_HI, 2.0 * s)
    return two_sum(high, low + (2.0 * s_low + k * LN2_LO + tail))


def real_power(base: Real, exponent: Real) -> Real:
    """`base ** exponent` for base >= 0; `power(b, 0)` is 1 and `power(b, 1)` is b.

    >>> from sparsefn._engine.numbers import elementary
    >>> elementary.real_power(0.5, 3.0), elementary.real_power(0.0, 2.0)
    (0.125, 0.0)

    Within 1 unit in the last place for results between 1e-40 and 1e40, and a few
    beyond. A negative exponent needs a positive base; a negative base gives NaN. Slopes
    at base 0 are the base's for exponent 1, and 0 for other exponents; where the value
    is not finite they are 0, too.
    """
    return _smooth("power", base, exponent)


def _power(base: Real, exponent: Real) -> Real:
    high, low = _log_sum(real_where(base > 0.0, base, 1.0))
    p, p_low = two_product(exponent, high)
    power = _exp_sum(p, p_low + exponent * low)
    of_others = real_where(base == 0.0, 0.0, math.nan)
    value = real_where(base > 0.0, power, of_others)
    value = real_where(exponent == 1.0, base, value)
    return real_where(exponent == 0.0, 1.0, value)


def _slope_of_power(x: Tensor, y: Tensor, value: Tensor) -> Tensor:
    tame = (x > 0.0) & (value < 1e308)
    base = torch.where(tame, x, 1.0)
    exponent = torch.where(tame, y, 1.0)
    at_zero = torch.where((x == 0.0) & (y == 1.0), x, 0.0)
    return torch.where(tame, torch.pow(base, exponent), at_zero)


_FUNCTIONS: dict[str, Callable[[Real, Real], Real]] = {
    "cospi": lambda x, _: _cospi(x),
    "exp": _exp_sum,
    "log": lambda x, _: _log(x),
    "power": _power,
}
# Torch's own where they are finite and have a slope, and elsewhere constants: they
# serve for derivatives.
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cospi": lambda x, y, value: torch.cos(math.pi * (x - 2.0 * torch.floor(x * 0.5))),
    "exp": lambda x, y, value: torch.exp(
        torch.where((x > EXP_MIN) & (x < EXP_MAX), x, 0.0)
    ),
    "log": lambda x, y, value: torch.log(
        torch.where((x > 0.0) & (x < math.inf), x, 1.0)
    ),
    "power": _slope_of_power,
}


def value_of(name: str, x: Real, y: Real = 0.0) -> Real:
    """A function by name, without derivatives: for random draws, and for many numbers
    at a time.
    """
    return _FUNCTIONS[name](x, y)


def _smooth(name: str, x: Real, y: Real) -> Real:
    model = next((z for z in (x, y) if isinstance(z, Tensor)), None)
    if model is None:
        return value_of(name, x, y)
    a = like(model, x)
    b = like(model, y)
    value: Tensor = _on_tensors(name, a.detach(), b.detach())
    if not differentiated(a, b):
        return value
    # A zero that has the slopes: a backward of the operator's own would not reach
    # forward mode. It is subtracted, as -0.0 + 0.0 would be 0.0.
    slope = _DERIVATIVES[name](a, b, value)
    return value - (slope.detach() - slope)


# Opaque to the compiler: as a graph `power` takes half a minute to compile.
@torch.library.custom_op("sparsefn::elementary", mutates_args=())
def _on_tensors(name: str, x: Tensor, y: Tensor) -> Tensor:
    """A function of float64 tensors that broadcast."""
    out: Tensor = _empty(name, x, y)
    if x.device.type == "cpu" and x.numel() == y.numel() == 1:
        a = x.item()
        b = y.item()
        if math.isfinite(a) and math.isfinite(b):
            # the same operations, faster on floats
            return out.fill_(_FUNCTIONS[name](a, b))
    return out.copy_(like(x, _FUNCTIONS[name](x, y)))


@_on_tensors.register_fake
def _empty(name: str, x: Tensor, y: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=torch.float64, device=x.device)


@_on_tensors.register_vmap
def _(
    info: object,
    in_dims: tuple[int | None, ...],
    name: str,
    x: Tensor,
    y: Tensor,
) -> tuple[Tensor, int]:
    return _on_tensors(name, *batch_first(in_dims[1:], x, y)), 0


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of a tensor of any float dtype.

    >>> from sparsefn._engine.numbers import elementary
    >>> elementary.sqrt(torch.tensor([0.0, 2.0, 9.0]))
    tensor([0.0000, 1.4142, 3.0000])

    Eager torch.sqrt is one ulp off here and there on CPU, compiled code's is not. Of
    -0.0 it is 0.0. The slope at 0 is 0 and not inf: so are the slopes of norms of zeros
    and of Adam's steps.
    """
    if not differentiated(x) and x.dtype != torch.float64:
        return x.double().sqrt_().to(x.dtype).add_(0.0)  # -0.0 becomes 0.0
    zero = x == 0
    if x.dtype == torch.float64:
        root = _corrected_sqrt(x.masked_fill(zero, 1.0))
    else:
        root = x.masked_fill(zero, 1.0).double().sqrt().to(x.dtype)
    return root.masked_fill_(zero, 0.0)


def _corrected_sqrt(x: Tensor) -> Tensor:
    # One step of Newton's method from the exact square of a root that is an ulp off.
    root = x.sqrt()
    square, rest = two_product(root, root)
    step = ((x - square) - rest) / (2 * root)
    return torch.where(step.isfinite(), root + step, root)


def raised(x: Tensor, order: float) -> Tensor:
    """Numbers from 0 up to the power of an order, as a norm adds them: of order 0,
    whether they are not 0.
    """
    if order == 0:
        return (x != 0).to(x.dtype)
    if order >= 1 and order == int(order):
        return whole_power(x, int(order))
    return _wide_power(x, order)


def root(total: Tensor, order: float) -> Tensor:
    """The root of some order: of a sum of powers, the norm."""
    if order in (0, 1) or math.isinf(order):
        return total
    if order == 2:
        return sqrt(total)
    return _wide_power(total, 1 / order)


def _wide_power(x: Tensor, exponent: float) -> Tensor:
    value = real_power(x.double(), exponent)
    if exponent < 0:
        value = torch.where(x == 0, math.inf, value)
        value = torch.where(x == math.inf, 0.0, value)
    else:
        value = torch.where(x == math.inf, math.inf, value)
    return value.to(x.dtype)
