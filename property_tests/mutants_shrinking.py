"""Planted bugs in the analysis of traced programs and in what is made of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, fx, nn

import sparsefn as sf
from sparsefn.shrinking import analysis, norms, probe, reindexing
from sparsefn.shrinking.channels import CoupledChannels
from sparsefn.shrinking.plan import PruningPlan
from sparsefn.shrinking.proof import Proof
from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.small_layers import (
    counted_group_norm,
    counted_layer_norm,
    counted_mean,
    counted_rms_norm,
)
from sparsefn.shrinking.trace import traced
from sparsefn.shrinking.values import Step, values_in
from tests.shrinking.compare import check, masked_weights, random_units
from tests.shrinking.networks import networks

# The package and this module have functions of these names.
GROUPS = import_module("sparsefn.shrinking.groups")
REWRITES = import_module("sparsefn.shrinking.rewrites")
Place = tuple[Any, str, Any]  # where, which name, and what is put there


class ShrinkingMutant(NamedTuple):
    """Random networks, of all steps or of these, must get other outputs, or an error,
    under these changes.
    """

    bug: str
    places: tuple[Place, ...]
    steps: tuple[str, ...] = ()


class Case(NamedTuple):
    """A random network, what it is called with, and its trace."""

    model: nn.Module
    example: tuple[Tensor, ...]
    graph: fx.GraphModule


@functools.cache
def drawn(steps: tuple[str, ...]) -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    """The first random networks of these steps, always the same."""
    found: list[tuple[nn.Module, tuple[Tensor, ...]]] = []

    @settings(
        max_examples=250,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(networks(most_steps=5, names=steps))
    def collect(net: Any) -> None:
        found.append(net)

    collect()
    return found


@functools.cache
def case_of(steps: tuple[str, ...], number: int) -> Case:
    """A random network of these steps, by its number."""
    model, example = drawn(steps)[number]
    return Case(model, example, traced(model, example, dynamic=False))


@contextmanager
def planted(places: tuple[Place, ...]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, new in places:
            (patch.setitem if isinstance(owner, dict) else patch.setattr)(
                owner, name, new
            )
        yield


def fault(case: Case, places: tuple[Place, ...], number: int) -> str:
    """What goes wrong with a random network under these changes; nothing where it does
    not.
    """
    with planted((*places, (GROUPS, "traced", lambda *given, **how: case.graph))):
        try:
            check(
                case.model, case.example, seed=number, counted=number % 2 == 0, forms=()
            )
        except Exception as error:  # a bug may do anything
            return f"{type(error).__name__}: {error}"
    return ""


def proof_says(mutant: ShrinkingMutant, number: int) -> str:
    """What the proof of `sf.shrink` says of the smaller program of a random network
    under the changes of a mutant.
    """
    case = case_of(mutant.steps, number)
    with planted(
        (*mutant.places, (GROUPS, "traced", lambda *given, **how: case.graph))
    ):
        found = GROUPS.groups(case.model, case.example, counted=number % 2 == 0)
        gone = random_units(found, number)
        masked = sf.modules.bake(
            case.model, sf.State(*masked_weights(case.model, found, gone))
        )
        return Proof(masked, case.example).reason(program(found.cut(gone)))


def noticed(mutant: ShrinkingMutant) -> str:
    """The first random network that goes wrong: its number, and what it says."""
    for i in range(len(drawn(mutant.steps))):
        text = fault(case_of(mutant.steps, i), mutant.places, i)
        if text:
            return f"{i}: {text}"
    return ""


def unless(words: str) -> Callable[..., None]:
    """`Step.freeze` that does nothing for a reason of these words."""
    real = Step.freeze

    def freeze(self: Step, label: Any, why: str, which: Any = None) -> None:
        if words not in why:
            real(self, label, why, which)

    return freeze


def _always_zero(step: Step, ins: Any, at: Any, size: int) -> Any:
    known = [value.zero(d) for value, d in zip(ins, at, strict=True) if d is not None]
    return np.where(np.any(known, 0), 0.0, np.nan)


def _first_columns(self: PruningPlan, name: str, x: Tensor) -> Tensor:
    value = self.analysis.leaves.get(name)
    for d, label in enumerate(value.labels if value is not None else ()):
        x = x.narrow(d, 0, int(self.kept(label, x.shape[d]).sum()))
    return x.detach().clone()


def _of_what_is_left(
    norm: Callable[..., Tensor], dims: Callable[..., int]
) -> Callable[..., Tensor]:
    @functools.wraps(norm)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place = 1 if norm is counted_group_norm else 0
        return norm(x, *args[:place], dims(x, *args), *args[place + 1 :], **kwargs)

    return run


def _last(x: Tensor, count: int, ndim: int, *_: Any) -> int:
    return int(np.prod(x.shape[-ndim:]))


def _over(x: Tensor, count: int, dim: Any, *_: Any) -> int:
    return int(np.prod([x.shape[d] for d in dim]))


def _in_groups(x: Tensor, count: int, *_: Any) -> int:
    return x[0].numel() // count


def _repeats(step: Step, ins: Any, outs: Any, wanted: Any) -> Any:
    known = _OF_GRIDS(step, ins, outs, wanted)
    ones = {
        (0, e)
        for e, n in enumerate(outs[0].shape)
        if n == len(ins) > 1 and step.name in ("cat", "stack")
    }
    return known._replace(repeats=known.repeats | ones)


def _only_the_first(self: CoupledChannels, a: Any, b: Any, why: str) -> None:
    _JOIN(self, None if a is None else a[:1], None if b is None else b[:1], why)


def _padding_of_zeros(step: Step) -> Any:
    return reindexing.pad(
        dataclasses.replace(step, arguments={**step.arguments, "value": 0.0})
    )


def _never_mixed(step: Step) -> Any:
    ins, outs = values_in(step.arguments), values_in(step.outs)
    alike = ins and all(out.shape == ins[0].shape for out in outs)
    if not alike or any(value.dtype != torch.float64 for value in ins):
        return _TRIED(step)
    return (
        outs[0]._replace(labels=ins[0].labels, constants=ins[0].constants)
        if len(outs) == 1
        else _TRIED(step)
    )


def _norm_of_zeros(step: Step) -> Any:
    return norms.layer_norm(step)._replace(constants=step.arguments["input"].constants)


def _all_masked(log: Any, leaf: Tensor, real: Tensor, mask: Any, d: int) -> Any:
    return np.zeros(leaf.shape[d]) if leaf.is_floating_point() else None


_OF_GRIDS, _JOIN, _TRIED = reindexing._of_grids, CoupledChannels.join, probe.probed
LEFT = (
    (REWRITES, "counted_layer_norm", _of_what_is_left(counted_layer_norm, _last)),
    (REWRITES, "counted_rms_norm", _of_what_is_left(counted_rms_norm, _last)),
    (REWRITES, "counted_mean", _of_what_is_left(counted_mean, _over)),
    (REWRITES, "counted_group_norm", _of_what_is_left(counted_group_norm, _in_groups)),
)

COUNTED = ("norm_of_channels", "norm_by_hand", "group_norm", "depthwise")
PADDED = ("mean_of_padded_tokens", "padded", "to_vector")
ALONE = ("to_tokens_of_channels", "to_vector", "attention", "dense")
NORMED = ("norm_of_channels", "scores_of_tokens", "gram_matrix_of_pixels")
TABLES = (
    "constant_table",
    "scores_of_tokens",
    "gram_matrix_of_pixels",
    "norm_of_channels",
)
SUMMED = (
    "scores_of_tokens",
    "gram_matrix_of_pixels",
    "linear_attention",
    "activation",
    "dense",
)
WIDTH = (REWRITES.RULES, "scaled_dot_product_attention", lambda change: None)
PADS = tuple(
    (analysis._RULES, name, _padding_of_zeros) for name in ("pad", "constant_pad_nd")
)

SHRINKING = [
    ShrinkingMutant(
        "every elementwise operation maps zero to zero",
        ((probe, "elementwise", _always_zero),),
    ),
    *(
        ShrinkingMutant(f"{place[1]} divides by what is left", (place,), COUNTED)
        for place in LEFT
    ),
    ShrinkingMutant(
        "the program keeps the first columns", ((PruningPlan, "take", _first_columns),)
    ),
    ShrinkingMutant(
        "what is summed over need not be 0",
        ((Step, "freeze", unless("sums over it")),),
        SUMMED,
    ),
    ShrinkingMutant(
        "a concatenation of size 1 is a repeat", ((reindexing, "_of_grids", _repeats),)
    ),
    ShrinkingMutant(
        "every operation of one shape passes", ((analysis, "probed", _never_mixed),)
    ),
    ShrinkingMutant(
        "only the first of the joined indices are joined",
        ((CoupledChannels, "join", _only_the_first),),
    ),
    ShrinkingMutant(
        "means lose entries that are not 0",
        ((norms, "averaged", lambda step, label, x, dim: None),),
    ),
    ShrinkingMutant(
        "an index that is taken alone may go",
        ((Step, "freeze", unless("takes this index alone")),),
        ALONE,
    ),
    ShrinkingMutant("every padding is of zeros", PADS, PADDED),
    ShrinkingMutant(
        "layer norms map zero to zero",
        ((analysis._RULES, "layer_norm", _norm_of_zeros),),
        NORMED,
    ),
    ShrinkingMutant(
        "tables are 0 where they go", ((analysis, "of_leaf", _all_masked),), TABLES
    ),
    ShrinkingMutant(
        "attention is scaled by the width that is left",
        (WIDTH,),
        ("attention", "dense"),
    ),
]

if __name__ == "__main__":
    for mutant in (ShrinkingMutant("nothing", ()), *SHRINKING):
        lines = noticed(mutant).splitlines()
        print(
            f"{mutant.bug}: network {lines[0]}"
            if lines
            else f"{mutant.bug}: not noticed",
            flush=True,
        )
