"""Several algorithms one after another, over the steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import optree
import torch

from sparsefn.algorithms.combine.parts import (
    check_trained,
    joined_support,
    no_optimizer,
    with_own_masks,
    with_own_paths,
)
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import check_pairs, described, is_int
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    effective,
    has_own_support,
    support_of,
    update_of,
)
from sparsefn.core.tree import Leaves, Tree, choose, flatten, with_leaves
from sparsefn.core.triggers import At, Every


def _expanded(masks: Tree, params: Tree, owned: set[str]) -> Tree:
    # 0-d True of leaves that another part sparsifies, at full shape.
    leaves = flatten(params)[0]
    full: Leaves = {}
    for path, mask in flatten(masks)[0].items():
        if path in owned and not mask.ndim:
            full[path] = torch.ones_like(leaves[path], dtype=torch.bool)
    return with_leaves(masks, full)


@described
def phases(schedule: Sequence[tuple[int, Algorithm]]) -> Algorithm:
    """Run one algorithm after another: each from its begin step until the next one's.

    >>> algorithm = sf.phases([(0, sf.static(0.5, init="magnitude")), (2, sf.dense())])
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> for step in range(3):
    ...     state = algorithm.update(state, state.params, step)
    >>> state
    State(params={'w': tensor([[0., 2.]])}, masks={'w': tensor([[True, True]])}, ...)

    Args:
        schedule: Pairs of (begin, algorithm): begins are ints, the first is 0, and they
            increase. The algorithms have no optimizers.

    Returns:
        Algorithm that at each begin initialises the next algorithm from the effective
        weights and then updates it, so the loop must call the update at exactly that
        step. Masks of a leaf that any phase sparsifies have full shape throughout.

    Raises:
        TypeError: `schedule` does not hold pairs, a begin is not an int, or a pair
            holds no Algorithm.
        ValueError: The begins do not start at 0 and increase, there are no phases, an
            algorithm has a view of its own (latents or terms), or, in the algorithm's
            `init`, an optimizer.
    """
    check_pairs("phases", schedule)
    begins = [begin for begin, _ in schedule]
    algorithms = [algorithm for _, algorithm in schedule]
    check_trained("phases", algorithms)
    for begin in begins:
        if not is_int(begin):
            raise TypeError(f"phases: expected begins to be ints, got {begin!r}")
    if begins[0] != 0 or any(a >= b for a, b in itertools.pairwise(begins)):
        raise ValueError(
            f"phases: expected begins that start at 0 and grow, got {begins}"
        )
    ends = [*begins[1:], None]
    during = [Every(1, *times) for times in zip(begins, ends, strict=True)]
    starts = [At((begin,)) for begin in begins]

    def join(state: State, part: State, i: int) -> State:
        sparse = {path for own in state.parts for path in own.masks}
        masks = _expanded(part.masks, state.params, sparse)
        if has_own_support(state):
            support = _expanded(support_of(part), state.params, sparse)
        else:
            support = ()
        inner = part._replace(params=(), masks=state.parts[i].masks, opt=())
        parts = (*state.parts[:i], inner, *state.parts[i + 1 :])
        return State(part.params, masks, opt=state.opt, support=support, parts=parts)

    def init(params: Tree) -> State:
        parts = [algorithm.init(params) for algorithm in algorithms]
        no_optimizer("phases", parts)
        first = parts[0]
        inner = tuple(with_own_paths(part) for part in parts)
        state = join(
            State(
                first.params, first.masks, support=joined_support(parts), parts=inner
            ),
            first,
            0,
        )
        # Of its own, as compiled code asks whether two inputs are one tensor, which
        # they are at no later step.
        return state._replace(support=optree.tree_map(torch.clone, state.support))

    def run(state: State, grads: Tree, step: Step, i: int) -> State:
        old = with_own_masks(state.parts[i], state.params, state.masks, state.opt)
        part = old
        if i:  # a phase that begins starts over from the effective weights
            part = choose(
                starts[i](step),
                lambda _: algorithms[i].init(effective(state))._replace(opt=state.opt),
                old,
            )
        part = update_of(algorithms[i]).inner(part, grads, step)
        return state if part is old else join(state, part, i)

    def update(state: State, grads: Tree, step: Step) -> State:
        for i, when in enumerate(during):
            part = partial(run, grads=grads, step=step, i=i)
            state = choose(when(step), part, state)
        return state

    return framed(init, update)
