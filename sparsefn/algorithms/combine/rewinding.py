"""Weights that go back to the weights of an earlier step."""

from __future__ import annotations

from sparsefn.algorithms.combine.parts import check_trained
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import check_trigger, described
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    Trigger,
    has_optimizer,
    update_of,
)
from sparsefn.core.tree import Tree, choose, copied


@described
def rewinding(algorithm: Algorithm, *, to: Trigger, when: Trigger) -> Algorithm:
    """The algorithm whose weights go back, at a trigger, to an earlier step.

    >>> lottery = sf.iterative(0.5, when=sf.at([3]))
    >>> algorithm = sf.rewinding(lottery, to=sf.at([1]), when=sf.at([3]))
    >>> trained = sf.with_optimizer(algorithm, sf.optimizers.sgd(1.0), reset=sf.at([3]))
    >>> state = trained.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> for step in range(4):
    ...     state = trained.update(state, {"w": torch.tensor([[0.0, -1.0]])}, step)
    >>> state.params
    {'w': tensor([[0., 4.]])}

    Args:
        algorithm: Algorithm that trains params, without an optimizer.
        to: Trigger at which the weights that the update leaves are kept, in
            `state.scores["rewind"]`. `to=sf.at([k])` means after k + 1 steps of the
            optimizer. Before it ever fires the weights of `init` are kept, so that
            `to=sf.never()` goes back to the start.
        when: Trigger at which masks change first, and then all weights, of dense leaves
            too, go back to the kept ones: under the new masks, with +0.0 where weights
            are pruned (their present values under `pruned="keep"`). Where both fire,
            weights are kept and nothing goes back.

    Returns:
        Algorithm whose state has one more tree of weights.

    Raises:
        TypeError: `algorithm` is no Algorithm, or a trigger cannot be called with a
            step.
        ValueError: `algorithm` trains something else than params, or, in the
            algorithm's `init`, has an optimizer: put `with_optimizer` outermost.

    `with_optimizer(..., reset=when)` starts the optimizer again: iterative magnitude
    pruning with weight rewinding, Frankle et al. 2020, arXiv 1912.05671. Learning-rate
    rewinding (Renda et al. 2020, arXiv 2003.02389) is that without `rewinding`.
    """
    check_trained("rewinding", [algorithm])
    check_trigger("to", to)
    check_trigger("when", when)

    def joined(part: State, kept: Tree) -> State:
        inner = State((), (), part.scores, parts=part.parts)
        return part._replace(scores={"rewind": kept}, parts=(inner,))

    def init(params: Tree) -> State:
        state = algorithm.init(params)
        if has_optimizer(state):
            raise ValueError(
                "rewinding: the algorithm has an optimizer; put with_optimizer "
                "outermost"
            )
        return joined(state, copied(state.params))

    def update(state: State, grads: Tree, step: Step) -> State:
        (inner,) = state.parts
        part = update_of(algorithm).inner(
            state._replace(scores=inner.scores, parts=inner.parts), grads, step
        )
        kept = choose(to(step), lambda _: copied(part.params), state.scores["rewind"])
        # A copy: leaves of a state share no memory.
        part = choose(
            when(step), lambda now: algorithm.view.put(now, copied(kept)), part
        )
        return joined(part, kept)

    within = algorithm.within
    narrowed = (
        None
        if within is None
        else lambda masks: rewinding(within(masks), to=to, when=when)
    )
    return framed(init, update, within=narrowed)
