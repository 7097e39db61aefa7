"""A run of a model that stops before each of its parts."""

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.calibration import kept
from sparsefn.calibration.caught import NeededError
from sparsefn.calibration.paused import Chain, Paused


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


def paused(model, keep=kept.in_memory, always=()):
    order = [f"layers.{i}" for i in range(3)]
    parts = {path: model.get_submodule(path) for path in order}
    chain = Chain(
        parts,
        {},
        order,
        [kept.form_of(torch.ones(1))] * 3,
        frozenset(always),
        [0, 1, 2],
    )
    return Paused(model, chain, ((torch.ones(2, 4),), {}), keep)


def test_outputs_are_kept_as_long_as_a_part_needs_them():
    model = Skips()
    run, weights = paused(model), sf.modules.params_of(model)
    held = []
    for number, part in enumerate(model.layers):
        run.go_on(number, weights)
        args, kwargs = run.call(number)
        run.done(number, kept.stow(part(*args, **kwargs), kept.in_memory))
        held.append(sorted(run.outputs))
    assert held == [[0], [0, 1], [2]] and not run.calls
    assert torch.equal(kept.unstow(run.outputs[2]), model(torch.ones(2, 4)))
    always = paused(model, always=[0])
    for number, part in enumerate(model.layers):
        always.go_on(number, weights)
        args, kwargs = always.call(number)
        always.done(number, kept.stow(part(*args, **kwargs), kept.in_memory))
    assert sorted(always.outputs) == [0, 2]


def test_what_was_forgotten_and_is_needed_is_named():
    model = Skips()
    run = paused(model)
    run.outputs[1] = kept.stow(torch.ones(2, 4), kept.in_memory)
    with pytest.raises(NeededError) as error:
        run.go_on(2, sf.modules.params_of(model))
    assert error.value.number == 0


def test_other_outputs_than_before_are_an_error():
    model = Skips()
    run = paused(model)
    run.go_on(0, sf.modules.params_of(model))
    with pytest.raises(
        kept.BrokenChainError, match=r"'layers\.0' does not always return the same"
    ):
        run.done(0, kept.stow((torch.ones(2, 4),), kept.in_memory))


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
        return kept.in_memory(x)

    model = Masked()
    run = paused(model, keep)
    run.go_on(0, sf.modules.params_of(model))
    assert len(count) == 2 and len(run.calls) == 3
