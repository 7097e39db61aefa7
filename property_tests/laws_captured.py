"""The laws of `captured`: replayed updates have the bits of eager ones, and on a device
every update can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import optree

import sparsefn as sf
from property_tests.tape import Tape
from sparsefn.core.state import State
from sparsefn.core.tree import Tree
from sparsefn.testing import Case, Row
from sparsefn.testing.harness import algorithm_of, assert_same, leaves, trained_of
from sparsefn.testing.strategies import large

STEPS = 9


def check(row: Row, *, trained: bool = False) -> None:
    """The same bits at every step, of two runs by turns; states that are kept stay; and
    updates are replayed.
    """
    case = large(row.meta.layout.form)
    make = trained_of if trained else algorithm_of
    algorithm = make(row, case)
    replayed = sf.captured(algorithm)
    other = case._replace(seed=case.seed + 1, params=case.grads[0])
    states = [
        algorithm.init(case.params),
        make(row, other).init(other.params),  # another key and other weights
    ]
    captures = Tape.captures
    kept: list[tuple[str, State, State]] = []
    for step in range(STEPS):
        grads = grads_at(case, step)
        wanted = [algorithm.update(state, grads, step) for state in states]
        states = [replayed.update(state, grads, step) for state in states]
        for i, (state, want) in enumerate(zip(states, wanted, strict=True)):
            what = f"run {i}, step {step}"
            assert_same(f"{what}: captured and eager", state, want)
            kept.append((what, state, want))
    for what, state, want in kept:
        assert_same(f"{what}: a state that is kept", state, want)
    assert 0 < Tape.captures - captures < 2 * STEPS, "no update was replayed"


def grads_at(case: Case, step: int) -> Tree:
    """Other gradients at every step."""
    grads = case.grads[step % len(case.grads)]
    return optree.tree_map(lambda x: x * (1 + step), grads)


def check_elsewhere(row: Row, there: Callable[[Tree], Tree]) -> None:
    """On a device without values: updates are captured, while keys stay on the CPU, and
    their results are where those of the eager update are.
    """
    case = large(row.meta.layout.form)
    params = there(case.params)
    algorithm = row.make(case.sparsity, sf.random.key(case.seed), params)
    replayed = sf.captured(algorithm)
    state = algorithm.init(params)
    captures = Tape.captures
    for step in range(4):
        grads = there(grads_at(case, step))
        wanted = algorithm.update(state, grads, step)
        state = replayed.update(state, grads, step)
        assert forms_of(state) == forms_of(wanted)
    assert Tape.captures > captures


def forms_of(state: State) -> dict[str, tuple[object, ...]]:
    """The device, shape and dtype of each leaf."""
    return {path: (x.device, x.shape, x.dtype) for path, x in leaves(state).items()}
