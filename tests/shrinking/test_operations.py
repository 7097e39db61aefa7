"""What single operations do to channels; whole modules are in test_smaller.py."""

import operator

import pytest
import torch

from sparsefn.shrinking.channels import LENGTH, UNKNOWN, Batch, Channels, Input, Plan, Shape
from sparsefn.shrinking.operations import (
    attribute,
    averaged,
    binary,
    cat,
    elementwise,
    flattened,
    getitem,
    pooled,
    size_of,
    view,
)

NAN = torch.nan


def features(*const, rank=2, spread=False, plan=None):
    return Channels((plan or Plan()).number(len(const)), torch.tensor(const), -1, rank, spread, "x")


def image(*const, plan=None):
    return Channels((plan or Plan()).number(len(const)), torch.tensor(const), -3, 4, batch="x")


def same(a, b):
    torch.testing.assert_close(a.const, b.const if isinstance(b, Channels) else torch.tensor(b), equal_nan=True)


def test_elementwise_keeps_what_varies_and_what_is_not_finite_unknown():
    threshold = torch.nn.Threshold(0.0, 7.0)  # turns NaN into 7
    x = features(-1.0, NAN, torch.inf, 3.0)
    same(elementwise(Plan(), threshold, x), [7.0, NAN, NAN, 3.0])
    same(elementwise(Plan(), torch.log, features(0.0, 1.0)), [NAN, 0.0])
    same(elementwise(Plan(), torch.relu_, x), [0.0, NAN, NAN, 3.0])
    same(x, [-1.0, NAN, torch.inf, 3.0])
    assert elementwise(Plan(), torch.clamp, x, x) is UNKNOWN
    assert elementwise(Plan(), torch.clamp, x, min=Batch("x")) is UNKNOWN
    assert elementwise(Plan(), torch.relu, Input("x")) is UNKNOWN


def test_binary():
    plan = Plan()
    a, b = features(1.0, 0.0, NAN, NAN, plan=plan), features(2.0, NAN, 0.0, 3.0, rank=3, plan=plan)
    same(binary(plan, operator.add, a, b), [3.0, NAN, NAN, NAN])
    same(binary(plan, torch.add, a, b, alpha=2), [5.0, NAN, NAN, NAN])
    same(binary(plan, torch.Tensor.mul_, a, b), [2.0, 0.0, 0.0, NAN])
    same(binary(plan, operator.isub, a, b), [-1.0, NAN, NAN, NAN])
    same(a, [1.0, 0.0, NAN, NAN])
    assert binary(plan, operator.add, a, a).batch == "x" != binary(plan, operator.add, a, b).batch
    assert len(plan.ties) == 6 and plan.ties[0][0].tolist() == [0, 1, 2, 3] and plan.ties[0][1].tolist() == [4, 5, 6, 7]
    assert binary(plan, operator.add, a, b).rank == 3
    same(binary(plan, operator.sub, 1, a), [0.0, 1.0, NAN, NAN])
    for other in (Input("x"), UNKNOWN, Batch("x"), features(1.0), image(1.0, 2.0, 3.0, 4.0), a._replace(spread=True)):
        assert binary(plan, operator.add, a, other) is UNKNOWN
    assert binary(plan, torch.add, a, b, alpha=Batch("x")) is UNKNOWN
    assert binary(plan, operator.add, 1, 2) is UNKNOWN


def test_cat():
    plan = Plan()
    a, b = image(1.0, plan=plan), image(2.0, NAN, plan=plan)
    for dim in (1, -3):
        both = cat(plan, [a, b, a], dim)
        assert both.ids.tolist() == [0, 1, 2, 0]
        same(both, [1.0, 2.0, NAN, 1.0])
    for tensors, dim in (([a, b], 0), ([a, b], -1), ([a, features(1.0)], 1), ([a, Input("x")], 1), (UNKNOWN, 1)):
        assert cat(plan, tensors, dim) is UNKNOWN
    assert cat(plan, [features(1.0, spread=True)] * 2, 1) is UNKNOWN


@pytest.mark.parametrize(
    ("start", "end", "axis", "rank", "spread"),
    [(1, -1, -1, 2, True), (1, 2, -2, 3, True), (2, 3, -2, 3, False), (-1, -1, -3, 4, False), (1, 1, -3, 4, False)],
)
def test_flatten(start, end, axis, rank, spread):
    flat = flattened(Plan(), image(1.0, 2.0), start, end)
    assert flat[2:] == (axis, rank, spread, "x")


def test_flatten_in_front_of_the_channels():
    flat = flattened(Plan(), features(1.0, rank=4), 0, 2)
    assert flat[2:5] == (-1, 2, False) and flat.batch != "x"
    assert flattened(Plan(), image(1.0)) is UNKNOWN
    assert flattened(Plan(), features(1.0, rank=3), 1) is UNKNOWN
    assert flattened(Plan(), features(1.0), 2) is UNKNOWN
    assert flattened(Plan(), image(1.0), Batch("x")) is UNKNOWN
    assert flattened(Plan(), UNKNOWN, 1) is UNKNOWN
    twice = flattened(Plan(), flattened(Plan(), image(1.0), 1, 2), 1)
    assert twice is UNKNOWN  # runs in runs: right, but not followed


def test_view():
    for sizes in ((Batch("x"), -1), ((Batch("x"), -1),), ([Batch("x"), -1],)):
        assert view(Plan(), image(1.0), *sizes).spread
    for sizes in ((-1, 4), (Batch("y"), -1), (Batch("x"), LENGTH), (Batch("x"), 2, -1), (torch.float32,)):
        assert view(Plan(), image(1.0), *sizes) is UNKNOWN


def test_mean():
    for dim in ((2, 3), [-1, -2]):
        assert averaged(Plan(), image(1.0), dim)[2:4] == (-1, 2)
        assert averaged(Plan(), image(1.0), dim, keepdim=True)[2:4] == (-3, 4)
    assert averaged(Plan(), image(1.0), 3)[2:4] == (-2, 3)
    assert averaged(Plan(), features(1.0, rank=3), 1)[2:4] == (-1, 2)
    for dim in (1, -3, (1, 2), None, (), 4, Batch("x")):
        assert averaged(Plan(), image(1.0), dim) is UNKNOWN
    assert averaged(Plan(), features(1.0, spread=True), 0) is UNKNOWN


def test_pool():
    same(pooled(Plan(), image(0.0, 1.0, NAN), 2), [0.0, 1.0, NAN])
    same(pooled(Plan(), image(0.0, 1.0, NAN), 2, even=False), [0.0, NAN, NAN])
    double = image(0.0)._replace(const=torch.zeros(1, dtype=torch.float64))
    assert pooled(Plan(), double, 2, even=False).const.dtype == torch.float64
    assert pooled(Plan(), image(1.0), 1) is UNKNOWN and pooled(Plan(), Input("x"), 2) is UNKNOWN


def test_shapes():
    x = image(1.0)
    assert size_of(Plan(), x) == attribute(Plan(), x, "shape") == Shape(x)
    assert attribute(Plan(), x, "T") is UNKNOWN
    assert [size_of(Plan(), x, d) for d in (0, 1, 2, 3, -1, -3, 4)] == [
        Batch("x"),
        UNKNOWN,
        LENGTH,
        LENGTH,
        LENGTH,
        UNKNOWN,
        UNKNOWN,
    ]
    assert getitem(Plan(), Shape(Input("x")), 0) == Batch("x")
    assert getitem(Plan(), Shape(UNKNOWN), 0) is UNKNOWN  # the first size of a weight, perhaps
    assert getitem(Plan(), Shape(features(1.0, rank=1)), 0) is UNKNOWN
    assert getitem(Plan(), Shape(x), slice(2, None)) is UNKNOWN


def test_items():
    out, h = features(1.0, rank=3), features(2.0, rank=3)
    assert getitem(Plan(), (out, (h, h)), 1) == (h, h)
    assert getitem(Plan(), UNKNOWN, 0) is UNKNOWN
    assert getitem(Plan(), out, 0)[2:4] == (-1, 2)
    for index, same_batch in ((0, False), (slice(1), False), ((slice(None), 0), True)):
        assert (getitem(Plan(), out, index).batch == "x") == same_batch
    assert getitem(Plan(), out, (slice(None), -1, slice(None)))[2:4] == (-1, 2)
    assert getitem(Plan(), out, (slice(1, None, 2),))[2:4] == (-1, 3)
    assert getitem(Plan(), image(1.0), (0, slice(None), 0))[2:4] == (-2, 2)
    for index in (
        (0, 0, 0),
        (0, 0, slice(1)),
        (0,) * 4,
        None,
        ...,
        Batch("x"),
        (slice(Batch("x")),),
        torch.tensor([0]),
    ):
        assert getitem(Plan(), out, index) is UNKNOWN
