import math
from fractions import Fraction

import pytest
import torch
from torch.func import vmap

from sparsefn import numerics


def test_where_and_divide_mix_floats_and_tensors():
    x = torch.tensor(7.0, dtype=torch.float64)
    assert numerics.where(False, 1.0, 0.1) == 0.1 and numerics.divide(7.0, 49.0) == 7.0 / 49.0
    for got in (
        numerics.where(x > 8, 1.0, 0.1),
        numerics.where(x > 8, x, 0.1),
        vmap(lambda x: numerics.where(x > 8, 1.0, 0.1))(x.reshape(1))[0],
    ):
        assert got.dtype == torch.float64 and got.item() == 0.1
    for got in (numerics.divide(x, 49.0), numerics.divide(7.0, x * 7), numerics.divide(x, x * 7)):
        assert got.item() == 7.0 / 49.0


def test_floor_takes_floats_and_tensors():
    for x in (-1.5, -1.0, 0.0, 0.3, 2.0**60):
        assert numerics.floor(x) == math.floor(x) == numerics.floor(torch.tensor(x, dtype=torch.float64)).item()


@pytest.mark.parametrize("kind", [float, lambda x: torch.tensor(x, dtype=torch.float64)])
def test_sums_and_products_lose_nothing(kind):
    numbers = [0.1, -0.7, 3.0, 1e16, -1e-9, 1 / 3, 123456789.123]
    for a in numbers:
        for b in numbers:
            total, rest = map(float, numerics.two_sum(kind(a), kind(b)))
            assert total == a + b and Fraction(total) + Fraction(rest) == Fraction(a) + Fraction(b)
            product, rest = map(float, numerics.two_product(kind(a), kind(b)))
            assert product == a * b and Fraction(product) + Fraction(rest) == Fraction(a) * Fraction(b)


def test_batches_come_first_and_ranks_match():
    x, y = numerics.batch_first((1, 0), torch.zeros(3, 5), torch.zeros(5, 4, 3))
    assert x.shape == (5, 1, 3) and y.shape == (5, 4, 3)
    x, y = numerics.batch_first((0, None), torch.zeros(5, 3), None)
    assert x.shape == (5, 3) and y is None


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
