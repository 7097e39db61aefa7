"""The frame of every algorithm: what is checked, agreed, remembered and planted around
what a method decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import optree
import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.draws import lifted
from sparsefn._engine.leaves import brought, sparse_among, zeroed
from sparsefn._engine.processes import any_sharded, check_bare, check_shards
from sparsefn._engine.torch_limits import with_own_code
from sparsefn._engine.transforms import transformed
from sparsefn.algorithms.competition import Competition, Goal
from sparsefn.algorithms.memory import Memory, Pruned, Read, Reader
from sparsefn.algorithms.processes import (
    InitFunction,
    Stepping,
    change_together,
    init_together,
    laid_like_params,
    update_together,
)
from sparsefn.algorithms.start import Init, start_masks
from sparsefn.algorithms.unit_table import UnitTable, both_of, unit_table
from sparsefn.core import random
from sparsefn.core.checks import check_step, check_trigger
from sparsefn.core.state import (
    Accumulated,
    Algorithm,
    State,
    Step,
    TrainView,
    Trigger,
    UncheckedUpdate,
    Where,
    apply_masks,
    check_score,
    everywhere,
    inside,
    masked_view,
    masks_tree,
)
from sparsefn.core.tree import (
    Leaves,
    Tree,
    check_grads,
    check_like,
    choose,
    copied,
    fix_sizes,
    flatten,
    leaves_of,
    mend_of,
    warn_without_names,
    with_leaves,
)
from sparsefn.core.tree.where import float_leaves
from sparsefn.masks.patterns.layouts import UnitLayouts
from sparsefn.masks.scores.unit_values import scored_units

# ---- updates -------------------------------------------------------------------------


def framed(
    init: InitFunction,
    update: Stepping | UncheckedUpdate,
    view: TrainView = masked_view,
    within: Callable[[Tree], Algorithm] | None = None,
    settled: Callable[[State], State] | None = None,
) -> Algorithm:
    """An algorithm that checks what it gets, and fails on all processes together."""
    if isinstance(update, UncheckedUpdate):
        unchecked = update
    else:
        unchecked = UncheckedUpdate(update)
    inner = unchecked.inner
    outermost = unchecked.around or inner

    def checked(state: State, grads: Tree, step: Step) -> State:
        if (
            isinstance(state, State)
            and not is_compiling()
            and any_sharded(leaves_of(state.params))
        ):
            return update_together(inner, state, grads, step)
        return outermost(state, *check_update(state, grads, step))

    return Algorithm(
        init_together(init), with_own_code(checked), view, within, settled, unchecked
    )


def check_update(state: State, grads: Tree, step: Step) -> tuple[Tree, Step]:
    """Checks at the start of every update, on structure alone; returns the step, and
    grads laid out as params.
    """
    if not isinstance(state, State):
        raise TypeError(
            "expected state to be a State from init, got "
            f"{type(state).__name__}{mend_of('state', state)}"
        )
    if transformed():
        for path, leaf in flatten(state.params)[0].items():
            check_bare(path, leaf)
    # else `update_together` checks
    sharded = is_compiling() and any_sharded(leaves_of(state.params))
    check_grads(grads, state.params, layout=not sharded)
    if sharded:
        grads = laid_like_params(grads, state.params)
    if is_compiling():
        fix_sizes((state, grads))
    return grads, check_step(step)


def fired(
    when: Trigger, change: Callable[[State], State], state: State, step: Step
) -> State:
    """The changed state where the trigger fires.

    Processes that share the state fail together.
    """

    def changed(now: State) -> State:
        return (
            change_together(change, now, step)
            if any_sharded(leaves_of(now.params))
            else change(now)
        )

    return choose(when(step), changed, state)  # type: ignore[no-any-return]


# ---- states --------------------------------------------------------------------------


def own_params(params: Tree) -> Tree:
    """Copies of params, checked."""
    warn_without_names(params)
    for path, leaf in float_leaves(params).items():
        check_shards(path, leaf)
    return copied(params)


def own_key(key: Tensor, params: Tree) -> Tensor:
    """A copy of a PRNG key for a state, which a transform may hold.

    It is on the device of all params; where they lie on several, it stays where it is.

    >>> own_key(random.key(0), {"w": torch.ones(2, device="meta")}).device
    device(type='meta')
    """
    devices = [leaf.device for leaf in leaves_of(params)]
    own = lifted(key)
    if devices and all(device == devices[0] for device in devices):
        own = brought(own, devices[0])
    return own.clone()


def check_pruned(pruned: str) -> None:
    """Raise for a value of `pruned` that does not exist."""
    if pruned not in ("zero", "keep", "train"):
        raise ValueError(
            f"expected pruned to be 'zero', 'keep' or 'train', got {pruned!r}"
        )


def sparse_leaves(state: State) -> tuple[Leaves, Leaves]:
    """Params and masks of the sparsified leaves, by path."""
    params = flatten(state.params)[0]
    masks = leaves_of(state.masks)
    rows = zip(
        sparse_among(masks, list(params.values())), params.items(), masks, strict=True
    )
    chosen = [(path, leaf, mask) for sparse, (path, leaf), mask in rows if sparse]
    return {path: leaf for path, leaf, _ in chosen}, {
        path: mask for path, _, mask in chosen
    }


def allowed_within(allowed: Leaves | None, masks: Tree) -> Leaves:
    """What both an earlier restriction and these masks allow.

    >>> allowed_within(
    ...     None, {"w": torch.tensor([True, False]), "b": torch.tensor(True)}
    ... )
    {'w': tensor([ True, False])}
    """
    new = {path: mask for path, mask in flatten(masks)[0].items() if mask.ndim}
    return (
        new
        if allowed is None
        else new | {p: m & new[p] if p in new else m for p, m in allowed.items()}
    )


def with_masks(state: State, masks: Leaves, pruned: Pruned) -> State:
    """The state with other masks of some leaves; weights off them are zeroed unless
    they are kept or trained.
    """
    tree = with_leaves(state.masks, masks)
    return state._replace(
        params=inside(tree, state.params) if pruned == "zero" else state.params,
        masks=tree,
    )


# ---- algorithms that start from masks ------------------------------------------------


class Decision(NamedTuple):
    """What a method decides about some leaves: their new masks, and where weights stay.

    A weight of `masks` that is not in `stay` starts again, as a grown weight does.
    None: all weights that were kept and are kept now stay.
    """

    masks: Leaves
    stay: Leaves | None = None


# (units, scores by role) -> what changes
Method = Callable[[UnitTable, Read], Decision]
# (state, newly grown masks, step) -> values of the grown weights
Grown = Callable[[State, Tree, Step], Tree]


def zeros(state: State, grown: Tree, step: Step) -> Tree:
    """Grown weights start at zero.

    >>> zeros(sf.State({"w": torch.ones(2)}, ()), (), 0)
    {'w': tensor([0., 0.])}
    """
    del grown, step
    return optree.tree_map(torch.zeros_like, state.params)


class MaskRecipe(NamedTuple):
    """Arguments of a mask-based algorithm; `testing` and `attach` read them.

    `build` makes the algorithm, which makes masks in `init`, remembers at every step
    and changes masks where `when` fires. Grown weights start at `grown`; None keeps
    their values.

    leafwise: Leaves may be processed one by one.
    exact: Kept counts equal the target; only `testing.passive` reads it.
    """

    rule: Competition
    memory: Memory
    method: Method
    goal: Goal
    init: Init
    where: Where
    key: Tensor | None
    when: Trigger
    grown: Grown | None = None
    leafwise: bool = True
    exact: bool = True

    def build(self, allowed: Leaves | None = None) -> Algorithm:
        """The algorithm, choosing among what is allowed."""
        check_pruned(self.memory.pruned)
        for name, score in self.memory.scores.items():
            check_score(name, score)
            of = scored_units(score)
            if of is not None and not of.pattern.has_units_of(self.rule.pattern):
                raise ValueError(
                    f"{name}: expected the algorithm and its score to have one "
                    f"pattern, but the score has values of the units of {of.pattern}, "
                    f"and the algorithm prunes units of {self.rule.pattern}"
                )
        check_trigger("when", self.when)
        rule = self.rule
        memory = self.memory
        seed = random.key(0) if self.key is None else self.key
        remembers = any(
            isinstance(score, Accumulated) for score in memory.scores.values()
        )
        # made once: a step that changes nothing does no tensor work
        own = self._replace(key=seed)
        layouts = UnitLayouts(rule.pattern)

        def start(params: Tree) -> State:
            params = own_params(params)
            masks = start_masks(
                params, rule, self.where, self.init, self.goal, seed, allowed
            )
            memory.check_rows(rule.pattern, sparse_leaves(State(params, masks))[0])
            kept = apply_masks(params, masks) if memory.pruned == "zero" else params
            support = everywhere(params) if memory.pruned == "train" else ()
            return State(
                kept,
                masks,
                memory.init(params),
                own_key(seed, params),
                support=support,
            )

        def update(state: State, grads: Tree, step: Step) -> State:
            state = memory.accumulate(state, grads, step) if remembers else state
            return fired(
                self.when,
                lambda now: self._changed(layouts, allowed, now, grads, step),
                state,
                step,
            )

        recipe = own if allowed is None else None
        record = UncheckedUpdate(update, overwrites=True, recipe=recipe)
        return framed(
            start,
            record,
            within=lambda masks: own.build(allowed_within(allowed, masks)),
        )

    def _changed(
        self,
        layouts: UnitLayouts,
        allowed: Leaves | None,
        state: State,
        grads: Tree,
        step: Step,
    ) -> State:
        leaves, masks = sparse_leaves(state)
        if not leaves:
            return state
        units = unit_table(self.rule, leaves, masks, allowed, self.goal, step, layouts)
        scores = Reader(self.memory, leaves, state, grads, step)
        grown = self.grown
        # one pass sets pruned and grown ones
        zero = self.memory.pruned == "zero" and (grown is None or grown is zeros)
        new: Leaves = {}
        held: Leaves = {}
        for part in units.parts(self.leafwise):
            made, stay = self.method(part, scores.of(part.leaves))
            kept = made if grown is None else both_of(made, masks)
            if stay is not None:
                kept = both_of(kept, stay)
            new |= made
            held |= _zeroed(kept, leaves, overwrite=stay is None) if zero else kept
        if zero:
            return state._replace(
                params=with_leaves(state.params, held),
                masks=with_leaves(state.masks, new),
            )
        state = with_masks(state, new, self.memory.pruned)
        return state if grown is None else _planted(state, new, held, grown, step)


def _zeroed(masks: Leaves, leaves: Leaves, overwrite: bool) -> Leaves:
    new = zeroed(
        list(masks.values()), [leaves[path] for path in masks], overwrite=overwrite
    )
    return dict(zip(masks, new, strict=True))


def _planted(
    state: State, new: Leaves, held: Leaves, grown: Grown, step: Step
) -> State:
    # Weights in `held` keep their values, grown ones start at `grown`.
    fresh = {path: mask & ~held[path] for path, mask in new.items()}
    leaves = flatten(state.params)[0]
    values: Leaves = {}
    if grown is not zeros:
        tree = grown(state, masks_tree(state.params, fresh), step)
        check_like("grown values", tree, state.params)
        values = flatten(tree)[0]
    planted = {
        path: torch.where(
            mask, values.get(path, torch.zeros_like(leaves[path])), leaves[path]
        )
        for path, mask in fresh.items()
    }
    return state._replace(params=with_leaves(state.params, planted))
