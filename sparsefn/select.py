"""Exact selection: one tensor of scores -> one mask, ties to the lowest index, NaN last.

A competition is ordered by score (larger first), then by lower row-major index. NaN ranks below
-inf, -0.0 equals 0.0. Scores are mapped to integers with that order, so that selection is exact on
every dtype and the same bits under every transform. `_top` is the only engine: a faster one takes
its place without a change elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn import random
from sparsefn.boxes import active_rows, allowed_rows, fixed_count, from_rows, over_boxes, to_rows
from sparsefn.patterns import Pattern, unstructured
from sparsefn.tree import Tree, concrete, flatten

Count = int | Tensor | None

_BARRED = {torch.int32: torch.iinfo(torch.int32).min, torch.int64: torch.iinfo(torch.int64).min}


def rank_keys(scores: Tensor, eligible: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Integers in the order of the competition; the least integer bars an entry from it.

    >>> keys = rank_keys(torch.tensor([0.0, -0.0, float("nan"), -float("inf"), 1.0]))
    >>> bool(keys[0] == keys[1]), (keys.argsort()).tolist()
    (True, [2, 3, 0, 1, 4])

    float32 and narrower give int32, float64 gives int64; `dtype` asks for the wider.
    """
    if not scores.is_floating_point():
        raise TypeError(f"expected floating-point scores, got {scores.dtype}")
    wide = torch.promote_types(scores.dtype, dtype or torch.float32)
    x = scores.detach().to(wide)
    kind = torch.int64 if wide == torch.float64 else torch.int32
    least = _BARRED[kind]
    raw = x.view(kind)
    keys = torch.where(torch.isnan(x), least + 1, torch.where(raw >= 0, raw, least - raw))
    return keys if eligible is None else torch.where(eligible, keys, least)


def unit_keys(pattern: Pattern, scores: Tensor, eligible: Tensor | None = None) -> Tensor:
    """Keys of the units of a tensor, (groups, units); what the pattern never keeps is barred.

    >>> keys = unit_keys(sf.patterns.nearly_diagonal(1), torch.rand(2, 2))
    >>> (keys > torch.iinfo(keys.dtype).min).tolist()
    [[True, False, False, True]]
    """
    return rank_keys(to_rows(pattern, scores), allowed_rows(pattern, scores, eligible))


def unit_mask(pattern: Pattern, kept: Tensor, scores: Tensor, among: Tensor | None = None) -> Tensor:
    """The mask of the kept units; of the others, what the pattern leaves them: their best, among these.

    >>> unit_mask(sf.patterns.block((2,), zeros=1), torch.tensor([[True, False]]), torch.tensor([1.0, 2.0, 4.0, 3.0]))
    tensor([ True,  True,  True, False])
    """
    mask = from_rows(pattern, kept, tuple(scores.shape))
    if pattern.zeros is None:
        return mask
    lost = pattern.zeros
    box = pattern.unit(tuple(scores.shape))
    return mask | over_boxes(rank_keys(scores, among), box, lambda keys: _top(keys, max(keys.shape[-1] - lost, 0)))


def _top(keys: Tensor, k: int | Tensor) -> Tensor:
    """Bool mask of the k largest keys of each row; barred entries never win, so k is an upper bound."""
    size = keys.shape[-1]
    open_ = keys > _BARRED[keys.dtype]
    if size == 0 or (isinstance(k, int) and k == 0):
        return torch.zeros_like(open_)
    if isinstance(k, int):
        if k >= size:
            return open_
        threshold = torch.kthvalue(keys, size - k + 1, dim=-1, keepdim=True).values
    else:
        k = k.reshape(-1, 1).clamp(0, size)
        order = torch.sort(keys, dim=-1, descending=True).values
        at = (k - 1).clamp(min=0).expand(keys.shape[0], 1)
        threshold = order.gather(-1, at)
    above, equal = keys > threshold, keys == threshold
    missing = k - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))) & open_


def top(keys: Tensor, count: int | Tensor) -> Tensor:
    """Exact winners of each row of keys, (groups, units); a count that a tensor hides is clamped.

    >>> top(torch.tensor([[3, 1, 2]], dtype=torch.int32), 2)
    tensor([[ True, False,  True]])
    """
    if isinstance(count, Tensor) and (count.ndim == 0 or count.shape == (1,)):
        known = concrete(count)
        count = count if known is None else max(0, min(int(known), keys.shape[-1]))
    return _top(keys, count)


def _check_count(name: str, count: Count, groups: int, available: int) -> int | Tensor:
    if isinstance(count, Tensor):
        if count.is_floating_point() or count.dtype == torch.bool:
            raise TypeError(f"expected {name} of an integer dtype, got {count.dtype}")
        if count.ndim and tuple(count.shape) != (groups,):
            raise ValueError(f"expected {name} of shape () or ({groups},), got {tuple(count.shape)}")
        return count.to(torch.int64)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"expected {name} to be an int or an integer tensor, got {count!r}")
    if not 0 <= count <= available:
        raise ValueError(f"expected 0 <= {name} <= {available}, got {count}")
    return count


def _settled(pattern: Pattern, name: str, count: Count, shape: tuple[int, ...]) -> Count:
    fixed = fixed_count(pattern, shape)
    if fixed is None:
        return count
    if count is not None and (isinstance(count, Tensor) or isinstance(fixed, Tensor) or count != fixed):
        raise ValueError(f"{pattern} fixes {name} at {fixed}, got {count}")
    return fixed


def topk_mask(scores: Tensor, n_keep: Count, *, pattern: Pattern = unstructured()) -> Tensor:
    """Keep exactly the n_keep best units of each competing group.

    >>> sf.topk_mask(torch.tensor([1.0, 3.0, 3.0, 2.0]), 1)
    tensor([False,  True, False, False])

    `n_keep` is an int, a 0-d int tensor or one count a group, in units of the pattern; `nm` and
    `nearly_diagonal` fix it (pass None). An int outside [0, units of a group] is a ValueError, a tensor
    is clamped. Returns a bool mask of the shape of `scores`.
    """
    keys = unit_keys(pattern, scores)
    count = _check_count("n_keep", _settled(pattern, "n_keep", n_keep, tuple(scores.shape)), *keys.shape)
    return unit_mask(pattern, top(keys, count), scores)


def threshold_mask(scores: Tensor, tau: float | Tensor, *, min_keep: int = 0) -> Tensor:
    """Keep the scores above tau, and at least the min_keep best.

    >>> sf.threshold_mask(torch.tensor([1.0, 3.0, 2.0]), 5.0, min_keep=1)
    tensor([False,  True, False])

    The count depends on the data. NaN is above nothing.
    """
    floor = _check_count("min_keep", min_keep, 1, scores.numel())
    above = scores.detach() > tau
    return above | top(rank_keys(scores).reshape(1, -1), floor).reshape(scores.shape) if min_keep else above


def _checked(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool or mask.shape != scores.shape:
        raise ValueError(f"expected a bool mask of shape {tuple(scores.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    return mask


def checked_count(name: str, count: Count, eligible: Tensor) -> int | Tensor:
    """The count, if it is one and no group has fewer eligible units: rows of (groups, units) flags.

    >>> checked_count("n_drop", 2, torch.tensor([[True, False, True]]))
    2

    A tensor is not compared: selection clamps it.
    """
    groups, available = eligible.shape
    if isinstance(count, int) and groups:
        least = concrete(eligible.sum(-1).amin())
        available = available if least is None else least
    return _check_count(name, count, groups, available)


def drop_lowest(scores: Tensor, mask: Tensor, n_drop: Count, *, pattern: Pattern = unstructured()) -> Tensor:
    """Clear the n_drop worst kept units of each group; pruned units do not compete.

    >>> sf.drop_lowest(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([True, True, False]), 1)
    tensor([False,  True, False])

    Among ties the higher index goes first, NaN before all. A unit is active if any element is kept, or
    with the `zeros` of a block, more than a pruned one has left. What a pattern never keeps is cleared
    too. An int above what is active is a ValueError, a tensor is clamped.
    """
    active = active_rows(pattern, _checked(mask, scores))
    count = checked_count("n_drop", n_drop, active)
    keep = (active.sum(-1) - count).clamp(min=0)
    kept = top(unit_keys(pattern, scores, active), keep)
    return mask & unit_mask(pattern, kept, scores, mask)


def grow_highest(
    scores: Tensor,
    mask: Tensor,
    n_grow: Count,
    *,
    pattern: Pattern = unstructured(),
    exclude: Tensor | None = None,
) -> Tensor:
    """Fill the n_grow best pruned units of each group; kept and excluded units do not compete.

    >>> sf.grow_highest(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([True, False, False]), 1)
    tensor([ True,  True, False])

    An int above what is eligible is a ValueError, a tensor is clamped.
    """
    eligible = ~active_rows(pattern, _checked(mask, scores))
    if exclude is not None:
        eligible = eligible & ~to_rows(pattern, _checked(exclude, scores), lambda unit: unit.any(-1))
    eligible = allowed_rows(pattern, scores, eligible)
    count = checked_count("n_grow", n_grow, eligible)
    grown = top(rank_keys(to_rows(pattern, scores), eligible), count)
    return mask | from_rows(pattern, grown, tuple(scores.shape))


def topk_masks(scores: Tree, n_keep: int | Tensor) -> Tree:
    """One competition over all leaves: exactly n_keep elements are kept in total.

    >>> sf.topk_masks({"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([3.0, 2.0])}, 2)
    {'a': tensor([False,  True]), 'b': tensor([ True, False])}

    Ties go to the earlier leaf in optree's order, then to the lower index.
    """
    leaves, rebuild = flatten(scores)
    if not leaves:
        return scores
    keys = joint_keys(list(leaves.values()))
    count = _check_count("n_keep", n_keep, *keys.shape)
    won = torch.split(top(keys, count).reshape(-1), [leaf.numel() for leaf in leaves.values()])
    return rebuild([part.reshape(leaf.shape) for part, leaf in zip(won, leaves.values(), strict=True)])


def joint_keys(scores: list[Tensor]) -> Tensor:
    """Keys of several score tensors laid end to end, as one row in one integer dtype.

    >>> joint_keys([torch.ones(2), torch.zeros(1, 1, dtype=torch.float64)]).shape
    torch.Size([1, 3])
    """
    wide = torch.float64 if any(s.dtype == torch.float64 for s in scores) else torch.float32
    return torch.cat([rank_keys(s, dtype=wide).reshape(-1) for s in scores]).reshape(1, -1)


def bernoulli_mask(probs: Tensor, key: Tensor) -> Tensor:
    """Keep each element with its own probability, drawn from an explicit key.

    >>> sf.bernoulli_mask(torch.tensor([0.0, 1.0]), sf.random.key(0))
    tensor([False,  True])
    """
    return random.bernoulli(key, probs)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of `hard` with the gradient of `soft`.

    >>> soft = torch.tensor([0.3, 0.8])
    >>> torch.func.grad(lambda s: sf.straight_through((s > 0.5).float(), s).sum())(soft)
    tensor([1., 1.])

    The detach form, right under grad, vmap, jvp and compile (a custom autograd Function is silently
    ignored by a compiled `torch.func.grad`). Bengio et al. 2013, arXiv 1308.3432.
    """
    return hard.detach().to(soft.dtype) + (soft - soft.detach())
