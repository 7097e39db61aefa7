"""Planted bugs in what may go from a model, and in what the smaller model computes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample

from sparsefn.shrinking import analysis, arguments, counted, cut, layers, tried
from sparsefn.shrinking.steps import Step
from tests.shrinking import by_masks, compare
from tests.shrinking.networks import networks
from tests.shrinking.test_random_networks import SETTINGS


class Mutant(NamedTuple):
    """`put` for the attribute of an owner is a bug which the models of the zoo named here, or drawn ones, show."""

    bug: str
    owner: Any
    name: str
    put: Callable[..., Any]
    models: tuple[str, ...]
    masks: bool = False  # by masks that no groups made
    counted: bool = False


MUTANTS: list[Mutant] = []


def planted(bug: str, owner: Any, name: str, *models: str, **options: bool) -> Callable[[Any], Any]:
    def enter(put: Any) -> Any:
        MUTANTS.append(Mutant(bug, owner, name, put, models, **options))
        return put

    return enter


@planted("every elementwise operation maps zero to zero", tried, "elementwise", "sums over channels after a sigmoid")
def _zero_to_zero(step: Step, ins: Any, at: Any, size: int) -> Any:
    zeros = [value.zero(d) for value, d in zip(ins, at, strict=True) if d is not None]
    return np.where(np.any(zeros, 0), 0.0, np.nan)


@planted("norms divide by what is left", arguments, "counted_layer_norm", "transformer encoder", counted=True)
def _divides_by_what_is_left(x: Any, count: int, ndim: int, *args: Any) -> Any:
    return counted.counted_layer_norm(x, math.prod(x.shape[-ndim:]), ndim, *args)


@planted("the program keeps the first columns", cut.Cut, "take", "vgg", "resnet bottleneck")
def _first_columns(self: Any, name: str, x: Any) -> Any:
    value = self.analysis.leaves.get(name)
    for d, label in enumerate(value.labels if value is not None else ()):
        if label is not None:
            x = x.narrow(d, 0, int(self.kept(label).sum()))
    return x.detach().clone()


_freeze = Step.freeze


@planted("contraction does not require zero", Step, "freeze", "gram matrix of pixels")
def _sums_of_anything(self: Step, label: Any, why: str, which: Any = None) -> None:
    if "it is not 0 where it is masked" not in why:
        _freeze(self, label, why, which)


_move = analysis.move


@planted("a concatenation of size 1 is a repeat", analysis, "move", "concatenations of one")
def _repeats(step: Step) -> Any:
    out = _move(step)
    if step.name != "cat" or any(value.shape[step.arguments["dim"]] != 1 for value in step.arguments["tensors"]):
        return out
    labels = list(out.labels)
    labels[step.arguments["dim"]] = step.atoms.new(out.shape[step.arguments["dim"]], rank=3)
    return out._replace(labels=tuple(labels))


@planted("tried operations always pass", tried, "_close", "block attention", "own layer norm", "normalised channels")
def _always_close(a: Any, b: Any) -> bool:
    return True


@planted("join does not propagate", Step, "join", "resnet bottleneck", "vgg")
def _joins_nothing(self: Step, *labels: Any) -> Any:
    return labels[0] if all(label is not None for label in labels) else None


_known = layers._known


@planted("constants ignore padding", layers, "_known", "vgg", "resnet bottleneck", "mobilenet v3", masks=True)
def _as_without_padding(x: Any, at: int, plain: bool) -> Any:
    return _known(x, at, True)


@planted("folded biases are not added", cut, "folded", "vgg", "lstm classifier", masks=True)
def _nothing_folded(made: Any, params: Any) -> dict[str, Any]:
    return {}


@planted("groups of a grouped convolution are pruned unevenly", layers, "divided", "resnext", "shufflenet v1")
def _uneven(step: Step, label: Any, m: int, n: int, ranks: Any = (1, 2)) -> Any:
    return (None, None) if label is None else (step.atoms.new(m), step.atoms.new(n))


@contextlib.contextmanager
def with_bug(mutant: Mutant) -> Iterator[None]:
    with mock.patch.object(mutant.owner, mutant.name, mutant.put):
        yield


def differs(mutant: Mutant, model: Any, example: Any, seed: int) -> bool:
    """Whether a model and its smaller program differ, or it fails: with the bug if it is planted."""
    try:
        if mutant.masks:
            by_masks.check(model, example, seed)
        else:
            compare.check(model, example, seed=seed, counted=mutant.counted, forms=())
    except Exception:  # a bug fails in any way
        return True
    return False


def drawn_one_differs(mutant: Mutant, most: int) -> bool:
    """Whether one of so many drawn networks shows the bug."""
    with torch.random.fork_rng(), with_bug(mutant):
        try:
            find(networks(), lambda net: any(differs(mutant, *net, seed) for seed in (0, 1)), settings=_settings(most))
        except NoSuchExample:
            return False
    return True


def _settings(most: int) -> Any:


    return settings(SETTINGS, max_examples=most, phases=(Phase.generate,))
