"""Several algorithms one after another, inside one update."""

from __future__ import annotations

from collections.abc import Sequence

import optree

from sparsefn.algorithms.combine.parts import (
    check_trained,
    joined_support,
    no_optimizer,
    with_own_masks,
    with_own_paths,
)
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import described
from sparsefn.core.state import Algorithm, State, Step, update_of
from sparsefn.core.tree import Tree, identical


@described
def sequence(*algorithms: Algorithm) -> Algorithm:
    """Run algorithms in order inside each update, each on the state of the one before.

    >>> prune = sf.gmp(sf.schedules.piecewise({0: 0.0, 1: 0.5}), init="dense")
    >>> regrow = sf.rigl("current", drop_fraction=0.5, when=sf.always())
    >>> algorithm = sf.sequence(prune, regrow)
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, 1).masks
    {'w': tensor([[ True, False, False,  True]])}

    Args:
        *algorithms: One algorithm or more, without optimizers. Each may regrow what
            earlier ones pruned; the first that sparsifies a leaf makes its initial
            mask.

    Returns:
        Algorithm. Inside a `chain` each of its parts chooses among what the algorithms
        before the sequence kept.

    Raises:
        TypeError: An argument is no Algorithm.
        ValueError: There is no algorithm, or one has a view of its own (latents or
            terms), or, in the algorithm's `init`, an optimizer.

    Not `chain`, where masks intersect. Prune then regrow at the same triggers is GraNet
    (Liu et al. 2021, arXiv 2106.10404). SRigL with ablation (Lasby et al. 2024,
    arXiv 2305.02299) is a chain of a choice of rows and a sequence that prunes and
    regrows.
    """
    check_trained("sequence", algorithms)
    return _sequence(algorithms)


def _sequence(algorithms: Sequence[Algorithm]) -> Algorithm:
    def within(masks: Tree) -> Algorithm:
        # An algorithm without `within` is left unchanged: the chain intersects its
        # masks.
        return _sequence(
            [part if part.within is None else part.within(masks) for part in algorithms]
        )

    def join(
        parts: Sequence[State],
        params: Tree,
        masks: Tree,
        owns: Sequence[State],
    ) -> State:
        inner = (
            part._replace(params=(), masks=own.masks, opt=())
            for part, own in zip(parts, owns, strict=True)
        )
        return State(params, masks, support=joined_support(parts), parts=tuple(inner))

    def init(params: Tree) -> State:
        parts = [algorithm.init(params) for algorithm in algorithms]
        no_optimizer("sequence", parts)
        owner = optree.tree_map(
            lambda *ms: next((i for i, m in enumerate(ms) if m.ndim), 0),
            *(p.masks for p in parts),
        )

        def from_owners(trees: Sequence[Tree]) -> Tree:
            return optree.tree_map(lambda i, *leaves: leaves[i], owner, *trees)

        masks = from_owners([part.masks for part in parts])
        first = from_owners([part.params for part in parts])
        return join(parts, first, masks, [with_own_paths(part) for part in parts])

    def update(state: State, grads: Tree, step: Step) -> State:
        params = state.params
        masks = state.masks
        parts = []
        for algorithm, own in zip(algorithms, state.parts, strict=True):
            seen = with_own_masks(own, params, masks, state.opt)
            part = update_of(algorithm).inner(seen, grads, step)
            params = part.params
            # else a chain around this would take them for new ones
            if not identical(part.masks, seen.masks):
                masks = optree.tree_map(
                    lambda old, new: new if new.ndim else old, masks, part.masks
                )
            parts.append(part)
        return join(parts, params, masks, state.parts)

    return framed(init, update, within=within)
