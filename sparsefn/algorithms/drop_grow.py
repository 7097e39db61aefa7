"""Dynamic sparse training: drop some weights, grow as many elsewhere. Presets set, rigl, snfs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn.algorithms.competition import Competition, full
from sparsefn.algorithms.frame import build_masked, sparse_leaves, with_masks
from sparsefn.algorithms.memory import Memory
from sparsefn.algorithms.start import Init
from sparsefn.budgets import Distribution, uniform
from sparsefn.engine.checks import check_call, check_int, check_keywords
from sparsefn.engine.rounding import as_fraction, fraction_at, rounded, rounded_down, rounded_up
from sparsefn.engine.selection.winners import end_to_end, totals
from sparsefn.patterns.kinds import Pattern, unstructured
from sparsefn.redistribute import GrowCount, Redistribute, Share, allocate, check_redistribute, mean_active
from sparsefn.schedules import cosine_decay
from sparsefn.scores import gradient, magnitude, momentum
from sparsefn.scores import random as random_score
from sparsefn.state import Algorithm, Score, State, Step, Trigger, Where, apply_masks, check_score, masks_tree
from sparsefn.tree import Leaves, Tree, check_like, flatten, leaves_at
from sparsefn.triggers import every
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
    drop_fraction: Any = None,
    count: Callable[[Any, Any], Any] = rounded,
    grown: Grown = zeros,
    grow_count: GrowCount | None = None,
    exclude_dropped: bool = False,
    restart_dropped: bool = False,
    redistribute: Redistribute | Share | None = None,
    when: Trigger | None = None,
    steps: int | None = None,
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

    Where `when` fires, `count(drop_fraction, active)` weights are dropped (round half even) and as many
    grown as the sparsity asks for, so that exactly n_kept are active afterwards; where too many are
    active (a dense start) more are dropped. `sparsity` is a float, a Schedule, a 0-d tensor, None where
    the pattern fixes it, or "current" to grow back what was dropped; `drop_fraction` is a float, a
    Schedule or a 0-d tensor.
    Say how long the run is: `steps` makes masks change every 100 steps (in a run below 10,000, every hundredth
    part of it) in its first three quarters, while the drop_fraction falls from 0.3 to 0 as half a cosine wave.
    `when` and `drop_fraction` go before that where given; without `steps` they are `every(100)` and 0.3.
    Just-dropped weights may grow back unless `exclude_dropped`; one that does keeps its value unless
    `restart_dropped`. Newly grown weights start at `grown(state, grown_masks, step)`. `grow_count` says
    how many really grow, all that are wanted by default; `sf.redistribute.independently` gives each a
    chance of its own. `redistribute` moves regrowth between leaves (sum exact, none above its size).
    The drop reads the weights as they are, the growth the gradient of the same step; inside
    `with_optimizer` both see the optimizer's state in `state.opt`.
    """
    for name, score in (("drop", drop), ("grow", grow)):
        check_score(name, score)
    check_call("count", count, "fraction", "active")
    check_call("grown", grown, "state", "grown", "step")
    if grow_count is not None:
        check_call("grow_count", grow_count, "scores", "free", "wanted")
    rule, current = Competition(pattern, distribution).check(), isinstance(sparsity, str)
    if (sparsity is None and pattern.fixed is None) or (current and sparsity != "current"):
        wrong = ValueError if current else TypeError
        raise wrong(f"expected sparsity to be a float, a schedule, a 0-d tensor or 'current', got {sparsity!r}")
    level = None if current else as_fraction(sparsity)
    plan = None if redistribute is None else check_redistribute(redistribute)
    if plan is not None and (rule.joint or pattern != unstructured()):
        raise ValueError(
            "redistribute moves elements between leaves: it needs an unstructured pattern and no global_()"
        )
    when, drop_fraction = _timetable(when, drop_fraction, steps)
    fraction: Any = as_fraction(drop_fraction, "drop_fraction")
    if current and isinstance(init, str) and init in ("random", "magnitude"):
        init = "dense"
    shared = {} if plan is None or plan.score is None else {"share": plan.score}
    memory = Memory({"drop": drop, "grow": grow, **shared}, pruned)

    def goal(leaves: Leaves, had: Tensor, groups: list[int], step: Step) -> Tensor:
        if current:
            return had
        counts = rule.targets(leaves, None if level is None else fraction_at(level, step))
        return end_to_end(counts, groups, had.device)

    # Counts are vectors over the competing groups of all fields, end to end.
    def cycle(allowed: Leaves | None, state: State, grads: Tree, step: Step) -> State:
        leaves, masks = sparse_leaves(state)
        fields = rule.fields(leaves)
        if not fields:
            return with_masks(state, {}, pruned)
        signed = rule.elementwise and plan is None and grow_count is None
        drops, of_drops = memory.read("drop", state, grads, step, leaves, signed)
        grows, of_grows = memory.read("grow", state, grads, step, leaves, signed)
        stats = memory.read("share", state, grads, step, leaves)[0] if shared else grows
        free = [rule.free(field, leaves, allowed) for field in fields]
        active = [_within(rule.active(field, masks), open_) for field, open_ in zip(fields, free, strict=True)]
        groups = [rows.shape[0] for rows in active]
        had = totals(active)
        target = goal(leaves, had, groups, step)
        # Where regrowth moves between leaves, their own counts bind only if there are too many in all.
        wanted = target if plan is None else torch.where(had.sum() > target.sum(), target, had)
        rate: Any = fraction_at(fraction, step)
        own = {} if plan is None or plan.rate is None else plan.rate(rate, stats, masks)
        lost = _counted(count, [own.get(field[0], rate) for field in fields], had, groups).clamp(min=0)
        if exclude_dropped:
            lost = torch.minimum(lost, (_sizes(active, free) - wanted).clamp(min=0))
        lost = torch.minimum(torch.maximum(lost, had - wanted), had)
        stay = rule.win(fields, drops, had - lost, list(active), absolute=of_drops)
        left = totals(stay) if rule.joint else had - lost
        taken = active if exclude_dropped else stay
        if plan is not None:
            space = _sizes(active, free) - (had if exclude_dropped else left)
            target = _moved(plan, stats, masks, [path for (path,) in fields], stay, left, space, target)
        more = (target - left).clamp(min=0)
        if grow_count is not None:
            room = [_within(~rows, open_) for rows, open_ in zip(taken, free, strict=True)]
            scored = [rule.rows(field, grows) for field in fields]
            wants = torch.split(more, groups)
            more = torch.cat([grow_count(*row) for row in zip(scored, room, wants, strict=True)])
        won = rule.win(fields, grows, more, free, list(taken), list(stay), absolute=of_grows)
        new: Leaves = {}
        old: Leaves = {}
        for field, kept, grew in zip(fields, stay, won, strict=True):
            new |= rule.masks(field, kept | grew, drops, masks)
            if restart_dropped:
                old |= rule.masks(field, kept, drops, masks)
        del stay, taken, won  # as large as the masks
        if allowed is not None:
            new = {path: mask & full(allowed, leaves, [path])[path] for path, mask in new.items()}
        held = {path: mask & masks[path] for path, mask in new.items()}
        if restart_dropped:
            held = {path: mask & old[path] for path, mask in held.items()}
        return _planted(state, new, held, grown, pruned, step)

    return build_masked(rule, memory, cycle, level=level, init=init, where=where, key=key, when=when)


def _timetable(when: Trigger | None, fraction: Any, steps: int | None) -> tuple[Trigger, Any]:
    # What is given, else what Evci et al. 2020 chose for a run of that length.
    often: Trigger = every(100)
    share: Any = 0.3
    if steps is not None:
        check_int("drop_grow", "steps", steps, 1)
        if when is not None and fraction is not None:
            raise ValueError("expected steps, or both when and drop_fraction, got all three: steps would say nothing")
        stop = max(1, 3 * steps // 4)
        often, share = every(min(100, max(1, steps // 100)), stop=stop), cosine_decay(0.3, stop)
    return often if when is None else when, share if fraction is None else fraction


def _within(rows: Tensor, open_: Tensor | None) -> Tensor:
    return rows if open_ is None else rows & open_


def _counted(count: Callable[[Any, Any], Any], rates: list[Any], had: Tensor, groups: list[int]) -> Tensor:
    # Our own rules take the groups of all leaves at once, others those of a leaf, and may give an int.
    if count in (rounded, rounded_up, rounded_down) and all(rate is rates[0] for rate in rates):
        return torch.as_tensor(count(rates[0], had), device=had.device)
    given = [count(rate, n) for rate, n in zip(rates, torch.split(had, groups), strict=True)]
    return end_to_end(given, groups, had.device)


def _sizes(active: list[Tensor], free: list[Tensor | None]) -> Tensor:
    # How many units of each group may be kept.
    return torch.cat(
        [
            rows.new_full(rows.shape[:1], rows.shape[1], dtype=torch.int64) if open_ is None else totals([open_])
            for rows, open_ in zip(active, free, strict=True)
        ]
    )


def _moved(
    plan: Redistribute,
    stats: Leaves,
    masks: Leaves,
    paths: list[str],
    stay: list[Tensor],
    left: Tensor,
    space: Tensor,
    target: Tensor,
) -> Tensor:
    # The total regrowth is what all leaves lost; each leaf's part follows its share, up to its room.
    kept = {path: rows.reshape(masks[path].shape) for path, rows in zip(paths, stay, strict=True)}
    shares = plan.share({path: stats[path] for path in paths}, masks, kept)
    caps = dict(zip(paths, space.unbind(), strict=True))
    regrown = allocate(shares, (target.sum() - left.sum()).clamp(min=0), caps, plan.most)
    return left + end_to_end([regrown[path] for path in paths], [1] * len(paths), left.device)


def _planted(state: State, new: Leaves, held: Leaves, grown: Grown, pruned: str, step: Step) -> State:
    # New masks; what they hold keeps its value, what they let grow starts at `grown`.
    if grown is zeros and pruned == "zero":  # what is pruned and what grew are zeros alike: one pass
        kept = apply_masks(state.params, masks_tree(state.params, held))
        return state._replace(params=kept, masks=masks_tree(state.params, new))
    state = with_masks(state, new, pruned)
    fresh = {path: mask & ~held[path] for path, mask in new.items()}
    values: Leaves = {}
    if grown is not zeros:
        tree = grown(state, masks_tree(state.params, fresh), step)
        check_like("grown values", tree, state.params)
        values = leaves_at(tree, fresh)
    leaves, rebuild = flatten(state.params)
    planted = [
        torch.where(fresh[path], values.get(path, torch.zeros_like(leaf)), leaf) if path in fresh else leaf
        for path, leaf in leaves.items()
    ]
    return state._replace(params=rebuild(planted))


def _preset(preset: Callable[..., Algorithm], sparsity: Any, **options: Any) -> Algorithm:
    check_keywords(options, preset, drop_grow)
    return drop_grow(sparsity, **options)


def set(sparsity: Any, **options: Any) -> Algorithm:
    """Sparse evolutionary training: drop the smallest weights, grow at random.

    >>> algorithm = sf.set(0.5, drop_fraction=0.5, key=sf.random.key(0))
    >>> state = algorithm.init({"w": torch.randn(4, 4)})
    >>> int(algorithm.update(state, state.params, 0).masks["w"].sum())
    8

    `drop_grow` with drop=magnitude and grow=random; takes its keywords, `steps=` first of all. Mocanu et al.
    2018, arXiv 1707.04780, without the split by sign of the original.
    """
    return _preset(set, sparsity, **{"drop": magnitude, "grow": random_score, **options})


def rigl(sparsity: Any, **options: Any) -> Algorithm:
    """RigL: drop the smallest weights, grow where the dense gradient is largest.

    >>> algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude")
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 5.0, 9.0]])}, 0).masks
    {'w': tensor([[ True, False, False,  True]])}

    `sf.rigl(0.9, steps=10_000)` is the algorithm of the paper for a run of 10,000 steps. `drop_grow` with
    drop=magnitude and grow=gradient; takes its keywords. Evci et al. 2020, arXiv 1911.11134, algorithm 1.
    """
    return _preset(rigl, sparsity, **{"drop": magnitude, "grow": gradient, **options})


def snfs(sparsity: Any, *, decay: float = 0.9, **options: Any) -> Algorithm:
    """Sparse networks from scratch: grow where the gradient's moving average is largest, across leaves.

    >>> algorithm = sf.snfs(0.5, decay=0.5, drop_fraction=0.5, key=sf.random.key(0))
    >>> state = algorithm.init({"a": torch.randn(4, 4), "b": torch.randn(4, 4)})
    >>> grads = {"a": torch.ones(4, 4), "b": 3 * torch.ones(4, 4)}
    >>> masks = algorithm.update(state, grads, 0).masks
    >>> int(masks["a"].sum()), int(masks["b"].sum())
    (6, 10)

    `drop_grow` with drop=magnitude, grow=momentum(decay) and redistribution of the regrowth by mean
    momentum over the active weights; takes its keywords, `steps=` first of all. The total is exact, a leaf's
    count is free after the first update. Dettmers & Zettlemoyer 2019, arXiv 1907.04840.
    """
    parts = {"drop": magnitude, "grow": momentum(decay), "redistribute": mean_active, **options}
    return _preset(snfs, sparsity, **parts)
