import math
import random

import pytest
import torch
from torch.func import vmap

from sparsefn import elementary

RNG = random.Random(0)
ANY = [RNG.uniform(-3, 3) for _ in range(600)] + [RNG.uniform(-800, 800) for _ in range(400)]
ANY += [k / 8 for k in range(-40, 40)] + [0.0, -0.0, 1e-300, -1e-300, 2.0**60, 709.782712893384, 709.79, -708.0, -708.1]
POSITIVE = [math.exp(RNG.uniform(-700, 700)) for _ in range(400)] + [RNG.uniform(0.3, 2) for _ in range(600)]
POSITIVE += [2.0**k for k in range(-1022, 1024, 50)] + [1.0, math.nextafter(1, 2), math.nextafter(1, 0), 2**-32]
BASES = [RNG.uniform(0, 1) for _ in range(700)] + [1 - 10 ** RNG.uniform(-9, -2) for _ in range(300)] + [0.0, 1.0, 2.0]
EXPONENTS = (
    [RNG.uniform(0, 9) for _ in range(700)] + [float(RNG.randint(0, 10**7)) for _ in range(300)] + [3.0, 5.0, 1.0]
)
UNARY = {"cospi": (elementary.cospi, ANY), "exp": (elementary.exp, ANY), "log": (elementary.log, POSITIVE)}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def bits(values):
    return f64(values).view(torch.int64).tolist()


def everything(x, positive, base, exponent):
    return (elementary.cospi(x), elementary.exp(x), elementary.log(positive), elementary.power(base, exponent))


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
    want = bits([elementary.power(b, e) for b, e in zip(BASES, EXPONENTS, strict=True)])
    assert vmap(elementary.power)(f64(BASES), f64(EXPONENTS)).view(torch.int64).tolist() == want
    pairs = list(zip(BASES, EXPONENTS, want, strict=True))[::7] + list(zip(BASES, EXPONENTS, want, strict=True))[-3:]
    for base, exponent, value in pairs:
        for b, e in ((f64(base), exponent), (base, f64(exponent)), (f64(base), f64(exponent))):
            assert elementary.power(b, e).view(torch.int64).item() == value


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, when inductor is imported
def test_compiled_code_gives_the_same_bits():
    want = [bits(column) for column in zip(*[everything(*row) for row in ROWS], strict=True)]
    columns = [f64(column) for column in zip(*ROWS, strict=True)]
    batched = torch.compile(vmap(everything), fullgraph=True)(*columns)
    assert [x.view(torch.int64).tolist() for x in batched] == want
    single = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for i in range(0, N, 100):
        got = single(*map(f64, ROWS[i]))
        assert [x.view(torch.int64).item() for x in got] == [column[i] for column in want]


def test_nested_vmap_pairs_every_base_with_every_exponent():
    bases, exponents = f64(BASES[:4]), f64(EXPONENTS[:3])
    table = vmap(vmap(elementary.power, (None, 0)), (0, None))(bases, exponents)
    assert table.tolist() == [[elementary.power(b, e) for e in EXPONENTS[:3]] for b in BASES[:4]]
    assert torch.equal(vmap(vmap(elementary.power, (0, None)), (None, 0))(bases, exponents), table.T)


def test_the_operator_keeps_to_the_rules_of_custom_operators():
    torch.library.opcheck(torch.ops.sparsefn.elementary.default, ("power", f64([0.5, 0.0]), f64(3.0)))


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
            assert abs(elementary.cospi(x) - math.cos(math.pi * x)) <= 4e-16, x
    third = [far(elementary.cospi(x), y) for x, y in ((1 / 4, math.sqrt(0.5)), (1 / 12, (6**0.5 + 2**0.5) / 4))]
    assert max(third) <= 2


def test_powers_are_those_of_the_math_library():
    for base, exponent in zip(BASES, EXPONENTS, strict=True):
        want = base**exponent
        if want > 1e-300:
            assert far(elementary.power(base, exponent), want) <= (2 if want > 1e-40 else 10), (base, exponent)


def test_special_values_are_exact():
    assert [elementary.cospi(x) for x in (0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 2.5, 1e6 + 1, 2.0**60)] == [
        *(1, 0, -1, -1, 0, 1, 0, -1, 1),
    ]
    assert [elementary.exp(x) for x in (0.0, -1000.0, 1000.0, math.inf, -math.inf)] == [1, 0, math.inf, math.inf, 0]
    assert elementary.log(1.0) == 0 and elementary.log(2.0) == math.log(2)
    for base in BASES:
        assert elementary.power(base, 0.0) == 1 and elementary.power(base, 1.0) == base
    assert [elementary.power(b, e) for b, e in ((0.5, 3.0), (0.75, 3.0), (2.0, 10.0), (1.0, 1e18), (0.0, 0.5))] == [
        *(0.125, 0.421875, 1024, 1, 0),
    ]
    assert elementary.power(2.0, 1e18) == math.inf and elementary.power(0.5, 1e18) == 0
    assert math.isnan(elementary.power(-2.0, 3.0)) and math.isnan(elementary.power(f64(-2.0), 3.0))
    assert all(math.isnan(fn(f64(math.nan))) for fn in (elementary.cospi, elementary.exp))


def test_cospi_repeats_exactly():
    assert all(
        elementary.cospi(k / 64) == elementary.cospi(k / 64 + 2 * n) for k in range(128) for n in (1, 1000, 2**40)
    )
