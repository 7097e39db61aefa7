"""The plan of channels, and a layer's view of them; whole modules are in test_shrinking.py."""

import torch

from sparsefn.shrinking.channels import UNKNOWN, Batch, Channels, Input, Plan, Shape, batch_of, columns, where_finite

NAN = torch.nan


def features(*const, spread=False, plan):
    return Channels(plan.number(len(const)), torch.tensor(const), -1, 2, spread)


# The plan.


def test_a_pin_spreads_over_ties_and_no_further():
    plan = Plan()
    a, b, c = (plan.number(2) for _ in range(3))
    plan.ties += [(b, c), (a, b)]
    plan.pin([{"x": (Shape(Channels(c[:1], torch.zeros(1), -1, 2)), UNKNOWN, None, 3)}], "read")
    assert plan.removed().tolist() == [False, True] * 3


def test_ties_may_name_a_channel_twice():
    plan = Plan()
    a, b = plan.number(2), plan.number(4)
    plan.ties.append((torch.cat([a, a]), b))
    plan.pin(Channels(b[3:], torch.zeros(1), -1, 2), "read")
    assert plan.removed().tolist() == [True, False, True, False, True, False]


def test_reasons_are_those_of_the_first_pin_or_of_where_a_constant_ended():
    plan = Plan()
    a, b = plan.number(3), plan.number(3)
    plan.ties.append((a, b))
    first = Channels(a, torch.tensor([1.0, NAN, 2.0]), -1, 2)
    plan.note(first, torch.full((3,), NAN), "joined")
    plan.note(first, torch.full((3,), NAN), "joined again")
    plan.pin([], "nothing")
    plan.pin(first._replace(ids=a[:2]), "read")
    plan.pin(first._replace(ids=a[1:2]), "read again")
    assert plan.reasons(a) == ["joined", "read", ""]  # a note is no pin
    assert plan.reasons(b) == ["read", "read", ""]
    assert plan.removed().tolist() == [False, False, True] * 2
    plan.sizes["layer"] = (UNKNOWN, first._replace(ids=a[2:]))
    assert plan.reasons(a)[2] == "joined" and plan.reasons(b)[2] == "one channel always stays"


def test_a_layer_keeps_one_channel_on_each_side():
    plan = Plan()
    a, b = plan.number(2), plan.number(3)
    plan.sizes["layer"] = (Channels(a, torch.zeros(2), -1, 2), Channels(b, torch.zeros(3), -1, 2))
    plan.sizes["other"] = (UNKNOWN, Channels(b, torch.zeros(3), -1, 2))
    assert plan.removed().tolist() == [False, True, False, True, True]


# Values.


def test_columns_of_a_layer():
    plan = Plan()
    x = features(1.0, NAN, spread=True, plan=plan)
    wide = columns(plan, x, 6)
    assert wide.ids.tolist() == [0, 0, 0, 1, 1, 1] and not wide.spread
    torch.testing.assert_close(wide.const, torch.tensor([1.0, 1.0, 1.0, NAN, NAN, NAN]), equal_nan=True)
    assert not plan.pins
    assert columns(plan, x, 5) is UNKNOWN  # no equal runs
    assert columns(plan, x._replace(spread=False), 4) is UNKNOWN
    assert columns(plan, x, 6, fits=False) is UNKNOWN
    assert len(plan.pins) == 3
    assert columns(plan, Input("x"), 6) is UNKNOWN


def test_what_is_not_finite_varies():
    got = where_finite(torch.tensor([1.0, NAN, 3.0, torch.inf]), torch.tensor([5.0, 6.0, torch.inf, 8.0]))
    torch.testing.assert_close(got, torch.tensor([5.0, NAN, NAN, NAN]), equal_nan=True)


def test_first_dimensions_are_one_only_where_that_is_known():
    x = Channels(torch.tensor([0]), torch.zeros(1), -1, 2, batch="x")
    assert batch_of(x) == batch_of(Input("x")) == "x"
    for unknown in (UNKNOWN, x._replace(batch=None), Shape(x), Batch("x")):
        assert batch_of(unknown) not in (None, "x", batch_of(unknown))
