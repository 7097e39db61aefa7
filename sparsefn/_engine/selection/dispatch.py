"""Exact top-k of each row: numpy for CPU tensors, one operator under vmap and compile,
fixed-shape torch elsewhere.

All selection enters here: no other package imports another module of this one. On CPU
memory `_in_memory` takes `bracket` for one row, `groups` for rows of few units, `rows`
for other rows and `segments` for rows that lie end to end; elsewhere `joined` serves
many leaves of a device, and an operator serves transforms, compiled code and kernels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine import backends
from sparsefn._engine.leaves import check_device, pays, placed
from sparsefn._engine.numbers import FLOATS
from sparsefn._engine.processes import Extent, dealing
from sparsefn._engine.selection import (
    among_processes,
    batches,
    bracket,
    fixed_counts,
    narrow_rows,
    per_process,
)
from sparsefn._engine.selection.entries import (
    TINY,
    Count,
    Counts,
    Entry,
    arrays,
    check,
    counts_of_rows,
    reshaped,
)
from sparsefn._engine.selection.rows import select_each
from sparsefn._engine.selection.segments import count_segments, select_segments
from sparsefn._engine.torch_limits import is_exporting
from sparsefn._engine.transforms import (
    Array,
    See,
    as_numpy,
    as_numpy_inside,
    is_in_torch_dispatch_mode,
    transformed,
)


def winners(
    entries: Sequence[Entry], counts: Counts, *, joint: bool = False
) -> list[Tensor]:
    """Masks of the best units of each row of some tensors, as many as their counts say.

    >>> from sparsefn._engine.selection.dispatch import Entry, winners
    >>> scores = torch.tensor([[1.0, 3.0, -3.0, 2.0]])
    >>> winners([Entry(scores), Entry(scores, absolute=True)], [1, 2])
    [tensor([[False,  True, False, False]]), tensor([[False,  True,  True, False]])]
    >>> winners([Entry(scores), Entry(scores[:, 2:], absolute=True)], [2], joint=True)
    [tensor([[False,  True, False, False]]), tensor([[ True, False]])]

    Each row of scores (rows, units) is a competition, each column of each row of scores
    (rows, units, columns), and each segment of scores with `segments`. Its count is an
    int or an integer tensor of any value: one count an entry, () or (1,), or one a
    competition, (rows * columns,). One tensor may hold the counts of all competitions
    end to end. With `joint` there is one competition of all entries, in their order and
    row-major inside, and one count; nothing is concatenated. Larger scores win first,
    then the lower index; NaN ranks below -inf. Where fewer units compete than the count
    says, all of them win. Raises TypeError for scores that are not floats.
    """
    # wide: whether columns must be laid out as rows
    wide = False
    floats = True
    extents = False
    for scores, _, _, _, extent, _ in entries:
        floats = floats and scores.dtype in FLOATS
        wide = wide or (scores.ndim == 3 and not fixed_counts.is_narrow(scores.shape))
        extents = extents or extent is not None
    if extents:
        return among_processes.winners(
            entries, _by_entry(entries, counts, joint), joint, winners
        )
    if not floats:
        check(entries)
    if not entries:
        return []
    if wide and not joint:
        rows = []
        for x in entries:
            rows.append(
                x if fixed_counts.is_narrow(x.scores.shape) else fixed_counts.as_rows(x)
            )
        pairs = zip(winners(rows, counts), entries, strict=True)
        return [
            fixed_counts.laid_back(mask, entry.scores.shape) for mask, entry in pairs
        ]
    seen = _in_memory(entries, counts, joint, as_numpy)
    if seen is not None:
        return seen
    return _elsewhere(
        [entry._replace(scores=entry.scores.detach()) for entry in entries],
        counts,
        joint,
    )


def dealt_winners(entries: Sequence[Entry], counts: Counts) -> list[Tensor]:
    """`winners`, whose competitions processes deal out inside of `processes.dealt`.

    >>> from sparsefn._engine.selection import Entry, dealt_winners
    >>> dealt_winners([Entry(torch.tensor([[1.0, 3.0]]))], [1])
    [tensor([[False,  True]])]
    """
    if not torch.compiler.is_compiling() and dealing():
        own = _by_entry(entries, counts, joint=False)
        return per_process.winners(entries, own, winners)
    return winners(entries, counts)


def totals(
    flags: Sequence[Tensor],
    extents: Sequence[Extent | None] | None = None,
    segments: Sequence[Sequence[int] | None] | None = None,
) -> Tensor:
    """How many flags are set in each competition of some bool tensors, end to end:
    int64. Competitions are rows, columns of rows, or segments of a tensor of one
    dimension.

    Flags with an extent are the part of this process, and all processes of its groups
    count together.

    >>> from sparsefn._engine.selection import dispatch
    >>> dispatch.totals(
    ...     [torch.tensor([[True, False], [True, True]]), torch.tensor([[True]])]
    ... )
    tensor([1, 2, 1])
    """
    if segments is not None and any(sizes is not None for sizes in segments):
        return torch.cat(list(map(_totals_of_segments, flags, segments)))
    if any(x.ndim == 3 for x in flags):
        flags = list(map(fixed_counts.grouped, flags))
    if extents is not None and any(extent is not None for extent in extents):
        own = torch.split(totals(flags), [len(rows) for rows in flags])
        return torch.cat(among_processes.totals(own, extents))
    seen = as_numpy(flags)
    if seen is None:
        if pays(flags):
            return batches.totals(flags)
        if flags:
            return torch.cat([rows.sum(-1) for rows in flags])
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    counts = [np.count_nonzero(row) for rows in seen for row in rows]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _totals_of_segments(flags: Tensor, sizes: Sequence[int] | None) -> Tensor:
    if sizes is None:
        return totals([flags])
    seen = as_numpy([flags])
    if seen is None:
        return batches.totals_of_segments(flags, sizes)
    return torch.from_numpy(count_segments(seen[0], sizes))


def totals_of(entries: Sequence[Entry], flags: Sequence[Tensor]) -> Tensor:
    """The totals of flags of the units of some entries."""
    return totals(flags, [entry.extent for entry in entries])


# ---- visible memory ------------------------------------------------------------------


def _in_memory(
    entries: Sequence[Entry],
    counts: Counts,
    joint: bool,
    see: See,
) -> list[Tensor] | None:
    seen = arrays(entries, see)
    numbers = None if seen is None else _numbers(entries, counts, joint, see)
    # this thread counts subnormal numbers as zero
    if seen is None or numbers is None or not TINY[0] > TINY[1]:
        return None
    first = seen[0].out
    if joint or (len(seen) == 1 and first.ndim == 2 and first.shape[0] == 1):
        (k,) = numbers
        bracket.write_best(seen, k if isinstance(k, int) else int(k.item()))
        return [torch.from_numpy(at.out) for at in seen]
    tables = []
    for at, n, entry in zip(seen, numbers, entries, strict=True):
        if entry.segments is not None:
            select_segments(at, np.asarray(n), entry.segments)
        elif not fixed_counts.is_narrow(at.out.shape):
            tables.append((at, np.asarray(n)))
        elif at.out.ndim == 3:
            narrow_rows.top_of_groups(at, np.asarray(n))
        else:
            narrow_rows.top_of_groups(reshaped(at, (*at.out.shape, 1)), np.asarray(n))
    if tables:
        select_each(tables)
    return [torch.from_numpy(at.out) for at in seen]


def _numbers(
    entries: Sequence[Entry],
    counts: Counts,
    joint: bool,
    see: See,
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
    ends = list(accumulate(_spans(entries, joint), initial=0))
    return [whole[0][a:b] for a, b in pairwise(ends)]


def _spans(entries: Sequence[Entry], joint: bool) -> list[int]:
    # How many counts each entry has in a tensor of all.
    if joint:
        return [1]
    spans = []
    for entry in entries:
        sizes = entry.segments
        if sizes is None:
            # `fixed_counts.competitions`, spelt out, as it runs for each leaf
            spans.append(math.prod(entry.scores.shape[::2]))
        else:
            spans.append(len(sizes))
    return spans


def _by_entry(entries: Sequence[Entry], counts: Counts, joint: bool) -> Sequence[Count]:
    if isinstance(counts, Tensor):
        return torch.split(counts, _spans(entries, joint))
    return counts


def _placed(entries: Sequence[Entry], counts: Counts, joint: bool) -> list[Count]:
    pairs = zip(_by_entry(entries, counts, joint), entries, strict=False)
    return [placed(n, entry.scores.device) for n, entry in pairs]


# ---- other devices, transforms and programs ------------------------------------------


def _elsewhere(entries: Sequence[Entry], counts: Counts, joint: bool) -> list[Tensor]:
    device = entries[0].scores.device
    for scores, allow, deny, *_ in entries:
        check_device("scores and flags", scores.device, allow, deny)
        if joint:
            check_device("all scores of one competition", device, scores)
    hidden = transformed() or is_in_torch_dispatch_mode()  # which may count operations
    if not hidden and all(entry.scores.is_meta for entry in entries):
        # torch's own shapes overflow
        return [torch.empty_like(entry.scores, dtype=torch.bool) for entry in entries]
    kinds = {entry.scores.device.type for entry in entries}
    by_operator = all(
        kind == "cpu" or backends.has_backend("winners", kind) for kind in kinds
    )
    has_segments = any(entry.segments is not None for entry in entries)
    if (has_segments and not hidden) or (not by_operator and batches.takes(entries)):
        own = _placed(entries, counts, joint)
        if joint:
            return batches.joint_masks(entries, own[0])
        return batches.winners(entries, own)
    if not by_operator or is_exporting():
        own = _placed(entries, counts, joint)
        if joint:
            return fixed_counts.jointly(entries, own[0])
        return [fixed_counts.of_rows(*pair) for pair in zip(entries, own, strict=True)]
    return _by_operator_or_pairs(entries, counts, joint)


def _by_operator_or_pairs(
    entries: Sequence[Entry], counts: Counts, joint: bool
) -> list[Tensor]:
    device = entries[0].scores.device
    # Of few units a row, compiled code compares pairs, which it fuses with the rest.
    pairs_pay = torch.compiler.is_compiling() and not joint
    by_pairs = [
        pairs_pay and fixed_counts.is_few(entry.scores.shape) for entry in entries
    ]
    # An operator takes two empty tensors for one memory.
    for_operator = []
    for i, entry in enumerate(entries):
        if not by_pairs[i] and entry.scores.numel():
            for_operator.append(i)
    if isinstance(counts, Tensor) and len(for_operator) == len(entries):
        spans = _spans(entries, joint)
        return _by_operator(entries, placed(counts, device), spans, joint)
    own = _placed(entries, counts, joint)
    won: dict[int, Tensor] = {}
    if for_operator:
        given = own if joint else [own[i] for i in for_operator]
        spans = [n.numel() if isinstance(n, Tensor) else 1 for n in given]
        end_to_end = counts_of_rows(given, spans, device)
        some = [entries[i] for i in for_operator]
        masks = _by_operator(some, end_to_end, spans, joint)
        won |= zip(for_operator, masks, strict=True)
    for i, entry in enumerate(entries):
        if by_pairs[i]:
            won[i] = fixed_counts.of_rows(entry, own[i])
        elif i not in won:
            won[i] = torch.zeros_like(entry.scores, dtype=torch.bool)
    return [won[i] for i in range(len(entries))]


# ---- the operator --------------------------------------------------------------------


def _by_operator(
    entries: Sequence[Entry], counts: Tensor, spans: Sequence[int], joint: bool
) -> list[Tensor]:
    scores = [entry.scores for entry in entries]
    allow = [entry.allow for entry in entries]
    deny = [entry.deny for entry in entries]
    absolute = [entry.absolute for entry in entries]
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
    """Masks like the scores. The counts stand end to end: one an entry or one a
    competition, as the spans say.
    """
    entries = [
        Entry(*fields) for fields in zip(scores, allow, deny, absolute, strict=True)
    ]
    device = scores[0].device.type
    won: list[Tensor] | None = backends.call_backend(
        "winners", device, entries, counts, spans, joint
    )
    own = torch.split(counts, list(spans))
    won = won or _in_memory(entries, own, joint, as_numpy_inside)
    if won is not None:
        return won
    if joint:
        won = fixed_counts.jointly(entries, own[0])
    else:
        won = [fixed_counts.of_rows(*pair) for pair in zip(entries, own, strict=True)]
    # parts of one tensor may not leave an operator
    return [mask.clone() for mask in won]


@_operator.register_fake
def _(scores: Sequence[Tensor], *rest: object) -> list[Tensor]:
    return [
        torch.empty(leaf.shape, dtype=torch.bool, device=leaf.device) for leaf in scores
    ]


@_operator.register_vmap
def _(
    info: object, in_dims: tuple[Any, ...], *given: Any
) -> tuple[list[Tensor], list[int]]:
    *columns, absolute, counts, spans, joint = given
    members: int = info.batch_size  # type: ignore[attr-defined]
    out_dims = [0] * len(columns[0])

    def batched(x: Any, dim: int | None) -> Any:
        if x is None:
            return None
        return x.expand(members, *x.shape) if dim is None else x.movedim(dim, 0)

    def each(fn: Callable[[Tensor], Tensor]) -> list[list[Tensor | None]]:
        # A function of scores and flags, some of which are None.
        made = []
        for column in columns:
            made.append([None if x is None else fn(x) for x in column])
        return made

    for at, dims in enumerate(in_dims[:3]):
        columns[at] = list(map(batched, columns[at], dims))
    every = batched(counts, in_dims[4])
    if joint:
        won = []
        for i in range(members):
            member = each(operator.itemgetter(i))
            won.append(_operator(*member, absolute, every[i], spans, True))
        return [torch.stack(masks) for masks in zip(*won, strict=True)], out_dims
    # The rows of all members are rows of one call.
    shapes = [x.shape for x in columns[0]]
    rows = each(lambda x: x.flatten(0, 1))
    parts = []
    for part, shape in zip(torch.split(every, list(spans), -1), shapes, strict=True):
        if in_dims[4] is None and part.shape[1] == 1:  # one count for all members
            parts.append(part[0])
        else:
            of_rows = part.expand(members, fixed_counts.competitions(shape[1:]))
            parts.append(of_rows.reshape(-1))
    lengths = [part.numel() for part in parts]
    masks = _operator(*rows, absolute, torch.cat(parts), lengths, False)
    pairs = zip(masks, shapes, strict=True)
    return [mask.reshape(shape) for mask, shape in pairs], out_dims
