"""Different algorithms for different leaves."""

from __future__ import annotations

from collections.abc import Sequence

from sparsefn.algorithms.combine.parts import check_algorithm
from sparsefn.algorithms.frame import framed
from sparsefn.algorithms.reparametrised import settled
from sparsefn.algorithms.static import dense
from sparsefn.core.checks import check_pairs, described
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    TrainView,
    Where,
    has_own_support,
    masked_view,
    support_of,
    update_of,
)
from sparsefn.core.tree import Leaves, Tree
from sparsefn.core.tree.where import float_leaves, from_shares
from sparsefn.core.tree.where import shares as of_each


@described
def partition(parts: Sequence[tuple[Where, Algorithm]]) -> Algorithm:
    """Different algorithms for different leaves.

    >>> algorithm = sf.partition([("head.*", sf.dense()), ("*", sf.static(0.5))])
    >>> state = algorithm.init(
    ...     {"head": {"w": torch.ones(2, 2)}, "body": {"w": torch.ones(2, 2)}}
    ... )
    >>> state.masks["head"]["w"], int(state.masks["body"]["w"].sum())
    (tensor(True), 2)

    Args:
        parts: Pairs of (where, algorithm): `where` is a function of (path, leaf), a
            glob or several globs. The first match wins, and the rest stays dense. An
            optimizer may be inside a part or around the whole.

    Returns:
        Algorithm in which each part sees its leaves as a flat dict by dotted path, and
        applies its own `where` to them. So random draws are the same as without a
        partition.

    Raises:
        TypeError: `parts` does not hold pairs, or a pair holds no Algorithm.
        ValueError: There are no parts, or, in the algorithm's `init`, a glob matches no
            leaf.
    """
    rules = list(parts)
    if not rules:
        raise ValueError(
            "partition: expected at least one (where, algorithm) pair, got none"
        )
    check_pairs("partition", rules)
    for i, (_, algorithm) in enumerate(rules):
        check_algorithm("partition", algorithm, f" at position {i}")
    wheres = [where for where, _ in rules]
    algorithms = [algorithm for _, algorithm in rules] + [dense()]

    def shares(tree: Tree, like: Tree) -> list[Leaves]:
        return of_each("partition", wheres, tree, like)

    def split(state: State) -> list[State]:
        rows = zip(
            state.parts,
            shares(state.params, state.params),
            shares(state.masks, state.params),
            strict=True,
        )
        return [
            part._replace(params=params, masks=masks) for part, params, masks in rows
        ]

    def join(states: Sequence[State], like: Tree) -> State:
        params = from_shares([state.params for state in states], like)
        masks = from_shares([state.masks for state in states], like)
        own = any(has_own_support(state) for state in states)
        if own:
            support = from_shares([support_of(state) for state in states], like)
        else:
            support = ()
        parts = tuple(state._replace(params=(), masks=()) for state in states)
        return State(params, masks, support=support, parts=parts)

    names = [str(i) for i in range(len(algorithms))]

    def each(state: State) -> list[tuple[str, Algorithm, State]]:
        return list(zip(names, algorithms, split(state), strict=True))

    def init(params: Tree) -> State:
        float_leaves(params)  # which names what is no tree
        rows = zip(algorithms, shares(params, params), strict=True)
        return join([algorithm.init(row) for algorithm, row in rows], params)

    def update(state: State, grads: Tree, step: Step) -> State:
        given: list[Leaves | None] = [None] * len(algorithms)
        if grads is not None:
            given = [*shares(grads, state.params)]
        parts = [
            update_of(algorithm).inner(part, row, step)
            for (_, algorithm, part), row in zip(each(state), given, strict=True)
        ]
        return join(parts, state.params)

    def get(state: State) -> Tree:
        return {name: own.view.get(part) for name, own, part in each(state)}

    def put(state: State, tree: Tree) -> State:
        parts = [own.view.put(part, tree[name]) for name, own, part in each(state)]
        return join(parts, state.params)._replace(opt=state.opt)

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        rows = zip(each(state), shares(grads, state.params), strict=True)
        return {
            name: own.view.grads(part, row, step) for (name, own, part), row in rows
        }

    def support(state: State) -> Tree:
        return {name: own.view.support(part) for name, own, part in each(state)}

    def settle(state: State) -> State:
        parts = [settled(own, part) for _, own, part in each(state)]
        return join(parts, state.params)._replace(opt=state.opt)

    settles = any(algorithm.settled is not None for algorithm in algorithms)
    plain = all(algorithm.view is masked_view for algorithm in algorithms)
    if plain:
        view = masked_view
    else:
        view = TrainView(get, put, grads_of, support)
    return framed(init, update, view, settled=settle if settles else None)
