"""Dynamic sparse training: drop some weights, grow as many elsewhere. Presets set, rigl, snfs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn import random
from sparsefn.algorithms.core import (
    Init,
    Memory,
    as_level,
    check_pruned,
    check_update,
    detached,
    level_at,
    masks_tree,
    narrowed,
    pick,
    settle,
    sparse_leaves,
    start_masks,
)
from sparsefn.algorithms.rule import Count, Leaves, Rule, full
from sparsefn.budgets import Distribution, rounded, uniform
from sparsefn.patterns import Pattern, unstructured
from sparsefn.redistribute import GrowCount, Redistribute, Share, allocate, check_redistribute, mean_active
from sparsefn.scores import check_score, gradient, magnitude, momentum
from sparsefn.scores import random as random_score
from sparsefn.tree import Tree, check_like, choose, flatten
from sparsefn.triggers import always, check_trigger
from sparsefn.types import Algorithm, Score, State, Step, Trigger, Where, apply_masks
from sparsefn.where import default_where

# (state, newly grown masks, step) -> values of the grown weights
Grown = Callable[[State, Tree, Step], Tree]


def zeros(state: State, grown: Tree, step: Step) -> Tree:
    """Grown weights start at zero.

    >>> zeros(sf.State({"w": torch.ones(2)}, ()), (), 0)
    {'w': tensor([0., 0.])}
    """
    del grown, step
    return optree.tree_map(torch.zeros_like, state.params)


def drop_grow(
    sparsity: Any,
    *,
    drop: Score,
    grow: Score,
    drop_fraction: Any = 0.3,
    count: Callable[[Any, Any], Any] = rounded,
    grown: Grown = zeros,
    grow_count: GrowCount | None = None,
    exclude_dropped: bool = False,
    restart_dropped: bool = False,
    redistribute: Redistribute | Share | None = None,
    when: Trigger = always(),
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
    init: Init = "random",
    pruned: str = "zero",
) -> Algorithm:
    """Drop the worst of the kept weights, then grow the best of the pruned ones, back to the target.

    >>> algorithm = sf.drop_grow(0.5, drop=sf.scores.magnitude, grow=sf.scores.gradient, drop_fraction=0.5,
    ...                          init="magnitude")
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, 0).masks
    {'w': tensor([[ True, False, False,  True]])}

    At each trigger, `count(drop_fraction, active)` weights are dropped (round half even) and as many
    grown as the sparsity asks for, so that exactly n_kept are active afterwards; where too many are
    active (a dense start) more are dropped. `sparsity` is a float, a Schedule, a 0-d tensor, None where
    the pattern fixes it, or "current" to grow back what was dropped; `drop_fraction` is a float, a
    Schedule or a 0-d tensor.
    Just-dropped weights may grow back unless `exclude_dropped`; one that does keeps its value unless
    `restart_dropped`. Newly grown weights start at `grown(state, grown_masks, step)`. `grow_count` says
    how many really grow, all that are wanted by default; `sf.redistribute.independently` gives each a
    chance of its own. `redistribute` moves regrowth between leaves (sum exact, none above its size).
    The drop reads the weights as they are, the growth the gradient of the same step; inside
    `with_optimizer` both see the optimizer's state in `state.opt`.
    """
    check_pruned(pruned)
    check_trigger("when", when)
    for name, score in (("drop", drop), ("grow", grow)):
        check_score(name, score)
    rule, current = Rule(pattern, distribution).check(), isinstance(sparsity, str)
    if (sparsity is None and pattern.fixed is None) or (current and sparsity != "current"):
        wrong = ValueError if current else TypeError
        raise wrong(f"expected sparsity to be a float, a schedule, a 0-d tensor or 'current', got {sparsity!r}")
    level = None if current else as_level(sparsity)
    plan = None if redistribute is None else check_redistribute(redistribute)
    if plan is not None and (rule.joint or pattern != unstructured()):
        raise ValueError(
            "redistribute moves elements between leaves: it needs an unstructured pattern and no global_()"
        )
    fraction = as_level(drop_fraction, "drop_fraction")
    if fraction is None:
        raise TypeError("expected drop_fraction to be a float in [0, 1], a schedule or a 0-d tensor, got None")
    if current and isinstance(init, str) and init in ("random", "magnitude"):
        init = "dense"
    seed = random.key(0) if key is None else key
    shared = {} if plan is None or plan.score is None else {"share": plan.score}
    memory = Memory({"drop": drop, "grow": grow, **shared}, pruned)

    def targets(leaves: Leaves, active: list[Tensor], step: Step) -> list[Count]:
        if current:
            return [rows.sum(-1) for rows in active]
        return rule.targets(leaves, None if level is None else level_at(level, step))

    def build(allowed: Leaves | None) -> Algorithm:
        def start(params: Tree) -> State:
            params = detached(params)
            masks = start_masks(params, rule, where, init, level, seed, allowed)
            kept = apply_masks(params, masks) if pruned == "zero" else params
            return State(kept, masks, memory.init(params), seed)

        def cycle(state: State, grads: Tree, step: Step) -> State:
            leaves, masks = sparse_leaves(state)
            fields = rule.fields(leaves)
            drops = memory.read("drop", state, grads, step, leaves)
            grows = memory.read("grow", state, grads, step, leaves)
            stats = memory.read("share", state, grads, step, leaves) if shared else grows
            active = [rule.active(field, masks) for field in fields]
            open_ = [rule.free(field, leaves, allowed) for field in fields]
            active = [rows & free for rows, free in zip(active, open_, strict=True)]
            target = [
                torch.as_tensor(n, device=a.device) for n, a in zip(targets(leaves, active, step), active, strict=True)
            ]
            goals = target if plan is None or not fields else _loose(active, target)
            rate: Any = level_at(fraction, step)
            own = {} if plan is None or plan.rate is None else plan.rate(rate, stats, masks)
            kept: list[Tensor] = []
            room: list[Tensor] = []
            for field, rows, free, goal in zip(fields, active, open_, goals, strict=True):
                had = rows.sum(-1)
                lost = count(own.get(field[0], rate), had).clamp(min=0)
                if exclude_dropped:
                    lost = torch.minimum(lost, (free.sum(-1) - goal).clamp(min=0))
                lost = torch.minimum(torch.maximum(lost, had - goal), had)
                stay = rule.win(field, drops, rows, had - lost)
                kept.append(stay)
                room.append(free & ~(rows if exclude_dropped else stay))
            if plan is not None and fields:
                target = _moved(plan, stats, masks, [f[0] for f in fields], kept, room, target)
            new: Leaves = {}
            old: Leaves = {}
            for field, stay, free, goal in zip(fields, kept, room, target, strict=True):
                more = (goal - stay.sum(-1)).clamp(min=0)
                if grow_count is not None:
                    more = grow_count(rule.rows(field, grows), free, more)
                rows = stay | rule.win(field, grows, free, more, held=stay)
                new |= rule.masks(field, rows, drops, masks)
                if restart_dropped:
                    old |= rule.masks(field, stay, drops, masks)
            if allowed is not None:
                new = {path: mask & full(allowed, leaves, [path])[path] for path, mask in new.items()}
            fresh = {path: mask & ~(old.get(path, masks[path]) & masks[path]) for path, mask in new.items()}
            return _planted(settle(state, new, pruned), fresh, grown, step)

        def update(state: State, grads: Tree, step: Step) -> State:
            step = check_update(state, grads, step)
            state = memory.accumulate(state, grads, step)
            return choose(when(step), lambda now: cycle(now, grads, step), state)  # type: ignore[no-any-return]

        return Algorithm(start, update, within=lambda masks: build(narrowed(allowed, masks)))

    return build(None)


def _loose(active: list[Tensor], target: list[Tensor]) -> list[Tensor]:
    # Where regrowth moves between leaves, their own counts bind only if there are too many in all.
    had = [rows.sum(-1) for rows in active]
    over = torch.cat(had).sum() > torch.stack([goal.sum() for goal in target]).sum()
    return [torch.where(over, goal, n) for goal, n in zip(target, had, strict=True)]


def _moved(
    plan: Redistribute,
    stats: Leaves,
    masks: Leaves,
    paths: list[str],
    kept: list[Tensor],
    room: list[Tensor],
    target: list[Tensor],
) -> list[Tensor]:
    # The total regrowth is what all leaves lost; each leaf's part follows its share, up to its room.
    left = {path: stay.reshape(masks[path].shape) for path, stay in zip(paths, kept, strict=True)}
    shares = plan.share({path: stats[path] for path in paths}, masks, left)
    stay = {path: rows.sum() for path, rows in zip(paths, kept, strict=True)}
    total = torch.stack([goal.sum() for goal in target]).sum() - torch.cat(kept, -1).sum()
    caps = {path: free.sum() for path, free in zip(paths, room, strict=True)}
    regrown = allocate(shares, total.clamp(min=0), caps, plan.most)
    return [(stay[path] + regrown[path]).reshape(1) for path in paths]


def _planted(state: State, fresh: Leaves, grown: Grown, step: Step) -> State:
    if grown is zeros:
        values: Leaves = {}
    else:
        tree = grown(state, masks_tree(state.params, fresh), step)
        check_like("grown values", tree, state.params)
        values = pick(tree, fresh)
    leaves, rebuild = flatten(state.params)
    planted = [
        torch.where(fresh[path], values.get(path, torch.zeros_like(leaf)), leaf) if path in fresh else leaf
        for path, leaf in leaves.items()
    ]
    return state._replace(params=rebuild(planted))


def set(sparsity: Any, **options: Any) -> Algorithm:
    """Sparse evolutionary training: drop the smallest weights, grow at random.

    >>> algorithm = sf.set(0.5, drop_fraction=0.5, key=sf.random.key(0))
    >>> state = algorithm.init({"w": torch.randn(4, 4)})
    >>> int(algorithm.update(state, state.params, 0).masks["w"].sum())
    8

    `drop_grow` with drop=magnitude and grow=random; takes its keywords. Mocanu et al. 2018,
    arXiv 1707.04780, without the split by sign of the original.
    """
    return drop_grow(sparsity, **{"drop": magnitude, "grow": random_score, **options})


def rigl(sparsity: Any, **options: Any) -> Algorithm:
    """RigL: drop the smallest weights, grow where the dense gradient is largest.

    >>> algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude")
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 5.0, 9.0]])}, 0).masks
    {'w': tensor([[ True, False, False,  True]])}

    `drop_grow` with drop=magnitude and grow=gradient; takes its keywords. Evci et al. 2020,
    arXiv 1911.11134, algorithm 1.
    """
    return drop_grow(sparsity, **{"drop": magnitude, "grow": gradient, **options})


def snfs(sparsity: Any, *, decay: float = 0.9, **options: Any) -> Algorithm:
    """Sparse networks from scratch: grow where the gradient's moving average is largest, across leaves.

    >>> algorithm = sf.snfs(0.5, decay=0.5, drop_fraction=0.5, key=sf.random.key(0))
    >>> state = algorithm.init({"a": torch.randn(4, 4), "b": torch.randn(4, 4)})
    >>> grads = {"a": torch.ones(4, 4), "b": 3 * torch.ones(4, 4)}
    >>> masks = algorithm.update(state, grads, 0).masks
    >>> int(masks["a"].sum()), int(masks["b"].sum())
    (6, 10)

    `drop_grow` with drop=magnitude, grow=momentum(decay) and redistribution of the regrowth by mean
    momentum over the active weights; takes its keywords. The total is exact, a leaf's count is free
    after the first update. Dettmers & Zettlemoyer 2019, arXiv 1907.04840.
    """
    defaults = {"drop": magnitude, "grow": momentum(decay), "redistribute": mean_active}
    return drop_grow(sparsity, **{**defaults, **options})
