"""Any TorchOpt- or optax-shaped optimizer inside an algorithm, with masked moments."""

from __future__ import annotations

from sparsefn._engine.leaves import donate, saves_memory
from sparsefn.algorithms.combine import foreign
from sparsefn.algorithms.combine.descent import Descent, Moments, compiled_well
from sparsefn.algorithms.combine.parts import check_algorithm
from sparsefn.algorithms.combine.same_step import check_paired
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import check_trigger, described, uncalled
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    Trigger,
    UncheckedUpdate,
    everywhere,
    has_optimizer,
    masked_view,
    update_of,
)
from sparsefn.core.tree import Tree, all_finite, choose, leaves_of, where_leaves
from sparsefn.core.triggers import never

# The view of an optimizer that keeps moments of pruned weights, too.
dense_view = masked_view._replace(
    grads=lambda state, grads, step: grads,
    support=lambda state: everywhere(state.params),
)


@described
def with_dense_gradients(algorithm: Algorithm) -> Algorithm:
    """The algorithm whose optimizer gets gradients of pruned weights, too.

    >>> algorithm = sf.with_dense_gradients(sf.static(0.5, init="magnitude"))
    >>> algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.5, momentum=0.9))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> state = algorithm.update(state, {"w": torch.ones(1, 2)}, 0)
    >>> state.params, state.opt.momentum
    ({'w': tensor([[0.0000, 1.5000]])}, {'w': tensor([[1., 1.]])})

    Args:
        algorithm: Algorithm that trains params.

    Returns:
        Algorithm whose optimizer keeps moments of pruned weights, too. The same weights
        move as before; only moments are dense, so that a grown weight starts with its
        momentum (with `reset_grown=False`) and scores may read momenta of pruned
        weights in `state.opt`.

    Raises:
        TypeError: `algorithm` is no Algorithm.
        ValueError: `algorithm` has another view (latents, terms).
    """
    check_algorithm("with_dense_gradients", algorithm)
    if algorithm.view is not masked_view:
        raise ValueError(
            "with_dense_gradients: expected an algorithm that trains params, got one "
            "with its own view"
        )
    return algorithm._replace(view=dense_view, within=None)


@described
def with_optimizer(
    algorithm: Algorithm,
    optimizer: foreign.ForeignOptimizer,
    *,
    skip: Trigger | None = None,
    reset: Trigger = never(),
    reset_grown: bool = True,
    mask_moments: bool = True,
    skip_nonfinite: bool = False,
) -> Algorithm:
    """An algorithm with an optimizer inside, which steps before the masks change.

    >>> algorithm = sf.with_optimizer(
    ...     sf.static(0.5, init="magnitude"), sf.optimizers.sgd(0.5)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> algorithm.update(state, {"w": torch.ones(1, 2)}, 0).params
    {'w': tensor([[0.0000, 1.5000]])}

    SNIP prunes by weights times gradients: `skip` leaves out the step that would move
    the weights before.

    >>> snip = sf.with_optimizer(
    ...     sf.one_shot(0.5, sf.scores.saliency),
    ...     sf.optimizers.sgd(9.0),
    ...     skip=sf.at([0]),
    ... )
    >>> state = snip.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> snip.update(state, {"w": torch.tensor([[3.0, 1.0]])}, 0).params
    {'w': tensor([[1., 0.]])}

    Args:
        algorithm: Algorithm without an optimizer.
        optimizer: Pair of functions `init(params)` and
            `update(grads, state, *, params, inplace)`, as in TorchOpt and
            `sf.optimizers`. It must be pure and is called with `inplace=False`; its
            state holds only tensors.
        skip: Trigger at which the optimizer's step is left out. None: at no step.
        reset: Trigger at which the whole optimizer starts again.
        reset_grown: Whether moments start from the values that the optimizer's `init`
            gives them, where the support turns on again or where the algorithm itself
            sets a kept weight.
        mask_moments: Whether moments are zero outside the view's support.
        skip_nonfinite: Whether a step in which an entry of grads, pruned or not, is NaN
            or infinite changes nothing in the state.

    Returns:
        Algorithm with the optimizer's state in `state.opt`. The order in one update is
        gradient terms -> optimizer (not when `skip` fires) -> masks -> moments.

    Raises:
        TypeError: `algorithm` is no Algorithm, `optimizer` lacks init or update, a
            trigger cannot be called with a step, or, in the algorithm's `init` or an
            update, the optimizer's state holds something else than tensors.
        ValueError: A score multiplies weights by gradients (`saliency`, `movement`) and
            `skip` is None; in the algorithm's `init`, there is an optimizer already,
            or, unless `mask_moments` and `reset_grown` are both off, the optimizer's
            state joins leaves in one tensor, or holds moments in integers, of low rank
            or in another basis; or, in an update, the optimizer's updates are unlike
            the params.

    Drop scores see the stepped weights and grow scores the gradient of the same step.
    Scores see the stepped optimizer's state in `state.opt`, but not inside `partition`
    and `reparametrised`, whose parts are other trees. Moments of `sf.optimizers` are
    +0.0 outside the support by then, if `mask_moments` and `reset_grown` are on and
    gradients are masked. A moment is a tensor of the optimizer's state with the shape
    of a trained leaf. Statistics of rows and columns, as Adafactor's, see masked
    gradients and are not touched.
    """
    check_algorithm("with_optimizer", algorithm)
    check_paired("with_optimizer", algorithm, skip)
    if skip is not None:
        check_trigger("skip", skip)
    check_trigger("reset", reset)
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            got = uncalled(optimizer) or f"{foreign.name_of(optimizer)} without {name}"
            raise TypeError(
                "with_optimizer: expected an optimizer with init(params) and "
                "update(grads, state, *, params, inplace), such as "
                f"sf.optimizers.sgd(0.1), adam(1e-3) or adamw(1e-3), got {got}"
            )
    mask_update = update_of(algorithm)
    optimizer_step = Descent(
        optimizer, algorithm.view, clear=mask_moments and reset_grown
    )
    moments = Moments(optimizer, algorithm.view, mask_moments, reset_grown)

    def init(params: Tree) -> State:
        state = algorithm.init(params)
        if has_optimizer(state):
            raise ValueError("with_optimizer: the algorithm has an optimizer already")
        state = optimizer_step.restarted(state)
        moments.check(state)
        optimizer_step.prime(state)
        return state

    def advance(state: State, grads: Tree, step: Step) -> State:
        after = optimizer_step.stepped(state, grads, step, skip)
        state = after.state
        # Nobody else needs the stepped weights.
        if mask_update.overwrites and saves_memory():
            others = leaves_of((grads, state._replace(params=())))
            donate(leaves_of(state.params), others)
        state = mask_update.inner(state, grads, step)._replace(opt=state.opt)
        state = moments.cleared(state, after, grads)
        chosen: State = choose(reset(step), optimizer_step.restarted, state)
        return chosen

    @compiled_well
    def update(state: State, grads: Tree, step: Step) -> State:
        if not skip_nonfinite or grads is None:
            return advance(state, grads, step)
        finite = all_finite(grads)
        if finite.device.type != "cpu":  # reading its value would wait for the device
            return where_leaves(finite, advance(state, grads, step), state)  # type: ignore[no-any-return]
        return choose(finite, lambda now: advance(now, grads, step), state)  # type: ignore[no-any-return]

    record = UncheckedUpdate(
        update, recipe=None if skip_nonfinite else mask_update.recipe
    )
    return framed(init, record, algorithm.view, settled=algorithm.settled)
