"""Who wins each competition: the one door to selection, with a way for scores in memory and one for all others.

Plain CPU tensors are looked at in memory. Where vmap or compile hides it, one operator does the same once
tensors are plain again. Other devices and exported programs get operations of fixed shapes, which wait for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.memory import Array, See, check_device, placed, visible, visible_inside
from sparsefn.engine.selection import bracket, groups, reference
from sparsefn.engine.selection.entries import flat, part
from sparsefn.engine.selection.rows import select_each

Count: TypeAlias = int | Tensor
Flags: TypeAlias = Sequence[Tensor | None]

_TINY: Array = np.array([1e-45, 0.0], np.float32)


def winners(
    scores: Sequence[Tensor],
    counts: Sequence[Count] | Tensor,
    allow: Flags | None = None,
    deny: Flags | None = None,
    absolute: bool = False,
) -> list[Tensor]:
    """Masks of the best of each row of some tensors, as many as their counts say.

    >>> from sparsefn.engine.selection import winners
    >>> winners.winners([torch.tensor([[1.0, 3.0, 3.0, 2.0]])], [1])
    [tensor([[False,  True, False, False]])]

    `scores` are floats of shape (rows, width); a count is an int or a tensor, 0-d or (rows,), or one tensor has
    the counts of all rows end to end. Larger scores win first, then the lower index; NaN ranks below -inf.
    `allow` and `deny` are bool tensors of the shape of the scores, or None: entries that compete, and that do not.
    Where fewer may than should, all of them win. With `absolute` scores are absolute values, which are not
    stored. Raises TypeError for scores that are not floats.
    """
    if len(scores) == 1 and allow is None is deny and scores[0].shape[0] == 1:
        seen = _alone(scores[0], counts[0], absolute)
        if seen is not None:
            return [seen]
    allowed, denied = _flags(allow, scores), _flags(deny, scores)
    if not any(leaf.shape[0] > 1 and leaf.shape[1] <= groups.WIDEST for leaf in scores):
        return _decided(list(scores), counts, allowed, denied, False, absolute)
    own = list(torch.split(counts, [leaf.shape[0] for leaf in scores])) if isinstance(counts, Tensor) else counts
    return [
        groups.top(leaf, _eligible(allow, deny), n, absolute=absolute)
        if leaf.shape[0] > 1 and leaf.shape[1] <= groups.WIDEST
        else _decided([leaf], [n], [allow], [deny], False, absolute)[0]
        for leaf, n, allow, deny in zip(scores, own, allowed, denied, strict=True)
    ]


def joint_winners(
    scores: Sequence[Tensor],
    count: Count,
    allow: Flags | None = None,
    deny: Flags | None = None,
    absolute: bool = False,
) -> list[Tensor]:
    """Masks of the best of all tensors together: one competition, in their order.

    >>> from sparsefn.engine.selection import winners
    >>> winners.joint_winners([torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0]])], 1)
    [tensor([[False,  True]]), tensor([[False]])]

    The tensors are never laid end to end. All else is as in `winners`.
    """
    return _decided(list(scores), [count], _flags(allow, scores), _flags(deny, scores), True, absolute)


def totals(flags: Sequence[Tensor]) -> Tensor:
    """How many flags are set in each row of some bool tensors, end to end: int64.

    >>> from sparsefn.engine.selection import winners
    >>> winners.totals([torch.tensor([[True, False], [True, True]]), torch.tensor([[True]])])
    tensor([1, 2, 1])
    """
    seen = [visible(rows) for rows in flags]
    if not flags or any(rows is None for rows in seen):
        return torch.cat([rows.sum(-1) for rows in flags]) if flags else torch.zeros(0, dtype=torch.int64, device="cpu")
    counts = [np.count_nonzero(row) for rows in seen if rows is not None for row in rows]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _alone(scores: Tensor, count: Count, absolute: bool) -> Tensor | None:
    # One small competition of plain float32 or float64 scores, without ado.
    if scores.numel() > bracket.SMALL or scores.dtype not in (torch.float32, torch.float64):
        return None
    seen, number = visible(scores), _number(count, visible)
    if seen is None or number is None or not _TINY[0] > _TINY[1]:
        return None
    values = seen[0]
    keep = bracket.best(
        np.abs(values) if absolute else values, int(number) if isinstance(number, int) else number.item()
    )
    return torch.from_numpy(keep[None])


def _flags(flags: Flags | None, scores: Sequence[Tensor]) -> list[Tensor | None]:
    return [None] * len(scores) if flags is None else list(flags)


def _decided(
    scores: list[Tensor],
    counts: Sequence[Count] | Tensor,
    allow: list[Tensor | None],
    deny: list[Tensor | None],
    joint: bool,
    absolute: bool,
) -> list[Tensor]:
    for leaf in scores:
        if not leaf.is_floating_point():
            raise TypeError(f"expected floating-point scores, got {leaf.dtype}")
    if not scores:
        return []
    seen = _in_memory(scores, counts, allow, deny, joint, absolute)
    if seen is not None:
        return seen
    for leaf, *flags in zip(scores, allow, deny, strict=True):
        check_device("scores and flags", leaf.device, *flags)
    if joint:
        check_device("all scores of one competition", scores[0].device, *scores)
    scores = [leaf.detach() for leaf in scores]
    rows = [1] if joint else [leaf.shape[0] for leaf in scores]
    if torch.compiler.is_exporting() or any(leaf.device.type != "cpu" for leaf in scores):
        split = torch.split(counts, rows) if isinstance(counts, Tensor) else counts
        own = [placed(n, leaf.device) for n, leaf in zip(split, scores, strict=False)]
        return _in_fixed_shapes(scores, own, allow, deny, joint, absolute)
    whole = counts if isinstance(counts, Tensor) else end_to_end(counts, rows, scores[0].device)
    counts = placed(whole, scores[0].device)
    # An operator takes two empty tensors for one memory.
    some = [i for i, leaf in enumerate(scores) if leaf.numel()]
    if not joint and len(some) < len(rows):
        counts = torch.cat([torch.split(counts, rows)[i] for i in some]) if some else counts[:0]
    kept = [[tensors[i] for i in some] for tensors in (scores, allow, deny)]
    won = iter(_winners(*kept, counts, joint, absolute) if some else [])
    return [next(won) if leaf.numel() else torch.zeros_like(leaf, dtype=torch.bool) for leaf in scores]


def end_to_end(counts: Sequence[Count], rows: Sequence[int], device: torch.device) -> Tensor:
    """The counts of all rows in one int64 tensor: each is an int or a tensor, 0-d or (rows,).

    >>> from sparsefn.engine.selection import winners
    >>> winners.end_to_end([3, torch.tensor([1, 2])], [2, 2], torch.device("cpu"))
    tensor([3, 3, 1, 2])
    """
    if all(isinstance(count, int) for count in counts):
        listed = [count for count, n in zip(counts, rows, strict=True) for _ in range(n)]
        return torch.tensor(listed, dtype=torch.int64, device=device)
    pairs = zip((placed(count, device) for count in counts), rows, strict=True)
    return torch.cat([torch.as_tensor(n, dtype=torch.int64, device=device).reshape(-1).expand(r) for n, r in pairs])


def _in_memory(
    scores: list[Tensor],
    counts: Sequence[Count] | Tensor,
    allow: list[Tensor | None],
    deny: list[Tensor | None],
    joint: bool,
    absolute: bool,
    see: See = visible,
) -> list[Tensor] | None:
    if isinstance(counts, Tensor):
        whole = see(counts)
        if whole is None:
            return None
        ends = np.cumsum([0, *(1 if joint else leaf.shape[0] for leaf in scores)]).tolist()
        numbers: list[int | Array | None] = [whole[a:b] for a, b in pairwise(ends)]
    else:
        numbers = [_number(count, see) for count in counts]
    parts = [part(*fields, see) for fields in zip(scores, allow, deny, strict=True)]
    if any(x is None for x in (*numbers, *parts)) or not _TINY[0] > _TINY[1]:  # subnormal numbers count as zero here
        return None
    seen = [at for at in parts if at is not None]
    if joint:
        bracket.select([flat(at) for at in seen], np.asarray(numbers[0]).item(), absolute)
    else:
        select_each(seen, [np.full(at.out.shape[:1], n) for at, n in zip(seen, numbers, strict=True)], absolute)
    return [torch.from_numpy(at.out) for at in seen]


def _number(count: Count, see: See) -> int | Array | None:
    if isinstance(count, int):
        return count
    seen = see(count)
    return None if seen is None else seen.reshape(-1)


def _in_fixed_shapes(
    scores: list[Tensor],
    counts: Sequence[Count],
    allow: list[Tensor | None],
    deny: list[Tensor | None],
    joint: bool,
    absolute: bool,
) -> list[Tensor]:
    if absolute:
        scores = [leaf.abs() for leaf in scores]
    eligible = [_eligible(a, d) for a, d in zip(allow, deny, strict=True)]
    if not joint:
        keys = [reference.rank_keys(leaf, flags) for leaf, flags in zip(scores, eligible, strict=True)]
        return [reference.top(key, count) for key, count in zip(keys, counts, strict=True)]
    won = reference.top(reference.joint_keys(scores, eligible), counts[0])
    parts = torch.split(won.reshape(-1), [leaf.numel() for leaf in scores])
    return [mask.reshape(leaf.shape) for mask, leaf in zip(parts, scores, strict=True)]


def _eligible(allow: Tensor | None, deny: Tensor | None) -> Tensor | None:
    if deny is None:
        return allow
    return ~deny if allow is None else allow & ~deny


# ---- the operator --------------------------------------------------------------------------------


@torch.library.custom_op("sparsefn::winners", mutates_args=())
def _winners(
    scores: Sequence[Tensor],
    allow: Sequence[Tensor | None],
    deny: Sequence[Tensor | None],
    counts: Tensor,
    joint: bool,
    absolute: bool,
) -> list[Tensor]:
    """Masks like the scores, with the counts of all rows end to end, or the one count."""
    seen = _in_memory(list(scores), counts, list(allow), list(deny), joint, absolute, visible_inside)
    if seen is not None:
        return seen
    shares = [counts] if joint else list(torch.split(counts, [leaf.shape[0] for leaf in scores]))
    won = _in_fixed_shapes(list(scores), shares, list(allow), list(deny), joint, absolute)
    return [mask.clone() for mask in won]  # parts of one tensor may not leave an operator


@_winners.register_fake
def _(scores: Sequence[Tensor], *rest: object) -> list[Tensor]:
    return [torch.empty(leaf.shape, dtype=torch.bool, device=leaf.device) for leaf in scores]


@_winners.register_vmap
def _(
    info: object,
    in_dims: tuple[Any, ...],
    scores: Sequence[Tensor],
    allow: Sequence[Tensor | None],
    deny: Sequence[Tensor | None],
    counts: Tensor,
    joint: bool,
    absolute: bool,
) -> tuple[list[Tensor], list[int]]:
    members: int = info.batch_size  # type: ignore[attr-defined]

    def batched(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(members, *x.shape) if dim is None else x.movedim(dim, 0)

    def all_batched(tensors: Flags, dims: Sequence[int | None]) -> list[Tensor | None]:
        return [None if x is None else batched(x, dim) for x, dim in zip(tensors, dims, strict=True)]

    fields = [all_batched(*pair) for pair in zip((scores, allow, deny), in_dims, strict=False)]
    shares = batched(counts, in_dims[3])
    if joint:
        one = ([[None if x is None else x[i] for x in row] for row in fields] for i in range(members))
        won = [_winners(*member, share, True, absolute) for member, share in zip(one, shares, strict=True)]
        return [torch.stack(masks) for masks in zip(*won, strict=True)], [0] * len(scores)
    shapes = [leaf.shape for leaf in fields[0] if leaf is not None]
    rows = [[None if x is None else x.flatten(0, 1) for x in row] for row in fields]
    parts = [share.reshape(-1) for share in torch.split(shares, [shape[1] for shape in shapes], -1)]
    masks = _winners(*rows, torch.cat(parts), False, absolute)
    return [mask.reshape(shape) for mask, shape in zip(masks, shapes, strict=True)], [0] * len(scores)
