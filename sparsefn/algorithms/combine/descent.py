"""An optimizer inside an algorithm: its step on the trained tree, and the moments that
are kept once masks are new.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.leaves import (
    Emptied,
    donate,
    donating,
    leafwise,
    lists,
    saves_memory,
    sparse_among,
)
from sparsefn._engine.torch_limits import from_bytes
from sparsefn._engine.transforms import is_compiled_without_grad, unwrapped
from sparsefn.algorithms.combine import foreign
from sparsefn.core.state import (
    State,
    Step,
    TrainView,
    Trigger,
    masked_view,
    moved,
    support_of,
)
from sparsefn.core.tree import (
    Tree,
    check_like,
    choose,
    leaves_of,
    opened,
    same_structure,
    structure_error,
    zipped,
)
from sparsefn.optim.base import Optimizer, UnderMasks

Stepping = Callable[[State, Tree, Step], State]
# the support, the support before, the weight, and the stepped weight
Row: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def _trained(view: TrainView, state: State) -> Tree:
    return state.params if view.get is masked_view.get else view.get(state)


# ---- the step ------------------------------------------------------------------------


class Stepped(NamedTuple):
    """The state after the optimizer's step.

    In compiled code `whole` is the optimizer's state with moments that are right on the
    support, and that need not wait for the mask. `zero_off` is a support off which all
    moments are +0.0; None where there is none.
    """

    state: State
    whole: Tree = None
    zero_off: Tree = None


class Descent:
    """An optimizer for the tree of a view: see `with_optimizer`."""

    def __init__(
        self, optimizer: foreign.ForeignOptimizer, view: TrainView, clear: bool
    ) -> None:
        self.optimizer = optimizer
        self.view = view
        self.clear = clear  # nobody reads moments off the support
        self._name = foreign.name_of(optimizer)
        self._primed = False
        own = view.put is masked_view.put and view.grads is masked_view.grads
        self._under_masks = (
            optimizer.under_masks if own and isinstance(optimizer, Optimizer) else None
        )

    def restarted(self, state: State) -> State:
        """The state with the optimizer's first state."""
        trained = _trained(self.view, state)
        opt = self.optimizer.init(trained)
        return state._replace(opt=_unshared(self.optimizer, opt, trained))

    def prime(self, state: State) -> None:
        """Spend the first update of TorchOpt's sgd, which treats it differently from
        later ones: so a run that is resumed in a new process equals an uninterrupted
        one.
        """
        if self._primed or is_compiling():
            return
        trained = _trained(self.view, state)
        zeros = optree.tree_map(torch.zeros_like, trained)
        # a state that is given away is given to the step, not to this
        with donating(()):
            self.optimizer.update(zeros, state.opt, params=trained, inplace=False)
        self._primed = True

    def stepped(
        self, state: State, grads: Tree, step: Step, skip: Trigger | None
    ) -> Stepped:
        """The state after a step, unless it is skipped."""
        if skip is None:
            return self._step(state, grads, step)
        skips = skip(step)
        return choose(  # type: ignore[no-any-return]
            ~skips if isinstance(skips, Tensor) else not skips,
            lambda now: Stepped(*self._step(now.state, grads, step)[:2]),
            Stepped(state, state.opt if is_compiling() else None),
        )

    def _step(self, state: State, grads: Tree, step: Step) -> Stepped:
        if grads is None:
            raise ValueError(
                "with_optimizer: the optimizer reads gradients, got grads=None"
            )
        optimizer = self.optimizer
        view = self.view
        trained = _trained(view, state)
        self.prime(state)
        if self._under_masks is not None:
            return self._step_under_masks(self._under_masks, state, grads, trained)
        # No name here refers to the masked gradient: its memory is free for the new
        # weights.
        updates, opt = optimizer.update(
            view.grads(state, grads, step), state.opt, params=trained, inplace=False
        )
        check_like(f"the updates of {self._name}", updates, trained, dtype=False)
        if not same_structure(opt, state.opt):
            fault = structure_error(
                f"the new state of {self._name}", opt, state.opt, "the old one"
            )
            raise ValueError(f"with_optimizer: {fault}")
        opt = _unshared(optimizer, opt, grads, trained)
        if view.put is masked_view.put:
            new = moved(state, updates)
        else:
            new = view.put(
                state,
                optree.tree_map(lambda p, u: (p + u).to(p.dtype), trained, updates),
            )
        return Stepped(new._replace(opt=opt), opt if is_compiling() else None)

    def _step_under_masks(
        self, under_masks: UnderMasks, state: State, grads: Tree, trained: Tree
    ) -> Stepped:
        support = support_of(state)
        params, opt = under_masks(grads, state.opt, trained, support, self.clear)
        new = state._replace(params=params, opt=opt)
        if not is_compiling():
            return Stepped(new, zero_off=support if self.clear else None)
        # On the masks the whole gradient has the same step: roots and quotients need
        # not wait for the mask.
        moving, whole = self.optimizer.update(
            grads, state.opt, params=trained, inplace=False
        )
        if is_compiled_without_grad(*leaves_of((moving, whole))):
            new = moved(state, moving)._replace(opt=opt)
            return Stepped(new, whole if self.clear else opt)
        return Stepped(new, opt)


def _unshared(optimizer: object, opt: Tree, *given: Tree) -> Tree:
    # The optimizer's state, with copies of tensors that share memory with the
    # optimizer's inputs.
    leaves, rebuild = opened(opt)
    for i, leaf in enumerate(leaves):
        if type(leaf) is not Tensor and not isinstance(leaf, Tensor):
            raise TypeError(foreign.no_tensor(optimizer, opt, i))
    taken = {None, *map(_memory, leaves_of(given))}
    for i, leaf in enumerate(leaves):
        if _memory(leaf) in taken:
            leaves[i] = leaf.clone()
    return rebuild(leaves)


def _memory(leaf: Tensor) -> int | None:
    # None where a transform or the compiler hides it.
    if is_compiling():
        return None
    try:
        return int(unwrapped(leaf).untyped_storage()._cdata)
    except RuntimeError:
        return None


# ---- moments -------------------------------------------------------------------------


class Moments:
    """The moments in the state of an optimizer for the tree of a view: see
    `with_optimizer`.
    """

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
        self._start_at_zero = (
            isinstance(optimizer, Optimizer) and optimizer.under_masks is not None
        )
        self._found: dict[object, dict[int, list[int]]] = {}

    def check(self, state: State) -> None:
        """Raise ValueError for a state whose moments cannot be found."""
        trained = _trained(self.view, state)
        weights = leaves_of(trained)
        sparse = sparse_among(leaves_of(self.view.support(state)), weights)
        if (self.mask_moments or self.reset_grown) and any(sparse):
            self._owned(state.opt, leaves_of(state.opt), trained, weights, sparse)

    def cleared(self, state: State, after: Stepped, grads: Tree) -> State:
        """The state with moments on its support alone, which start again where a weight
        has been set since the step.
        """
        if not (self.mask_moments or self.reset_grown):
            return state
        stepped, whole, zero_off = after
        opt = stepped.opt if whole is None else whole
        view = self.view
        support = view.support(state)
        trained = _trained(view, state)
        before = _trained(view, stepped)
        if support is zero_off and trained is before:
            return state._replace(opt=opt)
        rows, _ = zipped(support, view.support(stepped), trained, before)
        weights = [row[2] for row in rows]
        sparse = sparse_among([row[0] for row in rows], weights)
        if not any(sparse):
            return state
        leaves, rebuild = opened(opt)
        owned = self._owned(opt, leaves, trained, weights, sparse)
        owning = [rows[owner] for owner in owned]
        places = list(owned.values())
        first = self._first_values(trained, owning)
        parts = [list(range(len(owning)))]
        if saves_memory():
            donate(
                [leaves[i] for own in places for i in own],
                leaves_of((grads, state._replace(opt=()))),
            )
            supports = [row[0] for row in owning]
            parts = lists.places_in_parts(supports, [x.numel() for x in supports])
        for part in parts:
            kept = live_leaves(
                [owning[i] for i in part],
                mask_moments=self.mask_moments,
                reset_grown=self.reset_grown,
            )
            masks: dict[int, Tensor] = {}
            for place, live in zip(part, kept, strict=True):
                if live is None:
                    continue
                for i in places[place]:
                    masks[i] = live
            cleaned = leafwise.cleaned(list(masks.values()), [leaves[i] for i in masks])
            for i, leaf in zip(masks, cleaned, strict=True):
                leaves[i] = leaf
            if first is None:
                continue
            for place in part:
                for i in places[place]:
                    if i in masks:
                        starts = owning[place][0] & ~masks[i]
                        leaves[i] = torch.where(starts, first[i], leaves[i])
        return state._replace(opt=rebuild(leaves))

    def _owned(
        self,
        opt: Tree,
        leaves: Sequence[Tensor],
        trained: Tree,
        weights: Sequence[Tensor],
        sparse: Sequence[bool],
    ) -> dict[int, list[int]]:
        # The places of the moments of each sparse leaf. The optimizer is asked once for
        # each structure with its shapes and dtypes.
        if is_compiling():
            owned = self._find(opt, trained, sparse)
        else:
            both: Tree = (trained, opt)
            kinds = [(x.shape, x.dtype) for x in weights]
            key = (optree.tree_structure(both), *kinds, *sparse)
            if key not in self._found:
                self._found[key] = self._find(opt, trained, sparse)
            owned = self._found[key]
        for owner, places in owned.items():
            for i in places:
                if leaves[i].shape != weights[owner].shape:
                    raise self._refused()
        return owned

    def _find(
        self, opt: Tree, trained: Tree, sparse: Sequence[bool]
    ) -> dict[int, list[int]]:
        found = foreign.find(self.optimizer, trained, sparse)
        if not same_structure(found.like, opt):
            raise self._refused()
        owned: dict[int, list[int]] = {}
        for place, owner in enumerate(found.owners):
            if owner >= 0:
                owned.setdefault(owner, []).append(place)
        return owned

    def _refused(self) -> ValueError:
        return ValueError(
            "with_optimizer: cannot find the moments of "
            f"{foreign.name_of(self.optimizer)}: its state takes another form for "
            f"leaves of other sizes; {foreign.WAY_OUT}"
        )

    def _first_values(self, trained: Tree, rows: Sequence[Row]) -> list[Tensor] | None:
        # The leaves of the optimizer's first state, if moments of some rows start; None
        # if they start at zero.
        if not self.reset_grown or self._start_at_zero:
            return None
        starts = any(row[0] is not row[1] or _is_moved(row[2], row[3]) for row in rows)
        return leaves_of(self.optimizer.init(trained)) if starts else None


def live_leaves(
    rows: Sequence[Row], *, mask_moments: bool = True, reset_grown: bool = True
) -> list[Tensor | None]:
    """The entries at which the moments of each leaf are kept; None for all.

    >>> before, after = (
    ...     torch.tensor([True, True, False]),
    ...     torch.tensor([True, False, True]),
    ... )
    >>> weight = torch.tensor([1.0, 0.0, 0.0])
    >>> live_leaves([(after, before, weight, weight)])
    [tensor([ True, False, False])]

    A row is the support and the weight after the update, and both as they were between
    optimizer and update: (support, before, weight, stepped). Moments are kept on the
    support (`mask_moments`), but not where it has just turned on or where the update
    itself set the weight (`reset_grown`).
    """
    made: list[Tensor | None] = [None] * len(rows)
    kinds: list[tuple[bool, bool]] = [(False, False)] * len(rows)
    for i, (support, before, weight, stepped) in enumerate(rows):
        if reset_grown and (before is not support or weight is not stepped):
            kinds[i] = before is not support, _is_moved(weight, stepped)
    for changed, is_set in dict.fromkeys(kinds):
        alike = [i for i, kind in enumerate(kinds) if kind == (changed, is_set)]
        columns = list(zip(*[rows[i] for i in alike], strict=True))
        live: Sequence[Tensor | None] = [None] * len(alike)
        if changed or is_set:
            used = columns[: 2 if changed else 1]
            used += columns[2:] if is_set else []
            run = functools.partial(_live, mask_moments, changed, is_set)
            live = lists.foreach(run, *used, formula=mask_moments and not is_set)
        elif mask_moments:
            live = columns[0]
        for i, x in zip(alike, live, strict=True):
            made[i] = x
    return made


def _is_moved(weight: Tensor, stepped: Tensor) -> bool:
    # A stepped leaf that gave its memory to the new leaf had the same values on the
    # support.
    return weight is not stepped and not isinstance(stepped, Emptied)


def _live(
    masked: bool, changed: bool, is_set: bool, support: Tensor, *others: Tensor
) -> Tensor:
    # `others`: the support before if it has changed, and the weight and the stepped
    # weight if the weight has been set.
    parts = [support] if masked else []
    if changed:
        parts.append(others[0] if masked else others[0] | ~support)
    if is_set:
        weight, stepped = others[-2:]
        # Weights that the update itself set start with zero moments, such as weights
        # pruned and regrown.
        same = (weight == stepped) | (weight.isnan() & stepped.isnan())
        parts.append(same if masked else same | ~support)
    return functools.reduce(operator.and_, parts)


# ---- compiled code -------------------------------------------------------------------


def compiled_well(update: Stepping) -> Stepping:
    """The update; compiled, it reads the bytes of masks and support, and returns the
    given masks where the update does not change them.
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
