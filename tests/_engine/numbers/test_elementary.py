import math
import random

import pytest
import torch
from torch.func import grad, jvp, vmap

from sparsefn._engine.numbers import elementary

RNG = random.Random(0)
ANY = [RNG.uniform(-3, 3) for _ in range(600)] + [
    RNG.uniform(-800, 800) for _ in range(400)
]
ANY += [k / 8 for k in range(-40, 40)] + [
    0.0,
    -0.0,
    1e-300,
    -1e-300,
    2.0**60,
    709.782712893384,
    709.79,
    -708.0,
    -708.1,
]
POSITIVE = [math.exp(RNG.uniform(-700, 700)) for _ in range(400)] + [
    RNG.uniform(0.3, 2) for _ in range(600)
]
POSITIVE += [2.0**k for k in range(-1022, 1024, 50)] + [
    1.0,
    math.nextafter(1, 2),
    math.nextafter(1, 0),
    2**-32,
]
BASES = (
    [RNG.uniform(0, 1) for _ in range(700)]
    + [1 - 10 ** RNG.uniform(-9, -2) for _ in range(300)]
    + [0.0, 1.0, 2.0]
)
EXPONENTS = (
    [RNG.uniform(0, 9) for _ in range(700)]
    + [float(RNG.randint(0, 10**7)) for _ in range(300)]
    + [3.0, 5.0, 1.0]
)
UNARY = {
    "cospi": (elementary.cospi, ANY),
    "exp": (elementary.exp, ANY),
    "log": (elementary.log, POSITIVE),
}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def bits(values):
    return f64(values).view(torch.int64).tolist()


def everything(x, positive, base, exponent):
    return (
        elementary.cospi(x),
        elementary.exp(x),
        elementary.log(positive),
        elementary.real_power(base, exponent),
    )


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
    want = bits(
        [elementary.real_power(b, e) for b, e in zip(BASES, EXPONENTS, strict=True)]
    )
    assert (
        vmap(elementary.real_power)(f64(BASES), f64(EXPONENTS))
        .view(torch.int64)
        .tolist()
        == want
    )
    pairs = (
        list(zip(BASES, EXPONENTS, want, strict=True))[::7]
        + list(zip(BASES, EXPONENTS, want, strict=True))[-3:]
    )
    for base, exponent, value in pairs:
        for b, e in (
            (f64(base), exponent),
            (base, f64(exponent)),
            (f64(base), f64(exponent)),
        ):
            assert elementary.real_power(b, e).view(torch.int64).item() == value


@pytest.mark.deep
# torch's own, when inductor is imported
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_compiled_code_gives_the_same_bits():
    want = [
        bits(column) for column in zip(*[everything(*row) for row in ROWS], strict=True)
    ]
    columns = [f64(column) for column in zip(*ROWS, strict=True)]
    batched = torch.compile(vmap(everything), fullgraph=True)(*columns)
    assert [x.view(torch.int64).tolist() for x in batched] == want
    single = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for i in range(0, N, 100):
        got = single(*map(f64, ROWS[i]))
        assert [x.view(torch.int64).item() for x in got] == [
            column[i] for column in want
        ]


def test_nested_vmap_pairs_every_base_with_every_exponent():
    bases, exponents = f64(BASES[:4]), f64(EXPONENTS[:3])
    table = vmap(vmap(elementary.real_power, (None, 0)), (0, None))(bases, exponents)
    assert table.tolist() == [
        [elementary.real_power(b, e) for e in EXPONENTS[:3]] for b in BASES[:4]
    ]
    assert torch.equal(
        vmap(vmap(elementary.real_power, (0, None)), (None, 0))(bases, exponents),
        table.T,
    )


def test_the_operator_keeps_to_the_rules_of_custom_operators():
    torch.library.opcheck(
        torch.ops.sparsefn.elementary.default, ("power", f64([0.5, 0.0]), f64(3.0))
    )


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
    third = [
        far(elementary.cospi(x), y)
        for x, y in ((1 / 4, math.sqrt(0.5)), (1 / 12, (6**0.5 + 2**0.5) / 4))
    ]
    assert max(third) <= 2


def test_powers_are_those_of_the_math_library():
    for base, exponent in zip(BASES, EXPONENTS, strict=True):
        want = base**exponent
        if want > 1e-300:
            assert far(elementary.real_power(base, exponent), want) <= (
                2 if want > 1e-40 else 10
            ), (base, exponent)


def test_special_values_are_exact():
    assert [
        elementary.cospi(x)
        for x in (0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 2.5, 1e6 + 1, 2.0**60)
    ] == [
        *(1, 0, -1, -1, 0, 1, 0, -1, 1),
    ]
    assert [elementary.exp(x) for x in (0.0, -1000.0, 1000.0, math.inf, -math.inf)] == [
        1,
        0,
        math.inf,
        math.inf,
        0,
    ]
    assert elementary.log(1.0) == 0 and elementary.log(2.0) == math.log(2)
    for base in BASES:
        assert (
            elementary.real_power(base, 0.0) == 1
            and elementary.real_power(base, 1.0) == base
        )
    assert [
        elementary.real_power(b, e)
        for b, e in ((0.5, 3.0), (0.75, 3.0), (2.0, 10.0), (1.0, 1e18), (0.0, 0.5))
    ] == [
        *(0.125, 0.421875, 1024, 1, 0),
    ]
    assert (
        elementary.real_power(2.0, 1e18) == math.inf
        and elementary.real_power(0.5, 1e18) == 0
    )
    assert math.isnan(elementary.real_power(-2.0, 3.0)) and math.isnan(
        elementary.real_power(f64(-2.0), 3.0)
    )
    assert all(
        math.isnan(fn(f64(math.nan))) for fn in (elementary.cospi, elementary.exp)
    )


def test_cospi_repeats_exactly():
    assert all(
        elementary.cospi(k / 64) == elementary.cospi(k / 64 + 2 * n)
        for k in range(128)
        for n in (1, 1000, 2**40)
    )


# A function of one float64 tensor, and the points at which it is differentiated.
CURVES = {
    "cospi": (
        elementary.cospi,
        [-7.3, -1.0, -0.2, 0.0, 0.3, 0.5, 1.0, 5.75, 1e6 + 0.25],
    ),
    "exp": (elementary.exp, [-700.0, -3.0, 0.0, 1e-9, 2.5, 30.0]),
    "log": (elementary.log, [1e-9, 0.3, 1.0, 2.0, 1e9]),
    "power in the base": (
        lambda x: elementary.real_power(x, 2.5),
        [1e-6, 0.4, 1.0, 3.0],
    ),
    "power in the exponent": (
        lambda y: elementary.real_power(0.4, y),
        [0.0, 0.5, 1.0, 7.0],
    ),
    "power of itself": (lambda x: elementary.real_power(x, x), [0.25, 1.0, 2.0, 3.0]),
    "sqrt": (elementary.sqrt, [1e-9, 0.5, 2.0, 9.0]),
}
SLOPES = {
    "cospi": lambda x: -math.pi * math.sin(math.pi * math.fmod(x, 2.0)),
    "exp": math.exp,
    "log": lambda x: 1 / x,
    "power in the base": lambda x: 2.5 * x**1.5,
    "power in the exponent": lambda y: math.log(0.4) * 0.4**y,
    "power of itself": lambda x: x**x * (1 + math.log(x)),
    "sqrt": lambda x: 0.5 / math.sqrt(x),
}


@pytest.mark.deep(but=["exp"])
@pytest.mark.parametrize("name", CURVES)
def test_slopes_are_right_backwards_forwards_batched_and_compiled(name):
    fn, points = CURVES[name]
    x = f64(points)
    want = f64([SLOPES[name](point) for point in points])

    def forwards(x):
        return jvp(fn, (x,), (torch.ones_like(x),))[1]

    leaf = x.clone().requires_grad_()
    fn(leaf).sum().backward()
    found = {
        "backward": leaf.grad,
        "vmap(grad)": vmap(grad(fn))(x),
        "grad(vmap)": grad(lambda x: vmap(fn)(x).sum())(x),
        "jvp": forwards(x),
        "vmap(jvp)": vmap(forwards)(x),
        "compile(grad)": torch.compile(
            grad(lambda x: fn(x).sum()), fullgraph=True, backend="aot_eager"
        )(x),
        "compile(vmap(grad))": torch.compile(
            vmap(grad(fn)), fullgraph=True, backend="aot_eager"
        )(x),
    }
    for way, got in found.items():
        assert torch.allclose(got, want, rtol=1e-13, atol=1e-15), way


@pytest.mark.parametrize("name", CURVES)
def test_values_are_the_same_bits_where_slopes_are_asked_for(name):
    fn, points = CURVES[name]
    want = (
        bits([fn(x) for x in points])
        if name != "sqrt"
        else fn(f64(points)).view(torch.int64).tolist()
    )
    kept = vmap(lambda x: jvp(fn, (x,), (x,))[0])(f64(points))
    assert kept.view(torch.int64).tolist() == want
    values = vmap(lambda x: torch.func.grad_and_value(fn)(x)[1])(f64(points))
    assert values.view(torch.int64).tolist() == want


def test_second_derivatives_are_right():
    x = f64(0.7)
    assert grad(grad(elementary.exp))(x).item() == pytest.approx(
        math.exp(0.7), rel=1e-13
    )
    assert grad(grad(elementary.cospi))(x).item() == pytest.approx(
        -(math.pi**2) * math.cos(0.7 * math.pi), rel=1e-13
    )
    assert grad(grad(elementary.log))(x).item() == pytest.approx(-1 / 0.49, rel=1e-13)
    assert grad(grad(lambda b: elementary.real_power(b, 3.0)))(
        x
    ).item() == pytest.approx(4.2, rel=1e-13)
    both = grad(lambda b: grad(lambda e: elementary.real_power(b, e))(f64(2.0)))(x)
    assert both.item() == pytest.approx(0.7 * (1 + 2 * math.log(0.7)), rel=1e-13)
    assert jvp(grad(elementary.exp), (x,), (f64(1.0),))[1].item() == pytest.approx(
        math.exp(0.7), rel=1e-13
    )


def test_slopes_are_finite_where_values_end():
    slopes = vmap(grad(elementary.exp))(f64([-1000.0, 1000.0, math.inf, -math.inf]))
    assert slopes.tolist() == [0.0] * 4
    zero = f64(0.0)
    assert [
        grad(elementary.real_power)(zero, f64(e)).item() for e in (0.5, 1.0, 2.0, 3.0)
    ] == [0.0, 1.0, 0.0, 0.0]
    assert grad(lambda e: elementary.real_power(0.0, e))(f64(2.0)).item() == 0.0
    assert grad(grad(lambda e: elementary.real_power(0.0, e)))(f64(2.0)).item() == 0.0
    assert grad(elementary.real_power)(f64(2.0), f64(1e18)).item() == 0.0
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.tensor([0.0, 4.0], dtype=dtype)
        assert grad(lambda x: elementary.sqrt(x).sum())(x).tolist() == [0.0, 0.25]


def test_zeros_keep_their_sign():
    assert [
        math.copysign(1.0, elementary.cospi(f64(x)).item()) for x in (0.5, 1.5)
    ] == [math.copysign(1.0, elementary.cospi(x)) for x in (0.5, 1.5)]
    for dtype in (torch.float32, torch.float64):
        assert (
            math.copysign(1.0, elementary.sqrt(torch.tensor(-0.0, dtype=dtype)).item())
            == 1.0
        )


def test_roots_of_negative_numbers_are_nan_and_inputs_stay():
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([0.0, -1.0, 4.0, math.inf], dtype=dtype)
        assert torch.equal(
            elementary.sqrt(x).nan_to_num(7.0, posinf=9.0),
            torch.tensor([0, 7, 2, 9], dtype=dtype),
        )
        assert torch.equal(x, torch.tensor([0.0, -1.0, 4.0, math.inf], dtype=dtype))


def test_slopes_are_constants_where_functions_end():
    x = torch.tensor([0.0, -1e3, 1e3], dtype=torch.float64)
    for name, fn in elementary._DERIVATIVES.items():
        value = torch.ones_like(x)
        assert fn(x, torch.full_like(x, 2.0), value).isfinite().all(), name
