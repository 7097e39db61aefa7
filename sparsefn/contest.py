"""Who wins each competition: the one door to selection, with a way for scores in memory and one for all others.

Plain CPU tensors are looked at in memory. Where vmap or compile hides it, one operator does the same once
tensors are plain again. Other devices and exported programs get operations of fixed shapes, which wait for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn import ranks, scan
from sparsefn.arrays import Array, array, each, memory
from sparsefn.lanes import select_rows
from sparsefn.parts import See, flat, part

Count: TypeAlias = int | Tensor
Flags: TypeAlias = Sequence[Tensor | None]

_TINY: Array = np.array([1e-45, 0.0], np.float32)


def winners(
    scores: Sequence[Tensor],
    counts: Sequence[Count],
    allow: Flags | None = None,
    deny: Flags | None = None,
    absolute: bool = False,
) -> list[Tensor]:
    """Masks of the best of each row of some tensors, as many as their counts say.

    >>> from sparsefn import contest
    >>> contest.winners([torch.tensor([[1.0, 3.0, 3.0, 2.0]])], [1])
    [tensor([[False,  True, False, False]])]

    `scores` are floats of shape (rows, width); a count is an int or a tensor, 0-d or (rows,). Larger scores win
    first, then the lower index; NaN ranks below -inf. `allow` and `deny` are bool tensors of the shape of
    the scores, or None: who may win, and who may not. Where fewer may than should, all of them win. With
    `absolute` scores are absolute values, which are not stored. Raises TypeError for scores that are not floats.
    """
    return _decided(list(scores), list(counts), _flags(allow, scores), _flags(deny, scores), False, absolute)


def joint_winners(
    scores: Sequence[Tensor],
    count: Count,
    allow: Flags | None = None,
    deny: Flags | None = None,
    absolute: bool = False,
) -> list[Tensor]:
    """Masks of the best of all tensors together: one competition, in their order.

    >>> from sparsefn import contest
    >>> contest.joint_winners([torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0]])], 1)
    [tensor([[False,  True]]), tensor([[False]])]

    The tensors are never laid end to end. All else is as in `winners`.
    """
    return _decided(list(scores), [count], _flags(allow, scores), _flags(deny, scores), True, absolute)


def totals(flags: Sequence[Tensor]) -> Tensor:
    """How many flags are set in each row of some bool tensors, end to end: int64.

    >>> from sparsefn import contest
    >>> contest.totals([torch.tensor([[True, False], [True, True]]), torch.tensor([[True]])])
    tensor([1, 2, 1])
    """
    seen = [array(rows) for rows in flags]
    if not flags or any(rows is None for rows in seen):
        return torch.cat([rows.sum(-1) for rows in flags]) if flags else torch.zeros(0, dtype=torch.int64)
    counts = [np.count_nonzero(row) for rows in seen if rows is not None for row in rows]
    return torch.tensor(counts, dtype=torch.int64)


def _flags(flags: Flags | None, scores: Sequence[Tensor]) -> list[Tensor | None]:
    return [None] * len(scores) if flags is None else list(flags)


def _decided(
    scores: list[Tensor],
    counts: list[Count],
    allow: list[Tensor | None],
    deny: list[Tensor | None],
    joint: bool,
    absolute: bool,
) -> list[Tensor]:
    for leaf in scores:
        if not leaf.is_floating_point():
            raise TypeError(f"expected floating-point scores, got {leaf.dtype}")
    full = [i for i, leaf in enumerate(scores) if leaf.numel()]
    if len(full) < len(scores):  # an operator takes two empty tensors for one memory
        own = counts if joint else [counts[i] for i in full]
        some, allowed, denied = ([tensors[i] for i in full] for tensors in (scores, allow, deny))
        rest = iter(_decided(some, own, allowed, denied, joint, absolute))  # type: ignore[arg-type]
        return [next(rest) if leaf.numel() else torch.zeros_like(leaf, dtype=torch.bool) for leaf in scores]
    if not scores:
        return []
    seen = _in_memory(scores, counts, allow, deny, joint, absolute)
    if seen is not None:
        return seen
    scores = [leaf.detach() for leaf in scores]
    if torch.compiler.is_exporting() or any(leaf.device.type != "cpu" for leaf in scores):
        return _in_fixed_shapes(scores, counts, allow, deny, joint, absolute)
    rows = [1] if joint else [leaf.shape[0] for leaf in scores]
    listed = [
        torch.as_tensor(count, dtype=torch.int64, device=scores[0].device).reshape(-1).expand(n)
        for count, n in zip(counts, rows, strict=True)
    ]
    out: list[Tensor] = _winners(scores, allow, deny, torch.cat(listed), joint, absolute)
    return out


def _in_memory(
    scores: list[Tensor],
    counts: list[Count],
    allow: list[Tensor | None],
    deny: list[Tensor | None],
    joint: bool,
    absolute: bool,
    see: See = array,
) -> list[Tensor] | None:
    numbers = [_number(count, see) for count in counts]
    parts = [part(*fields, see) for fields in zip(scores, allow, deny, strict=True)]
    if any(x is None for x in (*numbers, *parts)) or not _TINY[0] > _TINY[1]:  # subnormal numbers count as zero here
        return None
    seen = [at for at in parts if at is not None]
    if joint:
        scan.select([flat(at) for at in seen], np.asarray(numbers[0]).item(), absolute)
    else:
        jobs = list(zip(seen, numbers, strict=True))
        work = sum(at.out.size for at in seen)
        each(lambda job: select_rows(job[0], np.broadcast_to(job[1], job[0].out.shape[:1]), absolute), jobs, work)  # type: ignore[arg-type]
    return [torch.from_numpy(at.out) for at in seen]


def _number(count: Count, see: See) -> int | Array | None:
    if isinstance(count, int):
        return count
    seen = see(count)
    return None if seen is None else seen.reshape(-1)


def _in_fixed_shapes(
    scores: list[Tensor],
    counts: list[Count],
    allow: list[Tensor | None],
    deny: list[Tensor | None],
    joint: bool,
    absolute: bool,
) -> list[Tensor]:
    if absolute:
        scores = [leaf.abs() for leaf in scores]
    eligible = [_eligible(a, d) for a, d in zip(allow, deny, strict=True)]
    if not joint:
        keys = [ranks.rank_keys(leaf, flags) for leaf, flags in zip(scores, eligible, strict=True)]
        return [ranks.top(key, count) for key, count in zip(keys, counts, strict=True)]
    won = ranks.top(ranks.joint_keys(scores, eligible), counts[0])
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
    shares = [counts] if joint else list(torch.split(counts, [leaf.shape[0] for leaf in scores]))
    args = list(scores), shares, list(allow), list(deny), joint, absolute
    seen = _in_memory(*args, memory)  # type: ignore[arg-type]
    # Parts of one tensor may not leave an operator.
    return [mask.clone() for mask in _in_fixed_shapes(*args)] if seen is None else seen  # type: ignore[arg-type]


@_winners.register_fake
def _(
    scores: Sequence[Tensor],
    allow: Sequence[Tensor | None],
    deny: Sequence[Tensor | None],
    counts: Tensor,
    joint: bool,
    absolute: bool,
) -> list[Tensor]:
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

    def all_batched(tensors: Flags, dims: Any) -> list[Tensor | None]:
        pairs = zip(tensors, dims or [None] * len(tensors), strict=True)
        return [None if x is None else batched(x, dim) for x, dim in pairs]

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
