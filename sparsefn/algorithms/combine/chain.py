"""Several algorithms at once, whose masks intersect."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from sparsefn.algorithms.combine.parts import (
    check_trained,
    joined_support,
    no_optimizer,
)
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import described
from sparsefn.core.state import Algorithm, State, Step, has_own_support, update_of
from sparsefn.core.tree import Tree, identical
from sparsefn.masks import intersect


@described
def chain(*algorithms: Algorithm) -> Algorithm:
    """Intersect masks: each algorithm selects among what all before it kept.

    >>> rows = sf.one_shot(0.5, pattern=sf.patterns.channel(0))
    >>> algorithm = sf.chain(rows, sf.one_shot(0.75))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    >>> algorithm.update(state, state.params, 0).masks
    {'w': tensor([[False, False],
            [False,  True]])}

    Args:
        *algorithms: One algorithm or more, without optimizers. Only the last may let
            pruned weights train on.

    Returns:
        Algorithm whose masks are the intersection. Counts of every part refer to the
        whole leaf.

    Raises:
        TypeError: An argument is no Algorithm.
        ValueError: There is no algorithm, or one has a view of its own (latents or
            terms); or, in the algorithm's `init`, one has an optimizer, or one that is
            not the last lets pruned weights train on.

    Where a pattern has several groups, such as rows, a group in which fewer units are
    left than its part of the leaf's count leaves the rest of it to the other groups. If
    fewer entries are left than a part asks for, all of them are kept. Not `sequence`,
    where the state passes through and a later part may regrow.
    """
    check_trained("chain", algorithms)

    def allowed(i: int, done: list[State]) -> Algorithm:
        within = algorithms[i].within
        if not done or within is None:
            return algorithms[i]
        return within(_common(done))

    def join(parts: list[State], masks: Tree) -> State:
        inner = tuple(part._replace(params=(), opt=()) for part in parts)
        return State(
            parts[-1].params, masks, support=joined_support(parts), parts=inner
        )

    def init(params: Tree) -> State:
        parts: list[State] = []
        for i in range(len(algorithms)):
            parts.append(allowed(i, parts).init(params))
            params = parts[-1].params
        no_optimizer("chain", parts)
        for i, part in enumerate(parts[:-1]):
            if has_own_support(part):
                raise ValueError(
                    f"chain: pruned weights of the algorithm at position {i} train "
                    "on; put it last"
                )
        return join(parts, _common(parts))

    def update(state: State, grads: Tree, step: Step) -> State:
        parts: list[State] = []
        params = state.params
        still = True
        for i, part in enumerate(state.parts):
            old = part._replace(params=params, opt=state.opt)
            parts.append(update_of(allowed(i, parts)).inner(old, grads, step))
            params = parts[-1].params
            still = still and identical(parts[-1].masks, old.masks)
        return join(parts, state.masks if still else _common(parts))

    return framed(init, update)


def _common(parts: Sequence[State]) -> Tree:
    return reduce(intersect, (part.masks for part in parts))
