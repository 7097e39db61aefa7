"""An algorithm that watches itself on a run of yours: the same bits, and an error at
the first broken promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import optree
import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.leaves import saves_memory
from sparsefn._engine.processes import any_sharded
from sparsefn._engine.transforms import host_number, transformed
from sparsefn.algorithms.combine import donated
from sparsefn.algorithms.combine.parts import check_algorithm
from sparsefn.algorithms.competition import Competition, Goal
from sparsefn.algorithms.frame import sparse_leaves
from sparsefn.algorithms.unit_table import unit_table
from sparsefn.core.checks import described, own_calls
from sparsefn.core.state import Algorithm, State, check_masks, update_of
from sparsefn.core.tree import (
    check_like,
    flatten,
    leaves_of,
    same_structure,
    structure_error,
)
from sparsefn.masks.budgets.counts import Counted
from sparsefn.testing.check import Broken
from sparsefn.testing.harness import generators, memory_of
from sparsefn.testing.introspection import completed_meta
from sparsefn.testing.meta import Meta
from sparsefn.typing import Step, Tree, Trigger

_BLOCK = 2**12  # weights that are looked at where no mask changes


class _Flat(NamedTuple):
    """A tree with its leaves, which are looked up once, as every step does."""

    tree: Tree
    leaves: list[Tensor]
    form: object
    masked: int = (
        0  # of a state, the leaves of its params, and of its masks, which come first
    )

    @property
    def params(self) -> list[Tensor]:
        """The leaves of the params of a state."""
        return self.leaves[: self.masked]

    @property
    def masks(self) -> list[Tensor]:
        """The leaves of the masks of a state."""
        return self.leaves[self.masked : 2 * self.masked]


class _Promise(NamedTuple):
    """What masks keep: None where nothing is said. Without `by_leaf` only the total
    over leaves follows the goal.
    """

    when: Trigger | None = None
    zero: bool = False
    first: bool = False
    rule: Competition | None = None
    goal: Goal = None
    by_leaf: bool = True
    shrinks: bool = False


@described
def passive(
    algorithm: Algorithm, *, meta: Meta | None = None, sparsity: float | None = None
) -> Algorithm:
    """The same algorithm, which raises `Broken` at a call that breaks a promise.

    >>> algorithm = sf.testing.passive(sf.rigl(0.5, when=sf.every(2)))
    >>> state = algorithm.init({"w": torch.ones(4, 4)})
    >>> int(algorithm.update(state, state.params, 0).masks["w"].sum())
    8

    Args:
        algorithm: The algorithm.
        meta: What it promises, as for `check_laws`, of which `when`, `pruned` and
            `monotone` are read. Default: what is known of the algorithms of this
            library that choose masks by a sparsity (`gmp`, `rigl` and their kin, also
            with terms or an optimizer around them); for any other, purity and structure
            alone.
        sparsity: The sparsity that the algorithm has. With it `level`, `pattern` and
            `distribution` of `meta` say its counts.

    Returns:
        An algorithm with the same bits, for a loop of your own. It may stand around
        `with_optimizer` or inside.

    Raises:
        ValueError: `algorithm` is `sf.donated(...)`, or a sparsity is given without
            meta.
        TypeError: `algorithm` is no Algorithm, or `meta` no `Meta`.

    After `init` and after every `update` it asserts

    - purity: no tensor of params, state or gradients is written to, by the counters
      that torch keeps of writes (a write through `Tensor.numpy()` is not counted), and
      the global generators of torch's CPU and of `random` are where they were. Where
      masks may change, which is when more may go wrong, NumPy's generator, too, and the
      state holds no gradient, no param that `init` was given, no part of a tensor of
      the state before, and no strided view;
    - structure: the state has the tree, shapes and dtypes that it had, and its masks
      fit;
    - masks that change where the trigger fires, and nowhere else;
    - zeros: weights off the mask are +0.0. Where a mask changes all of its leaf are
      looked at, at other steps a block of one leaf after another;
    - counts: after `init` and after every trigger each leaf, or all leaves together,
      keep as many units as the sparsity says.

    Under `vmap`, derivatives and `torch.compile`, on the device "meta" and for DTensors
    values cannot be read, and structure alone is checked; inside `sf.donated`, which
    writes over states, `init` alone. On a GPU Python waits at each step that changes a
    mask, and once for each other step.
    """
    check_algorithm("passive", algorithm)
    if any(call.make is donated for call in own_calls(algorithm)):
        raise ValueError(
            "passive: expected an algorithm that is pure, got sf.donated(...), which "
            "writes to states"
        )
    if meta is None and sparsity is not None:
        raise ValueError(
            f"passive: expected meta beside sparsity={sparsity}, which says what "
            "follows; got none"
        )
    if meta is not None and not isinstance(meta, Meta):
        raise TypeError(
            f"passive: expected meta to be a sf.testing.Meta, got {type(meta).__name__}"
        )
    if meta is None:
        promise = _promised(algorithm)
    else:
        promise = _declared(completed_meta("passive", meta, algorithm), sparsity)

    def init(params: Tree) -> State:
        flat = _read(params)
        if flat is None:
            return _of_structure("init", algorithm.init(params), params=params)
        (given,) = flat
        state = _pure("init", lambda: algorithm.init(params), params=given)
        masked = len(leaves_of(_of_structure("init", state, params=params).masks))
        after = _Flat(state, *optree.tree_flatten(state), masked=masked)  # type: ignore[arg-type]
        _check_memory("init", after, [], {"params": given.leaves})
        _check_zeros("init", promise, after, None, 0)
        if promise.first:
            _check_counts("init", promise, state, None, 0)
        return state

    def update(state: State, grads: Tree, step: Step) -> State:
        if saves_memory():
            return algorithm.update(state, grads, step)
        flat = _read(state, grads)
        if flat is None:
            return _of_structure("update", algorithm.update(state, grads, step), state)
        before, given = flat
        before = before._replace(
            masked=len(leaves_of(state.masks)) if isinstance(state, State) else 0
        )
        number = host_number(step)
        what = "update" if number is None else f"update at step {number}"
        if number is None or promise.when is None:
            fires = None
        else:
            fires = bool(promise.when(step))
        made = partial(algorithm.update, state, grads, step)
        all_ = fires is not False
        new = _pure(what, made, all_, state=before, grads=given)
        after = _Flat(new, *optree.tree_flatten(new), masked=before.masked)  # type: ignore[arg-type]
        if after.form != before.form or not all(
            map(_alike, after.leaves, before.leaves)
        ):
            _of_structure(what, new, state)
        if all_:
            _check_memory(what, after, before.leaves, {"grads": given.leaves})
        _check_zeros(what, promise, after, before, number or 0)
        if fires:
            _check_counts(what, promise, new, state, step)
        elif fires is not None:
            _check_masks_stay(what, after, before)
        return new

    within = algorithm.within
    narrowed: Callable[[Tree], Algorithm] | None = (
        None if within is None else lambda masks: passive(within(masks))
    )
    return Algorithm(init, update, algorithm.view, narrowed, algorithm.settled)


# ---- what is promised ----------------------------------------------------------------


def _promised(algorithm: Algorithm) -> _Promise:
    made = update_of(algorithm).recipe
    if made is None:
        return _Promise()
    exact = made.exact and not isinstance(made.goal, Counted)
    rule = made.rule if exact else None
    first = isinstance(made.init, str) and made.init in ("random", "magnitude")
    return _Promise(
        made.when, made.memory.pruned == "zero", first, rule, made.goal, made.leafwise
    )


def _declared(meta: Meta, sparsity: float | None) -> _Promise:
    rule = None
    goal = None
    if sparsity is not None and meta.exact_count and meta.exact_count != "relative":
        rule = Competition(meta.layout.pattern, meta.distribution).check()
        if meta.layout.pattern.fixed is not None:
            goal = None
        else:
            goal = rule.goal(meta.level(sparsity))
    by_leaf = rule is None or rule.joint or not meta.total
    zero = meta.zeroes
    first = meta.start in ("random", "magnitude")
    return _Promise(meta.when, zero, first, rule, goal, by_leaf, meta.monotone)


# ---- structure and purity ------------------------------------------------------------


def _read(*trees: Tree) -> list[_Flat] | None:
    """Trees with their leaves; None where values of these cannot be read."""
    if is_compiling() or transformed():
        return None
    flat = [_Flat(tree, *optree.tree_flatten(tree)) for tree in trees]
    others = [x for of in flat for x in of.leaves if type(x) is not Tensor or x.is_meta]
    if any_sharded(others) or any(isinstance(x, Tensor) and x.is_meta for x in others):
        return None
    return flat


def _of_structure(
    what: str,
    new: State,
    old: State | None = None,
    params: Tree = None,
) -> State:
    """The new state, if it has the tree, shapes and dtypes of the old state, or of the
    params that were given.
    """
    if not isinstance(new, State):
        raise Broken(f"passive: {what} gives no State, but {type(new).__name__}")
    try:
        if old is None:
            check_like("the params of the state", new.params, params)
            check_masks(new.masks, new.params)
        elif not same_structure(new, old):
            raise ValueError(
                structure_error("the new state", new, old, "the old state")
            )
        elif not all(map(_alike, leaves_of(new), leaves_of(old))):
            check_like("the new state", new, old)
    except (TypeError, ValueError) as error:
        raise Broken(f"passive: {what} changes the structure: {error}") from error
    return new


def _alike(x: Tensor, old: Tensor) -> bool:
    # What check_like asks of plain tensors; the rest it says itself.
    return x is old or (
        type(x) is type(old) is Tensor and x.shape == old.shape and x.dtype == old.dtype
    )


def _versions(leaves: Sequence[Tensor]) -> list[int]:
    try:
        return [x._version for x in leaves]
    except RuntimeError:  # tensors of inference mode have none
        made = []
        for x in leaves:
            if x.is_inference():
                made.append(0)
            else:
                made.append(x._version)
        return made


def _at(x: Tensor) -> int:
    if x.numel():
        return x.untyped_storage().data_ptr()
    return 0


def _pure(
    what: str,
    call: Callable[[], State],
    all_: bool = True,
    **inputs: _Flat,
) -> State:
    """The state of a call, checked to leave inputs and generators alone."""
    versions = [_versions(given.leaves) for given in inputs.values()]
    before = generators(all_)
    new = call()
    if before != generators(all_):
        raise Broken(
            f"passive: {what} reads or advances a global generator: sf.random draws "
            "from a key"
        )
    for (name, given), version in zip(inputs.items(), versions, strict=True):
        now = _versions(given.leaves)
        if now != version:
            at = next(
                path
                for path, x, y in zip(_paths(given.tree), now, version, strict=True)
                if x != y
            )
            raise Broken(f"passive: {what} writes to its input, {name} at {at!r}")
    return new


def _check_memory(
    what: str,
    new: _Flat,
    state: list[Tensor],
    foreign: dict[str, list[Tensor]],
) -> None:
    # A tensor of a state is its own, or as a whole a tensor of the state before.
    owners = {_at(x): name for name, leaves in foreign.items() for x in leaves}
    handed_on = {id(x) for x in state}
    before: dict[int, list[Tensor]] = {}
    for x in state:
        before.setdefault(_at(x), []).append(x)
        owners.pop(_at(x), None)  # a gradient that is a tensor of the state
    for i, x in enumerate(new.leaves):
        if id(x) in handed_on:
            continue
        if not isinstance(x, Tensor):
            raise Broken(
                f"passive: {what}: expected a tensor in the state at "
                f"{_paths(new.tree)[i]!r}, got {x!r}"
            )
        start = _at(x)
        if start and start in owners:
            raise Broken(
                f"passive: {what} keeps its {owners[start]} in the state at "
                f"{_paths(new.tree)[i]!r}: copy it"
            )
        if (
            start
            and start in before
            and memory_of(x) not in map(memory_of, before[start])
        ):
            raise Broken(
                f"passive: {what} keeps a part of a tensor of the old state at "
                f"{_paths(new.tree)[i]!r}: copy it"
            )
        if not x.is_contiguous():
            raise Broken(
                f"passive: {what} keeps a view with strides {x.stride()} at "
                f"{_paths(new.tree)[i]!r}"
            )


# ---- masks, zeros and counts ---------------------------------------------------------


def _check_masks_stay(what: str, new: _Flat, old: _Flat) -> None:
    for i, (mask, before) in enumerate(zip(new.masks, old.masks, strict=True)):
        if mask is not before and not torch.equal(mask, before):
            raise Broken(
                f"passive: {what} changes the mask at {_paths(new.tree.masks)[i]!r}, "
                "where no trigger fires"
            )


def _check_zeros(
    what: str,
    promise: _Promise,
    new: _Flat,
    old: _Flat | None,
    number: int,
) -> None:
    if not promise.zero:
        return
    weights = new.params
    masks = new.masks
    olds: Sequence[Tensor | None] = [None] * len(masks) if old is None else old.masks
    whole = [
        i
        for i, (mask, before) in enumerate(zip(masks, olds, strict=True))
        if mask.ndim and mask is not before
    ]
    chosen = [(i, slice(None)) for i in whole] or _turn(masks, number)
    for i, part in chosen:
        weight = weights[i].detach().reshape(-1)[part]
        off = weight.masked_fill(masks[i].reshape(-1)[part], 0)
        if bool(off.view(torch.uint8).any()):  # of -0.0, too
            hint = (
                'declare Meta(pruned="keep") or Meta(pruned="train") if they may differ'
            )
            raise Broken(
                f"passive: {what}: weights off the mask at "
                f"{_paths(new.tree.params)[i]!r} are not +0.0; {hint}"
            )


def _paths(tree: Tree) -> list[str]:
    return [*flatten(tree)[0]]


def _turn(masks: Sequence[Tensor], number: int) -> list[tuple[int, slice]]:
    # The block whose turn it is at a step.
    blocks = [
        (i, -(-mask.numel() // _BLOCK)) for i, mask in enumerate(masks) if mask.ndim
    ]
    at = number % max(sum(n for _, n in blocks), 1)
    for i, n in blocks:
        if at < n:
            return [(i, slice(at * _BLOCK, (at + 1) * _BLOCK))]
        at -= n
    return []


def _check_counts(
    what: str,
    promise: _Promise,
    new: State,
    old: State | None,
    step: Step,
) -> None:
    """Units are kept as many as the goal says.

    Where masks only shrink, they are not more than there were.
    """
    rule = promise.rule
    leaves, masks = sparse_leaves(new)
    if not leaves:
        return
    before = None if old is None else sparse_leaves(old)[1]
    shrinks = before is not None and not any(
        bool((mask & ~before[path]).any()) for path, mask in masks.items()
    )
    if promise.shrinks and before is not None and not shrinks:
        raise Broken(f"passive: {what}: a mask of monotone=True keeps what was pruned")
    if rule is None:
        return
    units = unit_table(rule, leaves, masks, None, promise.goal, step)
    # then some groups may keep fewer
    if units.known is None or units.grids.least or not rule.pattern.one_by_one:
        return
    had = units
    if before is not None and shrinks:
        had = units._replace(masks=before)
    counts = [
        torch.minimum(units.counts(units.known), units.capacity),
        *(x.totals(x.active) for x in (units, had)),
    ]
    goal, kept, most = counts if promise.by_leaf else [count.sum() for count in counts]
    if had is not units:
        goal = torch.minimum(goal, most)
    if not torch.equal(goal, kept):
        names = list(units.grids.local)
        raise Broken(
            f"passive: {what}: {kept.tolist()} units are kept, expected "
            f"{goal.tolist()}, in {names}"
        )
