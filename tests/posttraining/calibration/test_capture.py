"""Runs of a model without some of its parts."""

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration import cache, capture
from sparsefn.posttraining.calibration.capture import Chain, NeededError, PausedRun

FORM = cache.form_of(torch.ones(1))


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def captured_in(model, parts, first=0, outputs=None, order=("0", "1", "2"), x=None):
    named = Named.of(model)
    call = ((torch.ones(2, 3) if x is None else x,), {})
    chain = Chain(named.parts(parts), order, [FORM] * len(order), frozenset(), [])
    run = PausedRun(named, chain, call)
    run.outputs = outputs or {}
    run.advance(first, sf.modules.params_of(model))
    return [run.calls[number] for number in range(first, first + len(run.calls))]


def test_a_part_gets_what_the_part_before_it_would_return():
    first, second, third = captured_in(net(), "012")
    (x,), _ = cache.read_tree(first)
    assert torch.equal(x, torch.ones(2, 3))
    assert capture.slots_in(second) == [capture.Slot(0, 0)]
    assert capture.slots_in(third) == [capture.Slot(1, 0)]


def test_what_is_known_is_returned_and_what_is_not_cannot_be_used():
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)
    )
    order, known = (
        ("0", "2", "4"),
        {0: cache.cache_tree(torch.zeros(2, 3) + 1, cache.in_memory)},
    )
    assert len(captured_in(model, order, order=order)) == 1
    (call,) = captured_in(model, order, 1, known, order)
    args, _ = cache.read_tree(call)
    assert torch.equal(args[0], torch.ones(2, 3).tanh())
    with pytest.raises(NeededError) as error:
        captured_in(model, order, 2, known, order)
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
    marker = capture.marked(FORM, 4)
    with pytest.raises(cache.Touched) as error:
        use(marker)
    assert error.value.number == 4 and not isinstance(error.value, Exception)


def test_parts_that_are_called_in_another_order():
    with pytest.raises(
        cache.BrokenChainError, match="'0' is called where '1' was before"
    ):
        captured_in(net(), "012", order=("1", "0", "2"))
    model = net()
    model.forward = lambda x: x
    with pytest.raises(cache.BrokenChainError, match="'0' is not called every time"):
        captured_in(model, "012")


def test_errors_of_the_model_are_its_own():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        captured_in(net(), "12", order=("1", "2"), x=torch.ones(2, 4))


def test_nothing_is_left_whatever_happens():
    model, seen = net(), []
    model[1].register_forward_pre_hook(lambda part, args: seen.append(args))
    model[2].compile(backend="eager")
    before = [dict(vars(part)) for part in model.modules()]
    captured_in(model, "012")
    assert not seen
    with (
        pytest.raises(ZeroDivisionError),
        capture.intercepted({"1": Named.of(model[1])}, lambda *call: 1 / 0),
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
    _, order, (form,), why = capture.recorded(
        {"p": Named.of(pair)}, lambda: pair(torch.ones(1, 3))
    )
    assert (order, form.leaves, why) == (["p"], [None, 3], "")

    class Odd(nn.Module):
        def forward(self, x):
            return {1, 2} if x is None else pair(x)

    odd = Odd()
    parts = {"o": Named.of(odd), "p": Named.of(pair)}
    (_, *_, why) = capture.recorded({"o": parts["o"]}, lambda: odd(None))
    assert why == "'o' returns a set"
    (_, *_, why) = capture.recorded(parts, lambda: odd(torch.ones(1, 3)))
    assert why == "'p' is called by 'o'"


class Skips(nn.Module):
    """Its third layer also gets what the first returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 4)]
        )

    def forward(self, x):
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first), first)


def paused(model, keep=cache.in_memory, always=()):
    named, order = Named.of(model), [f"layers.{i}" for i in range(3)]
    forms = [cache.form_of(torch.ones(1))] * 3
    chain = Chain(named.parts(order), order, forms, frozenset(always), [0, 1, 2])
    return PausedRun(named, chain, ((torch.ones(2, 4),), {}), keep)


def test_outputs_are_kept_as_long_as_a_part_needs_them():
    model = Skips()
    run, weights = paused(model), sf.modules.params_of(model)
    held = []
    for number, part in enumerate(model.layers):
        run.advance(number, weights)
        args, kwargs = run.call(number)
        run.finish(number, cache.cache_tree(part(*args, **kwargs), cache.in_memory))
        held.append(sorted(run.outputs))
    assert held == [[0], [0, 1], [2]] and not run.calls
    assert torch.equal(cache.read_tree(run.outputs[2]), model(torch.ones(2, 4)))
    always = paused(model, always=[0])
    for number, part in enumerate(model.layers):
        always.advance(number, weights)
        args, kwargs = always.call(number)
        always.finish(number, cache.cache_tree(part(*args, **kwargs), cache.in_memory))
    assert sorted(always.outputs) == [0, 2]


def test_what_was_forgotten_and_is_needed_is_named():
    model = Skips()
    run = paused(model)
    run.outputs[1] = cache.cache_tree(torch.ones(2, 4), cache.in_memory)
    with pytest.raises(NeededError) as error:
        run.advance(2, sf.modules.params_of(model))
    assert error.value.number == 0


def test_other_outputs_than_before_are_an_error():
    model = Skips()
    run = paused(model)
    run.advance(0, sf.modules.params_of(model))
    with pytest.raises(
        cache.BrokenChainError, match=r"'layers\.0' does not always return the same"
    ):
        run.finish(0, cache.cache_tree((torch.ones(2, 4),), cache.in_memory))


def test_one_tensor_that_many_parts_get_is_kept_once():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))

        def forward(self, x):
            mask = x + 1
            for layer in self.layers:
                x = layer(x, mask)
            return x

    count = []

    def keep(x):
        count.append(x)
        return cache.in_memory(x)

    model = Masked()
    run = paused(model, keep)
    run.advance(0, sf.modules.params_of(model))
    assert len(count) == 2 and len(run.calls) == 3
