"""Compositions whose states have parts, and a run of each."""

from collections.abc import Callable

import torch

import sparsefn as sf
from sparsefn.core.state import State

KEY = sf.random.key(3)
ALWAYS = sf.always()


def rigl() -> sf.Algorithm:
    return sf.rigl(
        0.5, when=ALWAYS, drop_fraction=0.5, grow=sf.scores.momentum(0.5), key=KEY
    )


def chained() -> sf.Algorithm:
    return sf.chain(sf.set(0.25, when=ALWAYS, drop_fraction=0.5, key=KEY), rigl())


def optimized(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(algorithm, sf.optimizers.adam(0.1), skip=sf.never())


COMPOSITIONS: dict[str, Callable[[], sf.Algorithm]] = {
    "chain": chained,
    "sequence": lambda: optimized(
        sf.sequence(sf.gmp(0.5, score=sf.scores.momentum(0.5), when=ALWAYS), rigl())
    ),
    "chain in a sequence": lambda: sf.sequence(chained(), rigl()),
    "phases": lambda: sf.phases(
        [(0, rigl()), (2, sf.set(0.5, when=ALWAYS, drop_fraction=0.5))]
    ),
    "partition": lambda: optimized(sf.partition([("a", chained()), ("*", rigl())])),
    "optimizers in a partition": lambda: sf.partition(
        [("a", optimized(rigl())), ("*", optimized(sf.static(0.5)))]
    ),
    "rewinding": lambda: sf.rewinding(chained(), to=sf.at([0]), when=sf.at([3])),
    "reparametrised": lambda: optimized(
        sf.reparametrised(sf.reparam.power(2.0), chained())
    ),
    "supermasks in a partition": lambda: optimized(
        sf.partition([("a", sf.supermask(0.5)), ("*", rigl())])
    ),
}


def run(
    algorithm: sf.Algorithm, state: State | None = None, begin: int = 0, end: int = 2
) -> State:
    """Some steps, from the first state or another one."""
    tree = {
        name: torch.arange(16.0).reshape(4, 4).add(1).mul(k).cos()
        for name, k in (("a", 1.0), ("b", 2.0))
    }
    state = algorithm.init(tree) if state is None else state
    for step in range(begin, end):
        grads = {
            name: torch.sin(x * (step + 1) * 3)
            for name, x in sf.effective(state).items()
        }
        state = algorithm.update(state, grads, step)
    return state
