"""More terms in the gradient of an algorithm."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse
from sparsefn.algorithms.combine.parts import check_algorithm, no_optimizer
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import check_call, described
from sparsefn.core.state import Algorithm, State, Step, Term, update_of
from sparsefn.core.tree import Tree, check_like, wide


@described
def with_terms(algorithm: Algorithm, *terms: Term) -> Algorithm:
    """The algorithm whose gradients get more terms: decay, l1, penalties, noise.

    >>> algorithm = sf.with_terms(sf.dense(), sf.terms.l2(0.1))
    >>> state = algorithm.init({"w": torch.tensor([1.0, -2.0])})
    >>> algorithm.view.grads(state, {"w": torch.zeros(2)}, 0)
    {'w': tensor([ 0.1000, -0.2000])}

    Args:
        algorithm: Algorithm without an optimizer: terms go inside `with_optimizer`.
        *terms: Functions of (state, step) that return a tree like `view.get(state)`,
            read before the optimizer's step and added where the support lets weights
            move. Where latents or scores train, a term sees them: its state has the
            trained tree for params, and for masks where that tree moves.

    Returns:
        Algorithm whose view has these gradients. Sums are in float32 or wider.

    Raises:
        TypeError: `algorithm` is no Algorithm, or a term cannot be called with (state,
            step).
        ValueError: In `init`, `algorithm` has an optimizer already; or, in a step, a
            term has another structure or shape.
    """
    check_algorithm("with_terms", algorithm)
    for i, term in enumerate(terms):
        check_call(f"the term at position {i}", term, "state", "step")
    view = algorithm.view

    def added(g: Tensor, x: Tensor, s: Tensor) -> Tensor:
        return g + (torch.where(s, x, 0.0) if is_sparse(s, g) else x).to(g.dtype)

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        given = view.grads(state, grads, step)
        support = view.support(state)
        trained = view.get(state)
        if trained is state.params:
            seen = state
        else:
            seen = state._replace(params=trained, masks=support, support=())
        total = optree.tree_map(wide, given)
        for term in terms:
            extra = term(seen, step)
            check_like("a term", extra, total, dtype=False)
            total = optree.tree_map(added, total, extra, support)
        return optree.tree_map(lambda g, x: x.to(g.dtype), given, total)

    def init(params: Tree) -> State:
        state = algorithm.init(params)
        # its gradients would never pass through the terms
        no_optimizer("with_terms", [state])
        return state

    within = algorithm.within
    narrowed = (
        None if within is None else lambda masks: with_terms(within(masks), *terms)
    )
    return framed(
        init,
        update_of(algorithm),
        view._replace(grads=grads_of),
        narrowed,
        algorithm.settled,
    )
