"""An optimizer inside an algorithm: its step on the trained tree, and the moments that
are kept once masks are new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn.compose import foreign
from sparsefn.engine.leaves import (
    Emptied,
    donate,
    donating,
    leafwise,
    lists,
    saves,
    sparse_among,
)
from sparsefn.engine.surroundings import from_bytes, fused, unwrapped
from sparsefn.optimizers.base import Optimizer
from sparsefn.state import State, Step, TrainView, masked_view, moved, support_of
from sparsefn.tree import (
    Tree,
    check_like,
    choose,
    leaves_of,
    opened,
    same_structure,
    structure_error,
    zipped,
)

Stepping = Callable[[State, Tree, Step], State]
# the support, the one before, the weight, and the stepped one
Row: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


class Stepped(NamedTuple):
    """The state after the optimizer's step; `moments` are right wherever they are kept,
    () for those of the state.
    """

    state: State
    moments: Tree


class Descent:
    """An optimizer for the tree of a view, and its moments: see `with_optimizer`."""

    def __init__(
        self,
        optimizer: foreign.ForeignOptimizer,
        view: TrainView,
        mask_moments: bool,
        reset_grown: bool,
    ) -> None:
        self.optimizer = optimizer
        self.view = view
        self.mask_moments = mask_moments
        self.reset_grown = reset_grown
        self._starts_at_zero = (
            isinstance(optimizer, Optimizer) and optimizer.under_masks is not None
        )
        self._primed = False
        self._known: dict[object, foreign.MomentPlaces] = {}
        own = view.put is masked_view.put and view.grads is masked_view.grads
        self.under_masks = (
            optimizer.under_masks if own and isinstance(optimizer, Optimizer) else None
        )

    def _trained(self, state: State) -> Tree:
        return (
            state.params if self.view.get is masked_view.get else self.view.get(state)
        )

    def _prime(self, trained: Tree, opt: Tree) -> None:
        # TorchOpt's sgd treats the first call of its update differently from later
        # ones. With that call spent, a run that is resumed in a new process equals an
        # uninterrupted one.
        if not self._primed and not is_compiling():
            # a state that is given away is given to the step, not to this
            with donating(()):
                self.optimizer.update(
                    optree.tree_map(torch.zeros_like, trained),
                    opt,
                    params=trained,
                    inplace=False,
                )
            self._primed = True

    def _owners(self, opt: Tree, trained: Tree, sparse: Sequence[bool]) -> list[int]:
        # Of each leaf of the optimizer's state, which is asked once for each structure
        # with its shapes and dtypes.
        leaves = leaves_of(trained)
        if is_compiling():
            return foreign.owners_in(
                opt,
                foreign.find(self.optimizer, trained, sparse),
                self.optimizer,
                leaves,
            )
        key = (
            optree.tree_structure(trained),
            *((x.shape, x.dtype, one) for x, one in zip(leaves, sparse, strict=True)),
        )
        if key not in self._known:
            self._known[key] = foreign.find(self.optimizer, trained, sparse)
        return foreign.owners_in(opt, self._known[key], self.optimizer, leaves)

    def begun(self, state: State) -> State:
        """The state with the optimizer's first state, whose moments are found."""
        trained = self._trained(state)
        state = self.restarted(state)
        sparse = sparse_among(leaves_of(self.view.support(state)), leaves_of(trained))
        if (self.mask_moments or self.reset_grown) and any(sparse):
            self._owners(state.opt, trained, sparse)
        self._prime(trained, self.optimizer.init(trained))
        return state

    def restarted(self, state: State) -> State:
        """The state with the optimizer's first state."""
        trained = self._trained(state)
        return state._replace(
            opt=_unshared(self.optimizer, self.optimizer.init(trained), trained)
        )

    def stepped(
        self, state: State, grads: Tree, step: Step, skipped: bool | Tensor
    ) -> Stepped:
        """The state after a step that is not skipped."""
        goes = ~skipped if isinstance(skipped, Tensor) else not skipped
        compiled = fused()

        def run(now: Stepped) -> Stepped:
            new, moments = self._step(now.state, grads, step)
            return Stepped(new, moments if compiled else ())

        return choose(goes, run, Stepped(state, state.opt if compiled else ()))  # type: ignore[no-any-return]

    def _step(self, state: State, grads: Tree, step: Step) -> tuple[State, Tree]:
        if grads is None:
            raise ValueError(
                "with_optimizer: the optimizer reads gradients, got grads=None"
            )
        optimizer = self.optimizer
        view = self.view
        trained = self._trained(state)
        self._prime(trained, state.opt)
        done = (
            None
            if self.under_masks is None
            else self.under_masks(grads, state.opt, trained, support_of(state))
        )
        if done is not None:
            return state._replace(params=done[0], opt=done[1]), done[1]
        # No name here refers to the masked gradient: its memory is free for the new
        # weights.
        updates, opt = optimizer.update(
            view.grads(state, grads, step), state.opt, params=trained, inplace=False
        )
        if self.under_masks is not None and fused():
            # On the masks the whole gradient has the same step: roots and quotients
            # need not wait for the mask.
            moving, whole = optimizer.update(
                grads, state.opt, params=trained, inplace=False
            )
            if fused(*leaves_of((moving, whole))):
                return moved(state, moving)._replace(
                    opt=opt
                ), whole if self.mask_moments and self.reset_grown else opt
        check_like(
            f"the updates of {foreign.name_of(optimizer)}",
            updates,
            trained,
            dtype=False,
        )
        if not same_structure(opt, state.opt):
            name = f"the new state of {foreign.name_of(optimizer)}"
            raise ValueError(
                "with_optimizer: "
                f"{structure_error(name, opt, state.opt, 'the old one')}"
            )
        opt = _unshared(optimizer, opt, grads, trained)
        if view.put is masked_view.put:
            return moved(state, updates)._replace(opt=opt), opt
        new = optree.tree_map(lambda p, u: (p + u).to(p.dtype), trained, updates)
        return view.put(state, new)._replace(opt=opt), opt

    def tidied(self, state: State, stepped: Stepped, grads: Tree) -> State:
        """The state with moments on its support alone, which start again where a weight
        has been set since the step.
        """
        if not (self.mask_moments or self.reset_grown):
            return state
        view = self.view
        before = stepped.state
        opt = (
            before.opt
            if isinstance(stepped.moments, tuple) and not stepped.moments
            else stepped.moments
        )
        trained = self._trained(state)
        rows, _ = zipped(
            view.support(state), view.support(before), trained, self._trained(before)
        )
        sparse = sparse_among([row[0] for row in rows], [row[2] for row in rows])
        if not any(sparse):
            return state
        leaves, rebuild = opened(opt)
        owned: dict[int, list[int]] = {}  # the places of its moments, by leaf
        for place, owner in enumerate(self._owners(state.opt, trained, sparse)):
            if owner >= 0 and sparse[owner]:
                owned.setdefault(owner, []).append(place)
        owning = [rows[owner] for owner in owned]
        places = list(owned.values())
        first = self._first_values(trained, owning)
        if saves():
            donate(
                [leaves[i] for own in places for i in own],
                leaves_of((grads, state._replace(opt=()))),
            )
        for some in lists.places_in_parts(
            [row[0] for row in owning], [row[0].numel() for row in owning]
        ):
            kept = live_leaves(
                [owning[i] for i in some],
                mask_moments=self.mask_moments,
                reset_grown=self.reset_grown,
            )
            lives = zip(kept, [places[i] for i in some], strict=True)
            masks = {i: live for live, own in lives if live is not None for i in own}
            cleaned = leafwise.cleaned(list(masks.values()), [leaves[i] for i in masks])
            for i, leaf in zip(masks, cleaned, strict=True):
                leaves[i] = leaf
            for place, live in zip(some, kept, strict=True):
                if first is not None and live is not None:
                    support = owning[place][0]
                    for i in places[place]:
                        leaves[i] = torch.where(support & ~live, first[i], leaves[i])
        return state._replace(opt=rebuild(leaves))

    def _first_values(self, trained: Tree, rows: Sequence[Row]) -> list[Tensor] | None:
        """The leaves of the optimizer's first state, if moments of some rows start;
        None if they start at zero.
        """
        starts = any(row[0] is not row[1] or _is_moved(row[2], row[3]) for row in rows)
        if not (self.reset_grown and starts) or self._starts_at_zero:
            return None
        return leaves_of(self.optimizer.init(trained))


def _unshared(optimizer: object, opt: Tree, *given: Tree) -> Tree:
    # The optimizer's state, with copies of tensors that share memory with the
    # optimizer's inputs.
    taken = {_memory(leaf) for tree in given for leaf in leaves_of(tree)}
    leaves, rebuild = opened(opt)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(foreign.no_tensor(optimizer, opt, i))
        memory = _memory(leaf)
        if memory is None or memory in taken:
            leaves[i] = leaf.clone()
    return rebuild(leaves)


def _memory(leaf: Tensor) -> int | None:
    # None where a transform hides it.
    if is_compiling():
        return None
    try:
        return int(unwrapped(leaf).untyped_storage()._cdata)
    except RuntimeError:
        return None


# ---- moments -------------------------------------------------------------------------


def live_entries(
    support: Tensor,
    before: Tensor,
    weight: Tensor,
    stepped: Tensor,
    *,
    mask_moments: bool = True,
    reset_grown: bool = True,
) -> Tensor | None:
    """The entries of a leaf at which moments are kept; None for all.

    >>> before, after = (
    ...     torch.tensor([True, True, False]),
    ...     torch.tensor([True, False, True]),
    ... )
    >>> weight = torch.tensor([1.0, 0.0, 0.0])
    >>> live_entries(after, before, weight, weight)
    tensor([ True, False, False])

    `support` and `weight` are read after the update, `before` and `stepped` between
    optimizer and update. Moments are kept on the support (`mask_moments`), but not
    where it has just turned on or where the update itself set the weight
    (`reset_grown`).
    """
    changed = reset_grown and before is not support
    is_set = reset_grown and _is_moved(weight, stepped)
    if not (mask_moments or changed or is_set):
        return None
    others = [before] if changed else []
    if is_set:
        others += [weight, stepped]
    return _live(mask_moments, changed, is_set, support, *others)


def live_leaves(
    rows: Sequence[Row], *, mask_moments: bool = True, reset_grown: bool = True
) -> list[Tensor | None]:
    """`live_entries` of each row of (support, before, weight, stepped).

    >>> x, mask = torch.zeros(2), torch.tensor([True, False])
    >>> live_leaves([(mask, mask, x, x)])
    [tensor([ True, False])]
    """
    if len(rows) < 2 or not lists.pays([x for row in rows for x in row]):
        return [
            live_entries(*row, mask_moments=mask_moments, reset_grown=reset_grown)
            for row in rows
        ]
    made: dict[int, Tensor] = {}
    kinds = [
        (
            reset_grown and row[1] is not row[0],
            reset_grown and _is_moved(row[2], row[3]),
        )
        for row in rows
    ]
    for changed, is_set in dict.fromkeys(kinds):
        if mask_moments or changed or is_set:
            alike = [i for i, kind in enumerate(kinds) if kind == (changed, is_set)]
            used = [
                rows[i][:1] + rows[i][1:2] * changed + rows[i][2:] * is_set
                for i in alike
            ]
            run = functools.partial(_live, mask_moments, changed, is_set)
            formula = mask_moments and not is_set
            live = (
                lists.laid(run, used, formula)
                if changed or is_set
                else [support for (support,) in used]
            )
            made |= zip(alike, live, strict=True)
    return [made.get(i) for i in range(len(rows))]


def _is_moved(weight: Tensor, stepped: Tensor) -> bool:
    # A stepped leaf that gave its memory to the new one had the same values on the
    # support.
    return weight is not stepped and not isinstance(stepped, Emptied)


def _live(
    masked: bool, changed: bool, is_set: bool, support: Tensor, *others: Tensor
) -> Tensor:
    # The others: the support before if it has changed, and the weight and the stepped
    # one if it has been set.
    parts = [support] if masked else []
    if changed:
        parts.append(others[0] if masked else others[0] | ~support)
    if is_set:
        weight, stepped = others[-2:]
        # Weights that the update itself set start with zero moments, such as weights
        # pruned and regrown.
        same = (weight == stepped) | (weight.isnan() & stepped.isnan())
        parts.append(same if masked else same | ~support)
    return functools.reduce(lists.both, parts)


# ---- compiled code -------------------------------------------------------------------


def compiled_well(update: Stepping) -> Stepping:
    """The update; compiled, it reads the bytes of masks and support, and returns masks
    that it leaves as given.
    """

    def reading(state: State, grads: Tree, step: Step) -> State:
        if not is_compiling():
            return update(state, grads, step)
        old, rebuild = opened((state.masks, state.support))
        seen = from_bytes(old)
        masks, support = rebuild(seen)
        new = update(state._replace(masks=masks, support=support), grads, step)
        leaves, rebuild = opened((new.masks, new.support))
        masks, support = rebuild(
            [x if y is z else y for x, y, z in zip(old, leaves, seen, strict=True)]
        )
        return new._replace(masks=masks, support=support)

    return reading
