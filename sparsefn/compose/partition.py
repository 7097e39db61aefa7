"""Different algorithms for different leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsefn.algorithms.frame import framed
from sparsefn.algorithms.static import dense
from sparsefn.compose.states import check_algorithm
from sparsefn.engine.checks import check_pairs, described
from sparsefn.state import (
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
from sparsefn.tree import Leaves, Tree
from sparsefn.tree.chosen import float_leaves, from_shares
from sparsefn.tree.chosen import shares as of_each


@described
def partition(parts: Sequence[tuple[Where, Algorithm]]) -> Algorithm:
    """Different algorithms for different leaves.

    >>> algorithm = sf.partition([("head.*", sf.dense()), ("*", sf.static(0.5))])
    >>> state = algorithm.init(
    ...     {"head": {"w": torch.ones(2, 2)}, "body": {"w": torch.ones(2, 2)}}
    ... )
    >>> state.masks["head"]["w"], int(state.masks["body"]["w"].sum())
    (tensor(True), 2)

    The first match wins, and the rest stays dense. Each part sees its leaves as a flat
    dict by dotted path and applies its own `where` to them, so random draws are the
    same as without a partition. An optimizer may be inside a part or around the whole.
    A glob that matches no leaf is a ValueError.
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
        support = (
            from_shares([support_of(state) for state in states], like) if own else ()
        )
        parts = tuple(state._replace(params=(), masks=()) for state in states)
        return State(params, masks, support=support, parts=parts)

    def init(params: Tree) -> State:
        float_leaves(params)  # which names what is no tree
        rows = shares(params, params)
        return join(
            [
                algorithm.init(row)
                for algorithm, row in zip(algorithms, rows, strict=True)
            ],
            params,
        )

    def update(state: State, grads: Tree, step: Step) -> State:
        given = (
            [None for _ in algorithms] if grads is None else shares(grads, state.params)
        )
        rows = zip(algorithms, split(state), given, strict=True)
        return join(
            [
                update_of(algorithm).inner(part, row, step)
                for algorithm, part, row in rows
            ],
            state.params,
        )

    def each(fn: Callable[[TrainView, State], Tree]) -> Callable[[State], Tree]:
        return lambda state: {
            str(i): fn(algorithm.view, part)
            for i, (algorithm, part) in enumerate(
                zip(algorithms, split(state), strict=True)
            )
        }

    def put(state: State, tree: Tree) -> State:
        rows = enumerate(zip(algorithms, split(state), strict=True))
        parts = [
            algorithm.view.put(part, tree[str(i)]) for i, (algorithm, part) in rows
        ]
        return join(parts, state.params)._replace(opt=state.opt)

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        rows = enumerate(
            zip(algorithms, split(state), shares(grads, state.params), strict=True)
        )
        return {
            str(i): algorithm.view.grads(part, row, step)
            for i, (algorithm, part, row) in rows
        }

    def settle(state: State) -> State:
        rows = zip(algorithms, split(state), strict=True)
        parts = [
            part if algorithm.settled is None else algorithm.settled(part)
            for algorithm, part in rows
        ]
        return join(parts, state.params)._replace(opt=state.opt)

    ends = (
        settle
        if any(algorithm.settled is not None for algorithm in algorithms)
        else None
    )
    plain = all(algorithm.view is masked_view for algorithm in algorithms)
    view = TrainView(
        each(lambda v, s: v.get(s)), put, grads_of, each(lambda v, s: v.support(s))
    )
    return framed(init, update, masked_view if plain else view, settled=ends)
