"""Formulas of many tensors have the bits of one tensor after the other."""

import pytest
import torch

from sparsefn.engine import many
from sparsefn.engine.elementary import sqrt
from sparsefn.engine.many import Many
from sparsefn.testing.launches import counted

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ODD = [float("nan"), -float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45, -1e-40, 3e38, 1.0]
SHAPES = [(40, 9), (), (0, 3), (700,)]
NUMBER = torch.tensor(0.3)


def tensors(seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    odd = torch.tensor(ODD)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    some = [odd[torch.randint(0, len(ODD), shape, generator=draw)] for shape in SHAPES]
    return [torch.where(x > 0.5, y, x).to(dtype) for x, y in zip(made, some, strict=True)]


def flags(seed):
    return [torch.rand(s, generator=torch.Generator().manual_seed(seed)) < 0.5 for s in SHAPES]


def identical(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert torch.equal(a.isnan() | a.signbit(), b.isnan() | b.signbit())


FORMULAS = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "with numbers": lambda a, b: 0.7 * a + b * (1 - 0.9),
    "with 0-d tensors": lambda a, b: -NUMBER * (a / NUMBER) + b * NUMBER,
    "plus a 0-d tensor": lambda a, b: a * b + NUMBER,
    "root": lambda a, b: sqrt(a * a + b * b) * b,
    "wide": lambda a, b: (a.to(torch.float32) * b.to(torch.float32)).to(a.dtype),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_has_the_bits_of_each_tensor(name):
    formula, a, b = FORMULAS[name], tensors(0), tensors(1)
    identical(formula(Many(a), Many(b)).tensors, [formula(x, y) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_other_dtypes_go_by_float32(dtype):
    formula, a, b = FORMULAS["wide"], tensors(0, dtype), tensors(1, dtype)
    identical(formula(Many(a), Many(b)).tensors, [formula(x, y) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_where_chooses_the_very_bits(dtype):
    mask, a, b = flags(2), tensors(0, dtype), tensors(1, dtype)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def same(got, want):
        assert all(torch.equal(x.view(word), y.view(word)) for x, y in zip(got, want, strict=True))

    same(many.where(Many(mask), Many(a), Many(b)).tensors, list(map(torch.where, mask, a, b)))
    zero = torch.zeros((), dtype=dtype)
    same(many.where(Many(mask), Many(a)).tensors, [torch.where(m, x, zero) for m, x in zip(mask, a, strict=True)])
    wider = many.where(Many(mask), Many(a), Many([x.double() for x in b])).tensors
    identical(wider, [torch.where(m, x, y.double()) for m, x, y in zip(mask, a, b, strict=True)])


def test_flags():
    a, b = flags(0), flags(1)
    assert all(map(torch.equal, many.one_of(Many(a), Many(b)).tensors, map(torch.logical_or, a, b)))
    assert all(map(torch.equal, many.both(Many(a), Many(b)).tensors, map(torch.logical_and, a, b)))


def test_an_operation_is_a_launch_and_reads_no_number_of_a_device():
    there = [[x.to("meta") for x in some] for some in (tensors(0), tensors(1))]
    number = NUMBER.to("meta")

    def run():
        a, b = map(Many, there)
        return (a * number - b / number) + number

    found = counted(run)
    assert found.launches == 3 + 2 and not found.waits  # the sum with a number: it is written out once


def test_nothing_is_written_to():
    a, kept = tensors(0), tensors(0)
    x = Many(a)
    sqrt(x), x.to(torch.float32), many.where(Many(flags(0)), x, x), x + NUMBER
    identical(a, kept)


def test_tensors_that_lie_alike():
    x, turned = torch.ones(4, 6), torch.ones(6, 4).T
    last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert many.alike([x, x > 0]) and many.alike([last, last.half()])
    assert not many.alike([x, turned]) and not many.alike([turned, turned])
    assert not many.alike([last, torch.ones(2, 3, 4, 5)]) and not many.alike([x[::2], x[::2]])
    wide = Many([last, torch.ones(7)]) + NUMBER
    assert torch.equal(wide.tensors[0], last + NUMBER) and wide.tensors[0].stride() == last.stride()
