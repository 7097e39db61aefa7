import math
import random

import pytest
import torch
from torch.func import vmap

from sparsefn import numerics

RNG = random.Random(0)
ANY = [RNG.uniform(-3, 3) for _ in range(600)] + [RNG.uniform(-800, 800) for _ in range(400)]
ANY += [k / 8 for k in range(-40, 40)] + [0.0, -0.0, 1e-300, -1e-300, 2.0**60, 709.782712893384, 709.79, -708.0, -708.1]
POSITIVE = [math.exp(RNG.uniform(-700, 700)) for _ in range(400)] + [RNG.uniform(0.3, 2) for _ in range(600)]
POSITIVE += [2.0**k for k in range(-1022, 1024, 50)] + [1.0, math.nextafter(1, 2), math.nextafter(1, 0), 2**-32]
BASES = [RNG.uniform(0, 1) for _ in range(700)] + [1 - 10 ** RNG.uniform(-9, -2) for _ in range(300)] + [0.0, 1.0, 2.0]
EXPONENTS = (
    [RNG.uniform(0, 9) for _ in range(700)] + [float(RNG.randint(0, 10**7)) for _ in range(300)] + [3.0, 5.0, 1.0]
)
UNARY = {"cospi": (numerics.cospi, ANY), "exp": (numerics.exp, ANY), "log": (numerics.log, POSITIVE)}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def bits(values):
    return f64(values).view(torch.int64).tolist()


def everything(x, positive, base, exponent):
    return (numerics.cospi(x), numerics.exp(x), numerics.log(positive), numerics.power(base, exponent))


N = min(len(ANY), len(POSITIVE), len(BASES))
ROWS = list(zip(ANY[-N:], POSITIVE[-N:], BASES[-N:], EXPONENTS[-N:], strict=True))


@pytest.mark.parametrize("name", UNARY)
def test_floats_tensors_and_vmap_give_the_same_bits(name):
    fn, values = UNARY[name]
    want = bits([fn(x) for x in values])
    assert [fn(x).view(torch.int64).item() for x in f64(values)] == want
    assert vmap(fn)(f64(values)).view(torch.int64).tolist() == want
    assert fn(f64(values)).view(torch.int64).tolist() == want


def test_powers_have_the_same_bits_whichever_argument_is_a_tensor():
    want = bits([numerics.power(b, e) for b, e in zip(BASES, EXPONENTS, strict=True)])
    assert vmap(numerics.power)(f64(BASES), f64(EXPONENTS)).view(torch.int64).tolist() == want
    pairs = list(zip(BASES, EXPONENTS, want, strict=True))[::7] + list(zip(BASES, EXPONENTS, want, strict=True))[-3:]
    for base, exponent, value in pairs:
        for b, e in ((f64(base), exponent), (base, f64(exponent)), (f64(base), f64(exponent))):
            assert numerics.power(b, e).view(torch.int64).item() == value


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, when inductor is imported
def test_compiled_code_gives_the_same_bits():
    want = [bits(column) for column in zip(*[everything(*row) for row in ROWS], strict=True)]
    columns = [f64(column) for column in zip(*ROWS, strict=True)]
    got = torch.compile(vmap(everything), fullgraph=True)(*columns)
    assert [x.view(torch.int64).tolist() for x in got] == want


def far(got, want):
    """Distance in units of the last place of what is wanted."""
    return abs(got - want) / math.ulp(want) if got != want else 0.0


@pytest.mark.parametrize("name, reference", [("exp", math.exp), ("log", math.log)])
def test_values_are_those_of_the_math_library(name, reference):
    fn, values = UNARY[name]
    for x in values:
        if name == "log" or -708 <= x <= 709.78:
            assert far(fn(x), reference(x)) <= 2, x


def test_cospi_is_the_cosine():
    for x in ANY:
        if abs(x) < 1:
            # near a zero of the cosine the argument pi * x is itself rounded
            assert abs(numerics.cospi(x) - math.cos(math.pi * x)) <= 4e-16, x
    third = [far(numerics.cospi(x), y) for x, y in ((1 / 4, math.sqrt(0.5)), (1 / 12, (6**0.5 + 2**0.5) / 4))]
    assert max(third) <= 2


def test_powers_are_those_of_the_math_library():
    for base, exponent in zip(BASES, EXPONENTS, strict=True):
        want = base**exponent
        if want > 1e-300:
            assert far(numerics.power(base, exponent), want) <= (2 if want > 1e-40 else 10), (base, exponent)


def test_special_values_are_exact():
    assert [numerics.cospi(x) for x in (0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 2.5, 1e6 + 1, 2.0**60)] == [
        *(1, 0, -1, -1, 0, 1, 0, -1, 1),
    ]
    assert [numerics.exp(x) for x in (0.0, -1000.0, 1000.0, math.inf, -math.inf)] == [1, 0, math.inf, math.inf, 0]
    assert numerics.log(1.0) == 0 and numerics.log(2.0) == math.log(2)
    for base in BASES:
        assert numerics.power(base, 0.0) == 1 and numerics.power(base, 1.0) == base
    assert [numerics.power(b, e) for b, e in ((0.5, 3.0), (0.75, 3.0), (2.0, 10.0), (1.0, 1e18), (0.0, 0.5))] == [
        *(0.125, 0.421875, 1024, 1, 0),
    ]
    assert numerics.power(2.0, 1e18) == math.inf and numerics.power(0.5, 1e18) == 0
    assert math.isnan(numerics.power(-2.0, 3.0)) and math.isnan(numerics.power(f64(-2.0), 3.0))
    assert all(math.isnan(fn(f64(math.nan))) for fn in (numerics.cospi, numerics.exp))


def test_cospi_repeats_exactly():
    assert all(numerics.cospi(k / 64) == numerics.cospi(k / 64 + 2 * n) for k in range(128) for n in (1, 1000, 2**40))


def test_default_dtype_and_default_device_do_not_matter():
    try:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("meta")
        got = (
            numerics.where(torch.tensor(True, device="cpu"), 0.1, 0.2),
            numerics.like(torch.zeros((), device="cpu"), 0.1),
        )
    finally:
        torch.set_default_device(None)
    assert [x.item() for x in got] == [0.1, 0.1] and got[0].dtype == got[1].dtype == torch.float64


def test_hyper_parameters_become_tensors_together():
    assert numerics.numbers(a=1, b=0.25) == [1.0, 0.25]
    a, b = numerics.numbers(a=1, b=torch.tensor(0.1))
    assert a.dtype == b.dtype == torch.float64 and a.item() == 1 and b.item() == float(torch.tensor(0.1))


@pytest.mark.parametrize(
    "value, error, text",
    [
        (True, TypeError, "expected x to be a number or a 0-d float tensor, got bool"),
        ("1", TypeError, "expected x to be a number or a 0-d float tensor, got str"),
        (torch.tensor(1), TypeError, "expected x to be a number or a 0-d float tensor, got a tensor of torch.int64"),
        (torch.ones(2), ValueError, r"expected x to be a 0-d tensor, got shape \(2,\)"),
        (math.nan, ValueError, "expected x to be finite, got nan"),
        (math.inf, ValueError, "expected x to be finite, got inf"),
    ],
)
def test_bad_hyper_parameters_are_named(value, error, text):
    with pytest.raises(error, match=text):
        numerics.number("x", value)
    with pytest.raises(error, match=text):
        numerics.numbers(x=value)


def test_only_floats_are_checked_for_their_sign():
    numerics.check_positive("x", torch.tensor(-1.0))
    with pytest.raises(ValueError, match=r"expected x > 0, got -1.0"):
        numerics.check_positive("x", -1.0)
