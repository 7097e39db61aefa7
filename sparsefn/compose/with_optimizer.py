"""Any TorchOpt- or optax-shaped optimizer inside an algorithm, its moments kept in step with the masks."""

from __future__ import annotations

from functools import partial

import optree
from torch import Tensor

from sparsefn.algorithms.frame import checked, reading_bytes, spends, unchecked
from sparsefn.algorithms.processes import begun
from sparsefn.compose import foreign
from sparsefn.compose.moments import live_leaves
from sparsefn.compose.paired import check_paired
from sparsefn.compose.states import check_algorithm
from sparsefn.engine import leafwise, together
from sparsefn.engine.checks import check_trigger
from sparsefn.engine.described import described, uncalled
from sparsefn.engine.donation import offer, saves
from sparsefn.engine.leafwise import sparse_among
from sparsefn.engine.transforms import fused
from sparsefn.state import Algorithm, State, Step, Trigger, everywhere, masked_view, moved, support_of
from sparsefn.tree import (
    Tree,
    all_finite,
    check_like,
    choose,
    leaves_of,
    opened,
    same_structure,
    structure_error,
    where_leaves,
    zipped,
)
from sparsefn.triggers import never

# The view of an optimizer that keeps moments of pruned weights, too.
dense_view = masked_view._replace(
    grads=lambda state, grads, step: grads,
    support=lambda state: everywhere(state.params),
)


@described
def with_dense_gradients(algorithm: Algorithm) -> Algorithm:
    """The algorithm whose optimizer gets gradients of pruned weights, too, and keeps their moments.

    >>> algorithm = sf.with_dense_gradients(sf.static(0.5, init="magnitude"))
    >>> algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.5, momentum=0.9))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> state = algorithm.update(state, {"w": torch.ones(1, 2)}, 0)
    >>> state.params, state.opt.momentum
    ({'w': tensor([[0.0000, 1.5000]])}, {'w': tensor([[1., 1.]])})

    The same weights move as before; only moments are dense, so that a grown weight starts with its momentum (with
    `reset_grown=False`) and scores may read momenta of pruned weights in `state.opt`. ValueError for an algorithm
    that has another view (latents, terms).
    """
    check_algorithm("with_dense_gradients", algorithm)
    if algorithm.view is not masked_view:
        raise ValueError("with_dense_gradients: expected an algorithm that trains params, got one with its own view")
    return algorithm._replace(view=dense_view, within=None)


@described
def with_optimizer(
    algorithm: Algorithm,
    optimizer: foreign.Optimizer,
    *,
    skip: Trigger | None = None,
    reset: Trigger = never(),
    reset_grown: bool = True,
    mask_moments: bool = True,
    skip_nonfinite: bool = False,
) -> Algorithm:
    """An algorithm with an optimizer inside: each update steps the trained tree, then updates the masks.

    >>> algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), sf.optimizers.sgd(0.5))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> algorithm.update(state, {"w": torch.ones(1, 2)}, 0).params
    {'w': tensor([[0.0000, 1.5000]])}

    SNIP prunes by weights times gradients: `skip` leaves out the step that would move the weights before.

    >>> snip = sf.with_optimizer(sf.one_shot(0.5, sf.scores.saliency), sf.optimizers.sgd(9.0), skip=sf.at([0]))
    >>> state = snip.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> snip.update(state, {"w": torch.tensor([[3.0, 1.0]])}, 0).params
    {'w': tensor([[1., 0.]])}

    Order in one update: gradient terms -> optimizer (not when `skip` fires) -> masks -> moments. So
    drop scores see the stepped weights and grow scores the gradient of the same step. Moments are zero
    outside the view's support (`mask_moments`) and start from zero where it turns on again or where the algorithm
    itself sets a kept weight (`reset_grown`); `reset` starts the whole optimizer again. With `skip_nonfinite` a step
    in which an entry of grads, pruned or not, is NaN or infinite changes nothing in the state. Scores see the stepped
    optimizer's state in `state.opt`, but not inside `partition` and `reparametrised`, whose parts are other trees.

    The optimizer must be pure and is called with `inplace=False`; its state holds only tensors. A moment is a tensor
    of that state with the shape of a trained leaf. Statistics of rows and columns, as Adafactor's, see masked
    gradients and are not touched. TypeError for something without init and update and for a state that holds a
    number. ValueError for an algorithm that has an optimizer already, for a score that multiplies weights by gradients
    (`saliency`, `movement`) without `skip`, for updates unlike the params, and, unless
    `mask_moments` and `reset_grown` are both off, for a state that joins leaves in one tensor.
    """
    check_algorithm("with_optimizer", algorithm)
    check_paired("with_optimizer", algorithm, skip)
    skip = never() if skip is None else skip
    for name, trigger in (("skip", skip), ("reset", reset)):
        check_trigger(name, trigger)
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            raise TypeError(
                "with_optimizer: expected an optimizer with init(params) and update(grads, state, *, params, inplace), "
                "such as sf.optimizers.sgd(0.1), adam(1e-3) or adamw(1e-3), "
                f"got {uncalled(optimizer) or f'{foreign.name_of(optimizer)} without {name}'}"
            )
    view, inner = algorithm.view, unchecked(algorithm)
    one_pass = getattr(optimizer, "under_masks", None)  # only an `sf.optimizers.Optimizer` has one
    owners, prime = foreign.finder(optimizer), foreign.primer(optimizer)
    tidies, lends = mask_moments or reset_grown, spends(algorithm)
    kept = partial(live_leaves, mask_moments=mask_moments, reset_grown=reset_grown)

    def start(trained: Tree) -> Tree:
        return foreign.unshared(optimizer, optimizer.init(trained), trained)

    @begun
    def init(params: Tree) -> State:
        state = algorithm.init(params)
        if state.opt != ():
            raise ValueError("with_optimizer: the algorithm has an optimizer already")
        trained = view.get(state)
        state = state._replace(opt=start(trained))
        sparse = sparse_among(leaves_of(view.support(state)), leaves_of(trained))
        if tidies and any(sparse):
            owners(state.opt, trained, sparse)
        prime(trained, optimizer.init(trained))
        return state

    def descend(state: State, grads: Tree, step: Step) -> tuple[State, Tree]:
        # The stepped state, and an optimizer's state whose moments are right wherever `tidy` keeps them.
        if grads is None:
            raise ValueError("with_optimizer: the optimizer reads gradients, got grads=None")
        trained = view.get(state)
        prime(trained, state.opt)
        plain = view.put is masked_view.put
        entrywise = one_pass if plain and view.grads is masked_view.grads else None
        done = None if entrywise is None else entrywise(grads, state.opt, trained, support_of(state))
        if done is not None:
            return state._replace(params=done[0], opt=done[1]), done[1]
        # No name here refers to the masked gradient: its memory is free for the new weights.
        updates, opt = optimizer.update(view.grads(state, grads, step), state.opt, params=trained, inplace=False)
        if entrywise is not None and fused():
            # On the masks the whole gradient has the same step: roots and quotients need not wait for the mask.
            moving, whole = optimizer.update(grads, state.opt, params=trained, inplace=False)
            if fused(*leaves_of((moving, whole))):
                return moved(state, moving)._replace(opt=opt), whole if mask_moments and reset_grown else opt
        check_like(f"the updates of {foreign.name_of(optimizer)}", updates, trained, dtype=False)
        if not same_structure(opt, state.opt):
            name = f"the new state of {foreign.name_of(optimizer)}"
            raise ValueError(f"with_optimizer: {structure_error(name, opt, state.opt, 'the old one')}")
        opt = foreign.unshared(optimizer, opt, grads, trained)
        if plain:
            return moved(state, updates)._replace(opt=opt), opt
        new = optree.tree_map(lambda p, u: (p + u).to(p.dtype), trained, updates)
        return view.put(state, new)._replace(opt=opt), opt

    def tidy(state: State, before: State, grads: Tree, opt: Tree) -> State:
        if not tidies:
            return state
        trained = view.get(state)
        rows, _ = zipped(view.support(state), view.support(before), trained, view.get(before))
        sparse = sparse_among([row[0] for row in rows], [row[2] for row in rows])
        if not any(sparse):
            return state
        leaves, rebuild = opened(opt)
        owned: dict[int, list[int]] = {}  # the places of its moments, by leaf
        for place, owner in enumerate(owners(state.opt, trained, sparse)):
            if owner >= 0 and sparse[owner]:
                owned.setdefault(owner, []).append(place)
        owning, places = [rows[owner] for owner in owned], list(owned.values())
        if saves():
            offer([leaves[i] for own in places for i in own], leaves_of((grads, state._replace(opt=()))))
        for some in together.parts([row[0] for row in owning], [row[0].numel() for row in owning]):
            lives = zip(kept([owning[i] for i in some]), [places[i] for i in some], strict=True)
            masks = {i: live for live, own in lives if live is not None for i in own}
            cleaned = leafwise.cleaned(list(masks.values()), [leaves[i] for i in masks])
            for i, leaf in zip(masks, cleaned, strict=True):
                leaves[i] = leaf
        return state._replace(opt=rebuild(leaves))

    @reading_bytes
    def advance(state: State, grads: Tree, step: Step) -> State:
        skipped = skip(step)
        goes = ~skipped if isinstance(skipped, Tensor) else not skipped

        def stepping(now: tuple[State, Tree]) -> tuple[State, Tree]:
            new, opt = descend(now[0], grads, step)
            return new, opt if fused() else ()

        stepped, opt = choose(goes, stepping, (state, state.opt if fused() else ()))
        if lends and saves():
            offer(leaves_of(stepped.params), leaves_of((grads, stepped._replace(params=()))))
        state = inner(stepped, grads, step)._replace(opt=stepped.opt)
        state = tidy(state, stepped, grads, opt if fused() else stepped.opt)
        return choose(reset(step), lambda now: now._replace(opt=start(view.get(now))), state)  # type: ignore[no-any-return]

    @checked
    def update(state: State, grads: Tree, step: Step) -> State:
        if not skip_nonfinite or grads is None:
            return advance(state, grads, step)
        finite = all_finite(grads)
        if finite.device.type != "cpu":  # reading its value would wait for the device
            return where_leaves(finite, advance(state, grads, step), state)  # type: ignore[no-any-return]
        return choose(finite, lambda now: advance(now, grads, step), state)  # type: ignore[no-any-return]

    return algorithm._replace(init=init, update=update, within=None)
