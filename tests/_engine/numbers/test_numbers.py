import math
from fractions import Fraction

import pytest
import torch
from torch.func import vmap

from sparsefn._engine.numbers import numbers
from sparsefn.core.checks import checks


def test_where_and_divide_mix_floats_and_tensors():
    x = torch.tensor(7.0, dtype=torch.float64)
    assert (
        numbers.real_where(False, 1.0, 0.1) == 0.1
        and numbers.divide(7.0, 49.0) == 7.0 / 49.0
    )
    for got in (
        numbers.real_where(x > 8, 1.0, 0.1),
        numbers.real_where(x > 8, x, 0.1),
        vmap(lambda x: numbers.real_where(x > 8, 1.0, 0.1))(x.reshape(1))[0],
    ):
        assert got.dtype == torch.float64 and got.item() == 0.1
    for a in map(float, range(1, 60)):
        for got in (
            numbers.divide(x * a, 49.0),
            numbers.divide(7.0 * a, x * 7),
            numbers.divide(x * a, x * 7),
        ):
            assert got.item() == 7.0 * a / 49.0


def test_floor_takes_floats_and_tensors():
    for x in (-1.5, -1.0, 0.0, 0.3, 2.0**60):
        assert (
            numbers.floor(x)
            == math.floor(x)
            == numbers.floor(torch.tensor(x, dtype=torch.float64)).item()
        )


def test_between_two_numbers_neither_is_passed():
    for first, last in ((0.1, 0.7), (0.7, 0.1), (0.3, 0.3)):
        for share in (0.0, 0.1, 1.0 - 2**-53, 1.0):
            value = numbers.between(first, last, share)
            assert min(first, last) <= value <= max(first, last)
            assert (
                value
                == numbers.between(
                    torch.tensor(first, dtype=torch.float64), last, share
                ).item()
            )
        assert (
            numbers.between(first, last, 1.0),
            numbers.between(first, last, 0.0),
        ) == (first, last)
    assert [numbers.held(x, 0.0, 5.0) for x in (-1.0, 3.0, 7.0)] == [0.0, 3.0, 5.0]


@pytest.mark.parametrize(
    "kind", [float, lambda x: torch.tensor(x, dtype=torch.float64)]
)
def test_sums_and_products_lose_nothing(kind):
    values = [0.1, -0.7, 3.0, 1e16, -1e-9, 1 / 3, 123456789.123]
    for a in values:
        for b in values:
            total, rest = map(float, numbers.two_sum(kind(a), kind(b)))
            assert total == a + b and Fraction(total) + Fraction(rest) == Fraction(
                a
            ) + Fraction(b)
            product, rest = map(float, numbers.two_product(kind(a), kind(b)))
            assert product == a * b and Fraction(product) + Fraction(rest) == Fraction(
                a
            ) * Fraction(b)


def test_batches_come_first_and_ranks_match():
    x, y = numbers.batch_first((1, 0), torch.zeros(3, 5), torch.zeros(5, 4, 3))
    assert x.shape == (5, 1, 3) and y.shape == (5, 4, 3)
    x, y = numbers.batch_first((0, None), torch.zeros(5, 3), None)
    assert x.shape == (5, 3) and y is None


def test_default_dtype_and_default_device_do_not_matter():
    try:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("meta")
        got = (
            numbers.real_where(torch.tensor(True, device="cpu"), 0.1, 0.2),
            numbers.like(torch.zeros((), device="cpu"), 0.1),
        )
    finally:
        torch.set_default_device(None)
    assert [x.item() for x in got] == [0.1, 0.1] and got[0].dtype == got[
        1
    ].dtype == torch.float64


def test_hyper_parameters_become_tensors_together():
    assert checks.numbers(a=1, b=0.25) == [1.0, 0.25]
    a, b = checks.numbers(a=1, b=torch.tensor(0.1))
    assert (
        a.dtype == b.dtype == torch.float64
        and a.item() == 1
        and b.item() == float(torch.tensor(0.1))
    )


@pytest.mark.parametrize(
    "value, error, text",
    [
        (True, TypeError, "expected x to be a number or a 0-d float tensor, got bool"),
        ("1", TypeError, "expected x to be a number or a 0-d float tensor, got str"),
        (
            torch.tensor(1),
            TypeError,
            "expected x to be a number or a 0-d float tensor, got a tensor of "
            "torch.int64",
        ),
        (torch.ones(2), ValueError, r"expected x to be a 0-d tensor, got shape \(2,\)"),
        (math.nan, ValueError, "expected x to be finite, got nan"),
        (math.inf, ValueError, "expected x to be finite, got inf"),
    ],
)
def test_bad_hyper_parameters_are_named(value, error, text):
    with pytest.raises(error, match=text):
        checks.number("x", value)
    with pytest.raises(error, match=text):
        checks.numbers(x=value)


def test_only_floats_are_checked_for_their_sign():
    checks.check_positive("x", torch.tensor(-1.0))
    with pytest.raises(ValueError, match=r"expected x > 0, got -1.0"):
        checks.check_positive("x", -1.0)
