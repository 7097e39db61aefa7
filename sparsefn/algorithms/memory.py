"""The scores of an algorithm by role, and what accumulated ones remember."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from sparsefn import random
from sparsefn.engine.floats import check_float
from sparsefn.engine.promises import promised
from sparsefn.state import Accumulated, Score, State, Step
from sparsefn.tree import Leaves, Tree, check_like, leaves_at

# What happens to weights off the mask: set to zero, kept as they are, or trained on.
Pruned = Literal["zero", "keep", "train"]


class Memory(NamedTuple):
    """The scores of an algorithm by role; memories of Accumulated ones lie by role in `state.scores`."""

    scores: dict[str, Score]
    pruned: Pruned

    def init(self, params: Tree) -> Tree:
        """The first memory of each role that has one, `()` if none has."""
        return {role: score.init(params) for role, score in self._kept()} or ()

    def accumulate(self, state: State, grads: Tree, step: Step) -> State:
        """Advance every memory: done on every step."""
        new = {role: score.accumulate(state.scores[role], state, grads, step) for role, score in self._kept()}
        return state._replace(scores=new) if new else state

    def _kept(self) -> list[tuple[str, Accumulated]]:
        return [(role, score) for role, score in self.scores.items() if isinstance(score, Accumulated)]

    def by_leaf(self, role: str) -> bool:
        """Whether the scores of some leaves are to be had without those of the others."""
        return self._of_leaves(role) is not None

    def _of_leaves(self, role: str) -> Callable[..., Leaves] | None:
        score = self.scores[role]
        return None if isinstance(score, Accumulated) else promised(score, "of_leaves")

    def read(
        self, role: str, state: State, grads: Tree, step: Step, paths: Iterable[str], signed: bool = False
    ) -> tuple[Leaves, bool]:
        """The scores of a role for some leaves; each role draws its own random numbers.

        With `signed`, a score that is an absolute value comes without it taken, and True.
        """
        score = self.scores[role]
        if isinstance(state.key, Tensor):
            state = state._replace(key=random.fold_in(state.key, role))
        of_leaves = self._of_leaves(role)
        if of_leaves is not None:
            return of_leaves(leaves_at(state.params, paths), state, step), False
        value: Callable[..., Tree] = score.value if isinstance(score, Accumulated) else score
        inner = promised(value, "signed") if signed else None
        given = (state.scores[role],) if isinstance(score, Accumulated) else ()
        values = (inner or value)(*given, state, grads, step)
        check_like("scores", values, state.params, dtype=False)
        chosen = leaves_at(values, paths)
        for path, leaf in chosen.items():
            check_float("scores", leaf, path)
        return chosen, inner is not None
