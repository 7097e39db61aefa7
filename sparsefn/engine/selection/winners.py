"""Exact top-k of each row: numpy for CPU tensors, one operator under vmap and compile, fixed-shape torch elsewhere.

This is the one door to selection: nothing outside this folder imports another module of it. README.md one folder up
tells which way serves when.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine import kernels
from sparsefn.engine.lie import Lie
from sparsefn.engine.memory import check_device, placed
from sparsefn.engine.selection import bracket, groups, reference, shared
from sparsefn.engine.selection.entries import TINY, arrays, check, eligible, reshaped
from sparsefn.engine.selection.entries import Entry as Entry
from sparsefn.engine.selection.rows import select_each
from sparsefn.engine.selection.tiles import tiles as tiles
from sparsefn.engine.transforms import Array, See, visible, visible_inside

Count: TypeAlias = int | Tensor
Counts: TypeAlias = Sequence[Count] | Tensor


def winners(entries: Sequence[Entry], counts: Counts, *, joint: bool = False) -> list[Tensor]:
    """Masks of the best units of each row of some tensors, as many as their counts say.

    >>> from sparsefn.engine.selection.winners import Entry, winners
    >>> scores = torch.tensor([[1.0, 3.0, -3.0, 2.0]])
    >>> winners([Entry(scores), Entry(scores, absolute=True)], [1, 2])
    [tensor([[False,  True, False, False]]), tensor([[False,  True,  True, False]])]
    >>> winners([Entry(scores), Entry(scores[:, 2:], absolute=True)], [2], joint=True)
    [tensor([[False,  True, False, False]]), tensor([[ True, False]])]

    Each row of scores (rows, units) is a competition, and each column of each row of scores (rows, units, columns).
    Its count is an int or an integer tensor of any value: one count an entry, () or (1,), or one a competition,
    (rows * columns,). One tensor may hold the counts of all competitions end to end. With `joint` there is one
    competition of all entries, in their order and row-major inside, and one count; nothing is concatenated. Larger
    scores win first, then the lower index; NaN ranks below -inf. Where fewer units compete than the count says, all
    of them win. Raises TypeError for scores that are not floats.
    """
    wide, floats, lies = False, True, False  # wide: whether columns are to be laid out as rows
    for scores, _, _, _, lie in entries:
        floats = floats and scores.is_floating_point()
        wide = wide or (scores.ndim == 3 and not _is_narrow(scores.shape))
        lies = lies or lie is not None
    if lies:
        own = torch.split(counts, _spans(entries, joint)) if isinstance(counts, Tensor) else counts
        return shared.winners(entries, own, joint, winners)
    if not floats:
        check(entries)
    if not entries:
        return []
    if wide and not joint:
        masks = winners([x if _is_narrow(x.scores.shape) else _as_rows(x) for x in entries], counts)
        return [_laid_back(mask, entry.scores.shape) for mask, entry in zip(masks, entries, strict=True)]
    seen = _in_memory(entries, counts, None, joint, visible)
    if seen is not None:
        return seen
    return _elsewhere([entry._replace(scores=entry.scores.detach()) for entry in entries], counts, joint)


def totals(flags: Sequence[Tensor], lies: Sequence[Lie | None] | None = None) -> Tensor:
    """How many flags are set in each row of some bool tensors, end to end: int64.

    Flags with a lie are those of this process, and all processes of its groups count together.

    >>> from sparsefn.engine.selection import winners
    >>> winners.totals([torch.tensor([[True, False], [True, True]]), torch.tensor([[True]])])
    tensor([1, 2, 1])
    """
    if lies is not None and any(lie is not None for lie in lies):
        own = torch.split(totals(flags), [len(rows) for rows in flags])
        return torch.cat(shared.totals(own, lies))
    seen = visible(flags)
    if not flags or seen is None:
        return torch.cat([rows.sum(-1) for rows in flags]) if flags else torch.zeros(0, dtype=torch.int64, device="cpu")
    counts = [np.count_nonzero(row) for rows in seen for row in rows]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


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


# ---- shapes --------------------------------------------------------------------------------------


def _competitions(shape: Sequence[int]) -> int:
    return shape[0] * shape[2] if len(shape) == 3 else shape[0]


def _is_narrow(shape: Sequence[int]) -> bool:
    # Whether units are compared one with another, and nothing is sorted.
    return 0 < shape[1] <= groups.WIDEST and (shape[0] > 1 or (len(shape) == 3 and shape[2] > 1))


def _as_rows(entry: Entry) -> Entry:
    # The entry as (rows, units): the units of a column then follow one another.
    if entry.scores.ndim == 2:
        return entry
    scores, allow, deny = (
        None if x is None else x.transpose(1, 2).reshape(_competitions(x.shape), x.shape[1]) for x in entry[:3]
    )
    assert scores is not None
    return Entry(scores, allow, deny, entry.absolute)


def _laid_back(mask: Tensor, shape: Sequence[int]) -> Tensor:
    if mask.ndim == len(shape):
        return mask
    return mask.reshape(shape[0], shape[2], shape[1]).transpose(1, 2).contiguous()


# ---- visible memory ------------------------------------------------------------------------------


def _in_memory(
    entries: Sequence[Entry], counts: Counts, spans: Sequence[int] | None, joint: bool, see: See
) -> list[Tensor] | None:
    seen = arrays(entries, see)
    numbers = None if seen is None else _numbers(entries, counts, spans, joint, see)
    if seen is None or numbers is None or not TINY[0] > TINY[1]:  # this thread counts subnormal numbers as zero
        return None
    if joint or (len(seen) == 1 and seen[0].out.shape[0] == 1 and seen[0].out.ndim == 2):  # one competition
        (k,) = numbers
        bracket.write_best(seen, k if isinstance(k, int) else int(k.item()))
    else:
        rest = []
        for at, n in zip(seen, numbers, strict=True):
            if _is_narrow(at.out.shape):
                groups.top_of_groups(at if at.out.ndim == 3 else reshaped(at, (*at.out.shape, 1)), np.asarray(n))
            else:
                rest.append((at, np.asarray(n)))
        if rest:
            select_each(rest)
    return [torch.from_numpy(at.out) for at in seen]


def _numbers(
    entries: Sequence[Entry], counts: Counts, spans: Sequence[int] | None, joint: bool, see: See
) -> Sequence[int | Array] | None:
    # The counts of each entry, one or one a competition.
    if not isinstance(counts, Tensor):
        tensors = [count for count in counts if isinstance(count, Tensor)]
        if not tensors:
            return counts  # type: ignore[return-value]
        known = see(tensors)
        if known is None:
            return None
        left = iter(known)
        return [next(left) if isinstance(count, Tensor) else count for count in counts]
    whole = see([counts])
    if whole is None:
        return None
    ends = np.cumsum([0, *(spans or _spans(entries, joint))]).tolist()
    return [whole[0][a:b] for a, b in pairwise(ends)]


def _spans(entries: Sequence[Entry], joint: bool) -> list[int]:
    return [1] if joint else [_competitions(entry.scores.shape) for entry in entries]


# ---- other devices, transforms and programs -------------------------------------------------------


def _elsewhere(entries: Sequence[Entry], counts: Counts, joint: bool) -> list[Tensor]:
    device = entries[0].scores.device
    for scores, allow, deny, *_ in entries:
        check_device("scores and flags", scores.device, allow, deny)
        if joint:
            check_device("all scores of one competition", device, scores)
    exported = torch.compiler.is_exporting() or not all(kernels.has_own_way(x.scores.device.type) for x in entries)
    fused = [exported or (torch.compiler.is_compiling() and not joint and _is_few(entry.scores)) for entry in entries]
    # An operator takes two empty tensors for one memory.
    left = [i for i, entry in enumerate(entries) if not fused[i] and entry.scores.numel()]
    if isinstance(counts, Tensor) and len(left) == len(entries):
        return _by_operator(entries, placed(counts, device), _spans(entries, joint), joint)
    split = torch.split(counts, _spans(entries, joint)) if isinstance(counts, Tensor) else counts
    own = [placed(n, entry.scores.device) for n, entry in zip(split, entries, strict=False)]
    if exported and joint:
        return _jointly(entries, own[0])
    won = {i: _of_rows(entries[i], own[i]) for i in range(len(entries)) if fused[i]}
    if left:
        some = own if joint else [own[i] for i in left]
        spans = [n.numel() if isinstance(n, Tensor) else 1 for n in some]
        masks = _by_operator([entries[i] for i in left], end_to_end(some, spans, device), spans, joint)
        won |= dict(zip(left, masks, strict=True))
    return [won[i] if i in won else torch.zeros_like(x.scores, dtype=torch.bool) for i, x in enumerate(entries)]


def _is_few(scores: Tensor) -> bool:
    return _is_narrow(scores.shape) and scores.shape[1] <= groups.PAIRED


def _of_rows(entry: Entry, count: Count) -> Tensor:
    # By operations of fixed shapes.
    few, shape = _is_few(entry.scores), entry.scores.shape
    entry = entry if few else _as_rows(entry)
    open_ = eligible(entry.allow, entry.deny)
    keys = reference.rank_keys(entry.scores.abs() if entry.absolute else entry.scores, open_)
    if not few:
        return _laid_back(reference.top_of_rows(keys, count), shape)
    if isinstance(count, Tensor):
        count = count.reshape(()) if count.numel() == 1 else count.reshape(shape[0], *shape[2:])
    won = groups.top_by_pairs(keys, count)
    return won if open_ is None else won & open_


def _jointly(entries: Sequence[Entry], count: Count) -> list[Tensor]:
    scores = [entry.scores.abs() if entry.absolute else entry.scores for entry in entries]
    keys = reference.joint_keys(scores, [eligible(entry.allow, entry.deny) for entry in entries])
    parts = torch.split(reference.top_of_rows(keys, count).reshape(-1), [leaf.numel() for leaf in scores])
    return [mask.reshape(leaf.shape) for mask, leaf in zip(parts, scores, strict=True)]


# ---- the operator --------------------------------------------------------------------------------


def _by_operator(entries: Sequence[Entry], counts: Tensor, spans: Sequence[int], joint: bool) -> list[Tensor]:
    scores, allow, deny, absolute = (list(column) for column in zip(*(entry[:4] for entry in entries), strict=True))
    return _operator(scores, allow, deny, absolute, counts, spans, joint)  # type: ignore[no-any-return]


@torch.library.custom_op("sparsefn::winners", mutates_args=())
def _operator(
    scores: Sequence[Tensor],
    allow: Sequence[Tensor | None],
    deny: Sequence[Tensor | None],
    absolute: Sequence[bool],
    counts: Tensor,
    spans: Sequence[int],
    joint: bool,
) -> list[Tensor]:
    """Masks like the scores. The counts stand end to end: one an entry or one a competition, as the spans say."""
    entries = [Entry(*fields) for fields in zip(scores, allow, deny, absolute, strict=True)]
    won = kernels.winners(entries, counts, spans, joint) or _in_memory(entries, counts, spans, joint, visible_inside)
    if won is None:
        own = torch.split(counts, list(spans))
        won = _jointly(entries, own[0]) if joint else [_of_rows(x, n) for x, n in zip(entries, own, strict=True)]
        return [mask.clone() for mask in won]  # parts of one tensor may not leave an operator
    return won


@_operator.register_fake
def _(scores: Sequence[Tensor], *rest: object) -> list[Tensor]:
    return [torch.empty(leaf.shape, dtype=torch.bool, device=leaf.device) for leaf in scores]


@_operator.register_vmap
def _(
    info: object,
    in_dims: tuple[Any, ...],
    scores: Sequence[Tensor],
    allow: Sequence[Tensor | None],
    deny: Sequence[Tensor | None],
    absolute: Sequence[bool],
    counts: Tensor,
    spans: Sequence[int],
    joint: bool,
) -> tuple[list[Tensor], list[int]]:
    members: int = info.batch_size  # type: ignore[attr-defined]

    def batched(x: Tensor, dim: int | None) -> Tensor:
        return x.expand(members, *x.shape) if dim is None else x.movedim(dim, 0)

    def all_batched(tensors: Sequence[Tensor | None], dims: Sequence[int | None]) -> list[Tensor | None]:
        return [None if x is None else batched(x, dim) for x, dim in zip(tensors, dims, strict=True)]

    columns = [all_batched(*pair) for pair in zip((scores, allow, deny), in_dims, strict=False)]
    every, own_counts = batched(counts, in_dims[4]), in_dims[4] is not None
    if joint:
        one = ([[None if x is None else x[i] for x in column] for column in columns] for i in range(members))
        won = [_operator(*member, absolute, n, spans, True) for member, n in zip(one, every, strict=True)]
        return [torch.stack(masks) for masks in zip(*won, strict=True)], [0] * len(scores)
    # The rows of all members are rows of one call.
    shapes = [x.shape for x in columns[0] if x is not None]
    rows = [[None if x is None else x.flatten(0, 1) for x in column] for column in columns]
    parts = []
    for part, shape in zip(torch.split(every, list(spans), -1), shapes, strict=True):
        shared = not own_counts and part.shape[1] == 1
        parts.append(part[0] if shared else part.expand(members, _competitions(shape[1:])).reshape(-1))
    masks = _operator(*rows, absolute, torch.cat(parts), [part.numel() for part in parts], False)
    return [mask.reshape(shape) for mask, shape in zip(masks, shapes, strict=True)], [0] * len(scores)
