"""The machine runs, and finds bugs that lie between two operations."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import sparsefn as sf
from property_tests.effort import tries
from property_tests.state_machine import Machine, compiled, eager, in_a_batch, loaded, made
from sparsefn.testing import Row
from sparsefn.tree import Tree, leaves_of


def run(machine: type[Machine], examples: int, steps: int = 20) -> None:
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.generate],
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)


def test_any_order_has_the_bits_of_eager_updates() -> None:
    run(Machine, 2 * tries())


def test_so_has_compiled_code() -> None:
    ways = {"eager": eager, "compiled": compiled}
    run(type("Compiling", (Machine,), {"names": ("rigl", "sgd ste"), "ways": ways}), 2, 6)


# ---- bugs -----------------------------------------------------------------------------------------


def load_of_arrays(algorithm: sf.Algorithm, params: Tree, saved: dict[str, Any]) -> sf.State:
    """The count of an optimizer's steps is not loaded: numbers were taken for settings."""
    fresh = sf.checkpoint.state_dict(algorithm.init(params))
    return loaded(algorithm, params, {n: x if x.ndim or ".opt" not in f".{n}" else fresh[n] for n, x in saved.items()})


def load_without_memories(algorithm: sf.Algorithm, params: Tree, saved: dict[str, Any]) -> sf.State:
    """Memories of scores start anew."""
    state = loaded(algorithm, params, saved)
    return state._replace(scores=optree.tree_map(torch.zeros_like, state.scores))


def remembering() -> Callable[[Row, float, Tree], sf.Algorithm]:
    """An algorithm is kept by its name, whatever its sparsity."""
    known: dict[str, sf.Algorithm] = {}
    return lambda row, sparsity, params: known.setdefault(row.name, made(row, sparsity, params))


def writing_late() -> Callable[[sf.Algorithm, sf.State, Tree, Any], sf.State]:
    """A donated step keeps the memory of the masks that it was given, and writes to it in the next one."""
    held: list[torch.Tensor] = []

    def update(algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any) -> sf.State:
        for mask in held:
            mask.fill_(False)
        new = algorithm.update(state, grads, step)
        held[:] = [mask for mask in leaves_of(state.masks) if mask.ndim]
        return new

    return update


def lazy(algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any) -> sf.State:
    """The memory of a score lies where the gradients were, which a loop writes to again."""
    new = algorithm.update(state, grads, step)
    if not isinstance(new.scores, dict) or "grow" not in new.scores:
        return new
    optree.tree_map_(lambda g, memory: g.copy_(memory), grads, new.scores["grow"])
    return new._replace(scores=new.scores | {"grow": grads})


def by_identity() -> Callable[[sf.Algorithm, sf.State, Tree, Any], sf.State]:
    """The result of a step is remembered by the tensors that it was made of, whatever the algorithm."""
    known: list[tuple[list[torch.Tensor], int, sf.State]] = []

    def update(algorithm: sf.Algorithm, state: sf.State, grads: Tree, step: Any) -> sf.State:
        masks = leaves_of(state.masks)
        for old, before, new in known:
            if step > before and all(x is y for x, y in zip(old, masks, strict=False)):
                return new._replace(params=state.params, key=state.key, opt=state.opt, scores=state.scores)
        new = algorithm.update(state, grads, step)
        known[:] = [(masks, step, new)]
        return new

    return update


BUGS: dict[str, Callable[[], dict[str, Any]]] = {
    "a load drops the numbers of an optimizer": lambda: {"load": staticmethod(load_of_arrays)},
    "a load drops the memories of scores": lambda: {"load": staticmethod(load_without_memories)},
    "an algorithm is remembered by its name": lambda: {"make": staticmethod(remembering())},
    "a donated step writes to masks later": lambda: {"ways": {"donated": writing_late()}},
    "a memory is the gradients": lambda: {"ways": {"eager": eager, "lazy": lazy}},
    "a step is remembered by identity": lambda: {"ways": {"known": by_identity()}},
    "a batch mixes up its members": lambda: {
        "ways": {"batch": lambda a, s, g, i: in_a_batch(a, s, optree.tree_map(torch.neg, g), i)}
    },
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_notices_the_bug(bug: str) -> None:
    broken = type("Broken", (Machine,), BUGS[bug]())
    with pytest.raises((AssertionError, ValueError, TypeError)):
        run(broken, 60)
