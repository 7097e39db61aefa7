"""The scores of an algorithm by role, and what accumulated ones remember."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.numbers import check_float
from sparsefn.core import random
from sparsefn.core.state import Accumulated, Score, State, Step
from sparsefn.core.tree import Leaves, Tree, check_like, leaves_at
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.masks.scores.score_types import Absolute, Drawn, OfInputs, OfUnits
from sparsefn.masks.scores.unit_values import read_score

# What happens to weights off the mask: set to zero, kept unchanged, or trained.
Pruned = Literal["zero", "keep", "train"]


class Scores:
    """The scores of some leaves by path: `values`, which are the absolute values of
    `signed` where it says so.

    They are taken when they are read: selection compares without them. Scores
    `of_units` are by the names of tied sets.
    """

    def __init__(
        self, signed: Leaves, absolute: bool = False, of_units: bool = False
    ) -> None:
        self.signed = signed
        self.absolute = absolute
        self.of_units = of_units
        self._values: Leaves | None = None if absolute else signed

    @property
    def values(self) -> Leaves:
        """The scores themselves."""
        if self._values is None:
            self._values = {path: leaf.abs() for path, leaf in self.signed.items()}
        return self._values


Read = Callable[[str], Scores]  # by role


class Memory(NamedTuple):
    """The scores of an algorithm by role.

    Memories of Accumulated scores lie by role in `state.scores`.
    """

    scores: dict[str, Score]
    pruned: Pruned

    def init(self, params: Tree) -> Tree:
        """The first memory of each role that has one, `()` if none has."""
        return {role: score.init(params) for role, score in self._kept()} or ()

    def accumulate(self, state: State, grads: Tree, step: Step) -> State:
        """Advance every memory: done on every step."""
        new = {
            role: score.accumulate(state.scores[role], state, grads, step)
            for role, score in self._kept()
        }
        return state._replace(scores=new) if new else state

    def check_rows(self, pattern: Pattern, leaves: Leaves) -> None:
        """Raise where a score reads the inputs of outputs that the pattern does not
        keep apart.
        """
        for score in self.scores.values():
            value = read_score(score)
            if isinstance(value, OfInputs):
                for path, leaf in leaves.items():
                    value.check(pattern, path, leaf)

    def _kept(self) -> list[tuple[str, Accumulated]]:
        return [
            (role, score)
            for role, score in self.scores.items()
            if isinstance(score, Accumulated)
        ]


class Reader:
    """Reads scores by role for one change of masks.

    Each role draws its own random numbers. The scores of all `leaves` are read once.
    Drawn scores are drawn at each read, for the requested leaves alone.
    """

    def __init__(
        self,
        memory: Memory,
        leaves: Iterable[str],
        state: State,
        grads: Tree,
        step: Step,
    ) -> None:
        self.memory = memory
        self.leaves = list(leaves)
        self.given = (state, grads, step)
        self.known: dict[str, Scores] = {}

    def of(self, paths: Iterable[str]) -> Read:
        """The function of a role that gives the scores of some leaves."""
        return lambda role: self._drawn(role, paths) or self._known(role)

    def _drawn(self, role: str, paths: Iterable[str]) -> Scores | None:
        score = self.memory.scores[role]
        (state, _, step) = self.given
        if not isinstance(score, Drawn):
            return None
        return Scores(
            score.draw(leaves_at(state.params, paths), self._state(role), step)
        )

    def _known(self, role: str) -> Scores:
        if role not in self.known:
            score = self.memory.scores[role]
            (state, grads, step) = self.given
            given = (state.scores[role],) if isinstance(score, Accumulated) else ()
            value: Callable[..., Tree] = (
                score.value if isinstance(score, Accumulated) else score
            )
            absolute = isinstance(value, Absolute)
            keyed = True
            if isinstance(value, Absolute):
                keyed = value.keyed
                value = value.signed
            own = self._state(role) if keyed else state
            values = value(*given, own, grads, step)
            of_units = isinstance(value, OfUnits)
            # The compiler of torch 2.11 does not compare dicts by `is`.
            checked = not is_compiling() and (values is state.params or values is grads)
            if not checked and not of_units:
                check_like("scores", values, state.params, dtype=False)
            chosen = values if of_units else leaves_at(values, self.leaves)
            for path, leaf in () if checked else chosen.items():
                check_float("scores", leaf, path)
            self.known[role] = Scores(chosen, absolute, of_units)
        return self.known[role]

    def _state(self, role: str) -> State:
        state = self.given[0]
        return (
            state._replace(key=random.fold_in(state.key, role))
            if isinstance(state.key, Tensor)
            else state
        )
