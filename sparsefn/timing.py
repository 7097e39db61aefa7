"""Algorithms one after another: sequence inside one update, phases over the steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import optree
import torch

from sparsefn.algorithms.core import check_update
from sparsefn.compose import check_pairs, check_plain, kept, no_optimizer, pack
from sparsefn.engine.transforms import concrete
from sparsefn.tree import Tree, choose, flatten
from sparsefn.types import Algorithm, State, Step, effective, has_own_support, support_of

# Made once: a step that changes nothing does no tensor work.
_TRUE = torch.ones((), dtype=torch.bool, device="cpu")


def _owns(state: State) -> dict[str, Any]:
    # Which leaves a part sparsifies, as structure without tensors.
    return {path: () for path, mask in flatten(state.masks)[0].items() if mask.ndim}


def _field(states: Sequence[State], name: str) -> list[Tree]:
    return [getattr(state, name) for state in states]


def _only(masks: Tree, owns: dict[str, Any]) -> Tree:
    leaves, rebuild = flatten(masks)
    return rebuild([m if p in owns or not m.ndim else _TRUE.to(m.device) for p, m in leaves.items()])


def _part(state: State, params: Tree, masks: Tree, i: int) -> State:
    own = state.scores[str(i)]
    return State(params, _only(masks, own["owns"]), own["scores"], state.key[str(i)], state.opt, own["support"])


def _expand(masks: Tree, params: Tree, owned: set[str]) -> Tree:
    # 0-d True of leaves that another part sparsifies, at full shape.
    leaves, rebuild = flatten(masks)
    shapes = flatten(params)[0]
    full = [
        torch.ones_like(shapes[path], dtype=torch.bool) if path in owned and not mask.ndim else mask
        for path, mask in leaves.items()
    ]
    return rebuild(full)


def sequence(*algorithms: Algorithm) -> Algorithm:
    """The state passes through: each update runs all of them in order, so a later one may regrow.

    >>> prune = sf.gmp(sf.schedules.piecewise({0: 0.0, 1: 0.5}), init="dense")
    >>> regrow = sf.rigl("current", drop_fraction=0.5, when=sf.always())
    >>> algorithm = sf.sequence(prune, regrow)
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, 1).masks
    {'w': tensor([[ True, False, False,  True]])}

    Prune then regrow at the same triggers is GraNet (Liu et al. 2021, arXiv 2106.10404). The first
    algorithm that sparsifies a leaf makes its initial mask. Not `chain`, where masks intersect.
    """
    check_plain("sequence", algorithms)

    def join(parts: Sequence[State], masks: Tree, owns: Sequence[Any]) -> State:
        return pack(parts, parts[-1].params, masks, [{"owns": own} for own in owns])

    def init(params: Tree) -> State:
        parts = [algorithm.init(params) for algorithm in algorithms]
        no_optimizer("sequence", parts)
        owner = optree.tree_map(
            lambda *masks: next((i for i, m in enumerate(masks) if m.ndim), 0), *_field(parts, "masks")
        )
        masks, first = (
            optree.tree_map(lambda i, *leaves: leaves[i], owner, *_field(parts, name)) for name in ("masks", "params")
        )
        owns = [_owns(part) for part in parts]
        return join([*parts[:-1], parts[-1]._replace(params=first)], masks, owns)

    def update(state: State, grads: Tree, step: Step) -> State:
        step = check_update(state, grads, step)
        params, masks, parts, owns = state.params, state.masks, [], []
        for i, algorithm in enumerate(algorithms):
            part = _part(state, params, masks, i)
            part = algorithm.update(part, grads, step)
            params = part.params
            masks = optree.tree_map(lambda old, new: new if new.ndim else old, masks, part.masks)
            parts.append(part)
            owns.append(state.scores[str(i)]["owns"])
        return join(parts, masks, owns)

    return Algorithm(init, update)


def phases(schedule: Sequence[tuple[int, Algorithm]]) -> Algorithm:
    """One algorithm after another in time: each rules from its begin until the next one's.

    >>> algorithm = sf.phases([(0, sf.static(0.5, init="magnitude")), (2, sf.dense())])
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    >>> for step in range(3):
    ...     state = algorithm.update(state, state.params, step)
    >>> state
    State(params={'w': tensor([[0., 2.]])}, masks={'w': tensor([[True, True]])}, ...)

    `schedule` is a list of (begin, algorithm); the first begins at 0, begins grow. At a begin the new
    algorithm is initialised from the effective weights and then updated, so the update at that very
    step must be made. Masks of a leaf that any phase sparsifies have full shape throughout.
    """
    check_pairs("phases", schedule)
    begins, algorithms = [begin for begin, _ in schedule], [algorithm for _, algorithm in schedule]
    check_plain("phases", algorithms)
    for begin in begins:
        if isinstance(begin, bool) or not isinstance(begin, int):
            raise TypeError(f"phases: expected begins to be ints, got {begin!r}")
    if begins[0] != 0 or any(a >= b for a, b in itertools.pairwise(begins)):
        raise ValueError(f"phases: expected begins that start at 0 and grow, got {begins}")
    ends = [*begins[1:], None]

    def join(state: State, part: State, i: int) -> State:
        owned = {path for j in range(len(algorithms)) for path in state.scores[str(j)]["owns"]}
        masks = _expand(part.masks, state.params, owned)
        scores = {**state.scores, str(i): {**kept(part), "owns": state.scores[str(i)]["owns"]}}
        support = _expand(support_of(part), state.params, owned) if has_own_support(state) else ()
        return State(part.params, masks, scores, {**state.key, str(i): part.key}, state.opt, support)

    def init(params: Tree) -> State:
        parts = [algorithm.init(params) for algorithm in algorithms]
        no_optimizer("phases", parts)
        joined = pack(parts, parts[0].params, parts[0].masks, [{"owns": _owns(part)} for part in parts])
        return join(joined, parts[0], 0)

    def run(state: State, grads: Tree, step: Step, i: int) -> State:
        old = _part(state, state.params, state.masks, i)
        # A phase that begins starts over from the effective weights.
        begun = step == begins[i]
        part = choose(begun, lambda _: algorithms[i].init(effective(state))._replace(opt=state.opt), old) if i else old
        part = algorithms[i].update(part, grads, step)
        return state if part is old else join(state, part, i)

    def update(state: State, grads: Tree, step: Step) -> State:
        step = check_update(state, grads, step)
        now = concrete(step)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if now is not None:
                if begin <= now and (end is None or now < end):
                    return run(state, grads, step, i)
                continue
            inside = step >= begin if end is None else (step >= begin) & (step < end)
            state = choose(inside, partial(run, grads=grads, step=step, i=i), state)
        return state

    return Algorithm(init, update)
