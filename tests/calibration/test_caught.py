"""Runs of a model without some of its parts."""

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.calibration import caught, kept

FORM = kept.form_of(torch.ones(1))


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def caught_in(model, parts, first=0, outputs=None, order=("0", "1", "2"), x=None):
    weights, call = (
        sf.modules.params_of(model),
        ((torch.ones(2, 3) if x is None else x,), {}),
    )
    parts = {path: model.get_submodule(path) for path in parts}
    return caught.catch(
        model, weights, parts, order, [FORM] * len(order), outputs or {}, first, call
    )


def test_a_part_gets_what_the_part_before_it_would_return():
    (first, second, third), named = (
        caught_in(net(), "012"),
        [kept.Slot(0, 0), kept.Slot(1, 0)],
    )
    assert torch.equal(first[0][0], torch.ones(2, 3))
    assert [kept.stow(call, kept.in_memory).slots() for call in (second, third)] == [
        named[:1],
        named[1:],
    ]


def test_what_is_known_is_returned_and_what_is_not_cannot_be_used():
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)
    )
    order, known = (
        ("0", "2", "4"),
        {0: kept.stow(torch.zeros(2, 3) + 1, kept.in_memory)},
    )
    assert len(caught_in(model, order, order=order)) == 1
    ((args, _),) = caught_in(model, order, 1, known, order)
    assert torch.equal(args[0], torch.ones(2, 3).tanh())
    with pytest.raises(caught.NeededError) as error:
        caught_in(model, order, 2, known, order)
    assert error.value.number == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape,
        lambda x: x.device,
        lambda x: x + 1,
        lambda x: torch.ones(1) + x,
        lambda x: x[0],
        bool,
        len,
        lambda x: nn.functional.relu(x),
        lambda x: torch.cat([torch.ones(1), x]),
        lambda x: x.add_(1),
        lambda x: x.numpy(),
    ],
)
def test_a_marker_can_only_be_handed_on(use):
    marker = kept.marked(FORM, 4)
    with pytest.raises(kept.Touched) as error:
        use(marker)
    assert error.value.slot == kept.Slot(4, 0) and not isinstance(
        error.value, Exception
    )


def test_parts_that_are_called_in_another_order():
    with pytest.raises(
        kept.BrokenChainError, match="'0' is called where '1' was before"
    ):
        caught_in(net(), "012", order=("1", "0", "2"))
    model = net()
    model.forward = lambda x: x
    with pytest.raises(kept.BrokenChainError, match="'0' is not called every time"):
        caught_in(model, "012")


def test_errors_of_the_model_are_its_own():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        caught_in(net(), "12", order=("1", "2"), x=torch.ones(2, 4))


def test_nothing_is_left_whatever_happens():
    model, seen = net(), []
    model[1].register_forward_pre_hook(lambda part, args: seen.append(args))
    model[2].compile(backend="eager")
    before = [dict(vars(part)) for part in model.modules()]
    caught_in(model, "012")
    assert not seen
    with (
        pytest.raises(ZeroDivisionError),
        caught.intercepted({"1": model[1]}, lambda *call: 1 / 0),
    ):
        model[:2](torch.ones(1, 3))
    after = [dict(vars(part)) for part in model.modules()]
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys() and all(
            new[name] is value for name, value in old.items()
        )


def test_what_parts_return_is_recorded_and_what_hides_tensors_is_said():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), {"n": 3}

    pair = Pair(3, 3)
    _, order, (form,), why = caught.recorded(
        {"p": pair}, lambda: pair(torch.ones(1, 3))
    )
    assert (order, form.leaves, why) == (["p"], (None, 3), "")

    class Odd(nn.Module):
        def forward(self, x):
            return {1, 2} if x is None else pair(x)

    odd = Odd()
    assert caught.recorded({"o": odd}, lambda: odd(None))[3] == "'o' returns a set"
    assert (
        caught.recorded({"o": odd, "p": pair}, lambda: odd(torch.ones(1, 3)))[3]
        == "'p' is called by 'o'"
    )
