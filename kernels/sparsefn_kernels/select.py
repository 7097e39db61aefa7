"""Exact selection on a GPU in a fixed number of launches, for any number of rows and
tensors.

Rows of few units, and segments of few units, take one launch each kind. Larger
segments: a bracket of the threshold from a sample; one pass over all scores that writes
the mask above the bracket and keeps what is inside it; passes over what was kept, that
find the threshold, ties by place; and the rest of the mask. Where the bracket missed,
the same passes read the scores: each segment decides by itself, on the device, and
nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.selection import Entry
from sparsefn_kernels.device_tables import on, write
from sparsefn_kernels.source import digits, guess, narrow, whole
from sparsefn_kernels.tables import Leaf, Plan, Tuning, plan, steps

# units of a call: places are 32-bit words, and are counted in whole chunks
MOST = 1 << 30
NARROW = 32  # units of a row that are compared one with another
_INFINITY = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF << 52,
}
_BINS = 256
_DEFAULT = Tuning()


def winners(
    entries: Sequence[Entry],
    counts: Tensor,
    spans: Sequence[int],
    joint: bool,
    tuning: Tuning = _DEFAULT,
) -> list[Tensor] | None:
    """The masks that the operator of `selection/dispatch.py` returns for these entries;
    None where no kernel serves.

    They serve no more than `MOST` units a call.
    """
    scores = [entry.scores for entry in entries]
    if sum(x.numel() for x in scores) > MOST:
        return None
    counts = counts.to(torch.int64).contiguous()
    outs = [torch.empty(x.shape, dtype=torch.bool, device=x.device) for x in scores]
    kinds = list(dict.fromkeys([x.dtype for x in scores]))
    wide = (
        None
        if not joint or len(kinds) == 1
        else torch.float64
        if torch.float64 in kinds
        else torch.float32
    )
    large: list[Leaf] = []
    own = (
        [(0, 0)] * len(scores)
        if joint
        else [
            (end - n, int(n > 1))
            for end, n in zip(accumulate(spans), spans, strict=True)
        ]
    )
    for entry, out, at in zip(entries, outs, own, strict=True):
        x = entry.scores
        if not x.numel():
            continue
        allow = None if entry.allow is None else entry.allow.contiguous()
        deny = None if entry.deny is None else entry.deny.contiguous()
        values = (x if wide is None else x.to(wide)).contiguous()
        leaf = Leaf(values, allow, deny, entry.absolute, out, *at)
        if not joint and x.shape[1] <= NARROW and x.numel() > x.shape[1]:
            _narrow(leaf, counts)
        else:
            large.append(
                leaf._replace(scores=leaf.scores.reshape(1, -1)) if joint else leaf
            )
    groups = [large]
    if not joint and len(kinds) > 1:  # one kind of scores a call
        groups = [[x for x in large if x.scores.dtype == kind] for kind in kinds]
    for group in filter(None, groups):
        segments(group, counts, joint, tuning)
    return outs


def segments(
    leaves: Sequence[Leaf], counts: Tensor, joint: bool, t: Tuning = _DEFAULT
) -> Tensor | None:
    """Write the masks of the segments of tensors (rows, units) of one dtype, none of
    them empty.

    Gives the state of each large segment after the first pass: which way it went, and
    more. None if all are small.
    """
    small: dict[int, list[Leaf]] = {}
    large = []
    for leaf in leaves:
        width = leaf.scores.shape[1]
        if width <= t.small and (not joint or len(leaves) == 1):
            small.setdefault(max(16, 1 << (width - 1).bit_length()), []).append(leaf)
        else:
            large.append(leaf)
    with on(counts.device):
        for block, some in small.items():
            _select_small(some, counts, t, block)
        return _select_large(large, counts, joint, t) if large else None


def _how(leaves: Sequence[Leaf]) -> dict[str, int | bool]:
    dtype = leaves[0].scores.dtype
    flags = any(leaf.allow is not None or leaf.deny is not None for leaf in leaves)
    return {
        "FLAGS": flags,
        "BITS": 8 * dtype.itemsize,
        "INF": _INFINITY[dtype],
        "STEPS": steps(len(leaves)),
    }


def _tables(made: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    spans = np.stack(made.spans, 1).ravel()
    lots = np.stack(made.lots, 1).ravel()
    table = write(np.concatenate([spans, lots]), device)
    return table, table[len(spans) :]


def _select_small(
    leaves: Sequence[Leaf], counts: Tensor, t: Tuning, block: int
) -> None:
    made = plan(leaves, False, t._replace(chunk=block))
    spans, lots = _tables(made, counts.device)
    warps = min(16, max(1, block // 512))
    whole.select_whole[(made.chunks,)](
        spans, lots, len(leaves), counts, **_how(leaves), B=block, num_warps=warps
    )


def _select_large(
    leaves: Sequence[Leaf], counts: Tensor, joint: bool, t: Tuning
) -> Tensor:
    device = counts.device
    how = {**_how(leaves), "JOINT": joint}
    made = plan(leaves, joint, t)
    many = len(leaves)
    bits = int(how["BITS"])
    spans, lots = _tables(made, device)
    kind = torch.int64 if bits == 64 else torch.int32
    place_bits = max(8, -(-(made.widest - 1).bit_length() // 8) * 8)
    shifts = [*range(bits - 8, -1, -8), *range(place_bits - 8, -1, -8)]
    cells = len(shifts) * made.segments
    zeros = torch.zeros(
        cells * _BINS // 2 + made.segments, dtype=torch.int64, device=device
    )
    tally = zeros[: made.segments]
    found = zeros[made.segments :].view(torch.int32)
    states = torch.empty(cells, 4, dtype=torch.int64, device=device)
    ends = torch.empty(made.segments, 2, dtype=kind, device=device)
    near_key = torch.empty(made.near, dtype=kind, device=device)
    near_place = torch.empty(made.near, dtype=torch.int32, device=device)
    sampling = min(16, max(1, t.sample // 512))
    guess.bracket[(made.segments,)](
        spans, lots, many, counts, ends, t.reach, **how, M=t.sample, num_warps=sampling
    )
    chunked = {
        **how,
        "ALIGNED": _aligned(leaves, made),
        "B": t.chunk,
        "num_warps": 8 if t.chunk >= 4096 else 4,
    }
    guess.divide[(made.chunks,)](
        spans, lots, many, ends, tally, near_key, near_place, **chunked
    )
    common = (
        spans,
        lots,
        many,
        counts,
        ends,
        tally,
        near_key,
        near_place,
        states,
        found,
        made.segments,
    )
    chunked["PLACE"] = (1 << place_bits) - 1
    for d, shift in enumerate(shifts):
        digits.count_digits[(made.workers,)](
            *common, d, shift, shifts[d - 1] if d else 0, **chunked
        )
    digits.finish[(made.workers,)](*common, len(shifts), shifts[-1], **chunked)
    return states[: made.segments]


def _aligned(leaves: Sequence[Leaf], made: Plan) -> bool:
    # Whether every whole chunk starts at a multiple of 16 units and of 16 bytes.
    whole = all(
        len(leaf.scores) == 1 or leaf.scores.shape[1] % 16 == 0 for leaf in leaves
    )
    addresses = np.concatenate([made.spans.scores, made.spans.out])
    return whole and not (addresses % 16).any()


def _narrow(leaf: Leaf, counts: Tensor) -> None:
    rows, units, *rest = leaf.scores.shape
    columns = rest[0] if rest else 1
    dtype = leaf.scores.dtype
    wide = 1 << (units - 1).bit_length()
    tile = max(16, 2048 // wide)
    kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[8 * dtype.itemsize]
    flags = [
        leaf.out if x is None else x.view(torch.int8) for x in (leaf.allow, leaf.deny)
    ]
    with on(counts.device):
        narrow.select_narrow[(-(-rows * columns // tile),)](
            leaf.scores.view(kind),
            *flags,
            leaf.out.view(torch.int8),
            counts,
            leaf.count_at,
            leaf.count_step,
            rows,
            columns,
            ABS=leaf.absolute,
            ALLOW=leaf.allow is not None,
            DENY=leaf.deny is not None,
            BITS=8 * dtype.itemsize,
            INF=_INFINITY[dtype],
            UNITS=units,
            WIDE=wide,
            R=tile,
            num_warps=4,
        )
