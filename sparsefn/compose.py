"""Algorithms out of algorithms: partition over leaves, chain at one time, terms in the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import optree
import torch

from sparsefn.algorithms.core import check_update
from sparsefn.algorithms.static import dense
from sparsefn.engine.checks import check_call
from sparsefn.engine.leafwise import is_sparse
from sparsefn.masks import intersect
from sparsefn.tree import Tree, check_like, flatten, wide
from sparsefn.types import Algorithm, State, Step, Term, TrainView, Where, has_own_support, masked_view, support_of
from sparsefn.where import matching


def pack(parts: Sequence[State], params: Tree, masks: Tree, extra: Sequence[Any]) -> State:
    """One state of several: what a part keeps by its number; common support if a part has its own.

    >>> state = sf.dense().init({"w": torch.ones(1)})
    >>> pack([state], state.params, state.masks, [{}]).scores
    {'0': {'scores': (), 'support': ()}}
    """
    scores = {str(i): {**kept(part), **more} for i, (part, more) in enumerate(zip(parts, extra, strict=True))}
    own = any(has_own_support(part) for part in parts)
    support = reduce(intersect, (support_of(part) for part in parts)) if own else ()
    return State(params, masks, scores, {str(i): part.key for i, part in enumerate(parts)}, support=support)


def kept(part: State) -> dict[str, Tree]:
    """What the state of a composition keeps of a part beside its params, masks and key.

    >>> kept(sf.dense().init({"w": torch.ones(1)}))
    {'scores': (), 'support': ()}
    """
    return {"scores": part.scores, "support": part.support}


def check_plain(name: str, algorithms: Sequence[Algorithm]) -> None:
    """Raise unless every algorithm trains params: one that trains latents goes outermost.

    >>> check_plain("chain", [sf.dense()])
    """
    if not algorithms:
        raise ValueError(f"{name}: expected at least one algorithm, got none")
    for i, algorithm in enumerate(algorithms):
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"{name}: expected an Algorithm at position {i}, got {type(algorithm).__name__}")
        if algorithm.view is not masked_view:
            raise ValueError(
                f"{name}: the algorithm at position {i} has a view of its own (latents or terms); put that outermost: "
                f"reparametrised(..., inner={name}(...)) or with_terms({name}(...), ...)"
            )


def check_pairs(name: str, rules: Sequence[Any]) -> None:
    """Raise TypeError unless every rule is a pair.

    >>> check_pairs("phases", [(0, sf.dense())])
    """
    for i, rule in enumerate(rules):
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            raise TypeError(f"{name}: expected a list of pairs, got {type(rule).__name__} at position {i}")


def no_optimizer(name: str, states: Sequence[State]) -> None:
    """Raise for a part with an optimizer of its own.

    >>> no_optimizer("chain", [sf.dense().init({"w": torch.ones(1)})])
    """
    for i, state in enumerate(states):
        if state.opt != ():
            raise ValueError(f"{name}: the algorithm at position {i} has an optimizer; put with_optimizer outermost")


def _shares(rules: Sequence[tuple[Where, Algorithm]], tree: Tree, like: Tree) -> list[dict[str, Any]]:
    # The leaves of each part by path, and those of no part. The first match wins.
    leaves, known = flatten(tree)[0], flatten(like)[0]
    left, rows = list(leaves), []
    for where, _ in rules:
        hits = matching("partition", where, known)
        rows.append({path: leaves[path] for path in left if path in hits})
        left = [path for path in left if path not in hits]
    return [*rows, {path: leaves[path] for path in left}]


def partition(parts: Sequence[tuple[Where, Algorithm]]) -> Algorithm:
    """Different algorithms for different leaves: the first match wins, the rest stays dense.

    >>> algorithm = sf.partition([("head.*", sf.dense()), ("*", sf.static(0.5))])
    >>> state = algorithm.init({"head": {"w": torch.ones(2, 2)}, "body": {"w": torch.ones(2, 2)}})
    >>> state.masks["head"]["w"], int(state.masks["body"]["w"].sum())
    (tensor(True), 2)

    Each part sees its leaves as a flat dict by dotted path and applies its own `where` to them, so
    random draws are the same as without a partition. An optimizer may be inside a part or around the
    whole. A glob that matches no leaf is a ValueError.
    """
    rules = list(parts)
    if not rules:
        raise ValueError("partition: expected at least one (where, algorithm) pair, got none")
    check_pairs("partition", rules)
    for i, (_, algorithm) in enumerate(rules):
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"partition: expected an Algorithm at position {i}, got {type(algorithm).__name__}")
    algorithms = [algorithm for _, algorithm in rules] + [dense()]
    names = [str(i) for i in range(len(algorithms))]

    def shares(tree: Tree, like: Tree) -> list[dict[str, Any]]:
        return _shares(rules, tree, like)

    def split(state: State) -> list[State]:
        rows = zip(names, shares(state.params, state.params), shares(state.masks, state.params), strict=True)
        # The state of an optimizer around the partition is not its parts' matter.
        ours = isinstance(state.opt, dict) and set(state.opt) == set(names)
        return [
            State(params, masks, key=state.key[i], opt=state.opt[i] if ours else (), **state.scores[i])
            for i, params, masks in rows
        ]

    def bare(state: State) -> list[State]:
        return split(state._replace(opt=()))

    def merge(trees: Sequence[dict[str, Any]], like: Tree) -> Tree:
        leaves, rebuild = flatten(like)
        joined = {path: leaf for tree in trees for path, leaf in flatten(tree)[0].items()}
        return rebuild([joined[path] for path in leaves])

    def join(states: Sequence[State], like: Tree) -> State:
        params, masks = (merge([state[i] for state in states], like) for i in (0, 1))
        own = any(has_own_support(state) for state in states)
        support = merge([support_of(state) for state in states], like) if own else ()
        scores, opts, keys = (
            {str(i): field(state) for i, state in enumerate(states)}
            for field in (kept, attrgetter("opt"), attrgetter("key"))
        )
        opt = opts if any(opt != () for opt in opts.values()) else ()
        return State(params, masks, scores, keys, opt, support)

    def init(params: Tree) -> State:
        rows = shares(params, params)
        return join([algorithm.init(row) for algorithm, row in zip(algorithms, rows, strict=True)], params)

    def update(state: State, grads: Tree, step: Step) -> State:
        step = check_update(state, grads, step)
        given = [None for _ in names] if grads is None else shares(grads, state.params)
        rows = zip(algorithms, split(state), given, strict=True)
        return join([algorithm.update(part, row, step) for algorithm, part, row in rows], state.params)

    def each(fn: Callable[[TrainView, State], Tree]) -> Callable[[State], Tree]:
        return lambda state: {
            str(i): fn(algorithm.view, part)
            for i, (algorithm, part) in enumerate(zip(algorithms, bare(state), strict=True))
        }

    def put(state: State, tree: Tree) -> State:
        rows = enumerate(zip(algorithms, bare(state), strict=True))
        parts = [algorithm.view.put(part, tree[str(i)]) for i, (algorithm, part) in rows]
        return join(parts, state.params)._replace(opt=state.opt)

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        rows = enumerate(zip(algorithms, bare(state), shares(grads, state.params), strict=True))
        return {str(i): algorithm.view.grads(part, row, step) for i, (algorithm, part, row) in rows}

    plain = all(algorithm.view is masked_view for algorithm in algorithms)
    view = TrainView(each(lambda v, s: v.get(s)), put, grads_of, each(lambda v, s: v.support(s)))
    return Algorithm(init, update, masked_view if plain else view)


def chain(*algorithms: Algorithm) -> Algorithm:
    """Masks intersect at one time: each algorithm selects among what those before it kept.

    >>> rows = sf.one_shot(0.5, pattern=sf.patterns.channel(0))
    >>> algorithm = sf.chain(rows, sf.one_shot(0.75))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    >>> algorithm.update(state, state.params, 0).masks
    {'w': tensor([[False, False],
            [False,  True]])}

    Counts of every part are of the whole leaf; where fewer are left than a part asks for, all of them
    are kept. Only the last part may let pruned weights train on, else ValueError. Not `sequence`, where
    the state passes through and a later part may regrow.
    """
    check_plain("chain", algorithms)

    def inside(i: int, done: list[State]) -> Algorithm:
        within = algorithms[i].within
        return algorithms[i] if not done or within is None else within(_common(done))

    def join(parts: list[State], masks: Tree) -> State:
        return pack(parts, parts[-1].params, masks, [{"masks": part.masks} for part in parts])

    def init(params: Tree) -> State:
        parts: list[State] = []
        for i in range(len(algorithms)):
            parts.append(inside(i, parts).init(params))
            params = parts[-1].params
        no_optimizer("chain", parts)
        for i, part in enumerate(parts[:-1]):
            if has_own_support(part):
                raise ValueError(f"chain: pruned weights of the algorithm at position {i} train on; put it last")
        return join(parts, _common(parts))

    def update(state: State, grads: Tree, step: Step) -> State:
        step = check_update(state, grads, step)
        parts: list[State] = []
        params, still = state.params, True
        for i in range(len(algorithms)):
            own = state.scores[str(i)]
            old = State(params, key=state.key[str(i)], opt=state.opt, **own)
            parts.append(inside(i, parts).update(old, grads, step))
            params, still = parts[-1].params, still and parts[-1].masks is old.masks
        return join(parts, state.masks if still else _common(parts))

    return Algorithm(init, update)


def _common(parts: Sequence[State]) -> Tree:
    return reduce(intersect, (part.masks for part in parts))


def with_terms(algorithm: Algorithm, *terms: Term) -> Algorithm:
    """The algorithm whose gradients get more terms: decay, l1, penalties, noise.

    >>> algorithm = sf.with_terms(sf.dense(), sf.terms.l2(0.1))
    >>> state = algorithm.init({"w": torch.tensor([1.0, -2.0])})
    >>> algorithm.view.grads(state, {"w": torch.zeros(2)}, 0)
    {'w': tensor([ 0.1000, -0.2000])}

    Each `term(state, step)` is a tree like `view.get(state)`, read before the optimizer's step and
    added where the support lets weights move. Where latents or scores train, a term sees them: its state has
    the trained tree for params, and for masks where that tree moves. Sums are in float32 or wider. Another
    structure or shape is a ValueError, and so is an algorithm that has its optimizer already: terms go
    inside `with_optimizer`.
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"with_terms: expected an Algorithm, got {type(algorithm).__name__}")
    for i, term in enumerate(terms):
        check_call(f"the term at position {i}", term, "state", "step")
    view = algorithm.view

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        given, support, trained = view.grads(state, grads, step), view.support(state), view.get(state)
        seen = state if trained is state.params else state._replace(params=trained, masks=support, support=())
        total = optree.tree_map(wide, given)
        for term in terms:
            extra = term(seen, step)
            check_like("a term", extra, total, dtype=False)
            total = optree.tree_map(
                lambda g, x, s: g + (torch.where(s, x, 0.0) if is_sparse(s, g) else x).to(g.dtype),
                total,
                extra,
                support,
            )
        return optree.tree_map(lambda g, x: x.to(g.dtype), given, total)

    def within(masks: Tree) -> Algorithm:
        assert algorithm.within is not None
        return with_terms(algorithm.within(masks), *terms)

    def init(params: Tree) -> State:
        state = algorithm.init(params)
        no_optimizer("with_terms", [state])  # its gradients would never pass through the terms
        return state

    return algorithm._replace(
        init=init, view=view._replace(grads=grads_of), within=within if algorithm.within is not None else None
    )
