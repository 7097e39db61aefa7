"""Winners of rows of few units, as N:M patterns have them, by rank: how many units of the row are better.

In memory, each unit is compared with the next one of its row, then with the next but one, and so on: passes
over whole blocks, with nothing sorted or laid out anew. Rows of `WIDEST` units and less are worth it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.memory import BLOCK, Array, See, check_device, each, placed, visible, visible_inside
from sparsefn.engine.selection.reference import rank_keys

WIDEST = 32  # units of a row: passes grow with them, so that wider rows are better partitioned
_BLOCK = 2 * BLOCK  # scores at a time: they are read in place, and all else is bytes
_FUSED = 4  # units of a row: of more, compiled code is slower than the passes over memory
_PAIRED = 8  # units of a row: their pairs are few enough to be spelled out


_WORDS = {  # of each dtype, a signed word, and inf as one
    torch.float16: (np.int16, 0x7C00),
    torch.bfloat16: (np.int16, 0x7F80),
    torch.float32: (np.int32, 0x7F800000),
    torch.float64: (np.int64, 0x7FF0000000000000),
}


def top(scores: Tensor, eligible: Tensor | None, count: int | Tensor, *, absolute: bool = False) -> Tensor:
    """The best units of each row, as many as count says or as are eligible.

    >>> from sparsefn.engine.selection import groups
    >>> groups.top(torch.tensor([[1.0, -4.0, 4.0, 2.0]]), None, 2)
    tensor([[False, False,  True,  True]])
    >>> groups.top(torch.tensor([[1.0, -4.0, 4.0, 2.0]]), None, 2, absolute=True)
    tensor([[False,  True,  True, False]])

    `scores` are floats of shape (rows, units), or (rows, units, columns) where the units of each column compete
    by themselves; `eligible` is bool of that shape, None means all. `count`, any integer, is one for all or an
    int64 tensor of shape () or (rows * columns,). Larger scores win, then the lower index; NaN ranks below
    -inf. With `absolute` scores are absolute values, which are not stored. Returns a bool tensor of the shape
    of `scores`. Raises TypeError for scores that are not floats, ValueError for other shapes and more than
    255 units.
    """
    if not scores.is_floating_point():
        raise TypeError(f"expected floating-point scores, got {scores.dtype}")
    shape = tuple(scores.shape)
    if len(shape) not in (2, 3) or shape[1] > 255:
        raise ValueError(f"expected scores (rows, units) or (rows, units, columns) of at most 255 units, got {shape}")
    if eligible is not None and tuple(eligible.shape) != shape:
        raise ValueError(f"expected eligible of the shape of the scores, {shape}, got {tuple(eligible.shape)}")
    if len(shape) == 2:
        scores, eligible = scores.unsqueeze(2), None if eligible is None else eligible.unsqueeze(2)
    if isinstance(count, Tensor):
        count = _counts(count, *scores.shape)
    won = _in_memory(scores, eligible, count, absolute, visible)
    if won is None:
        check_device("scores and flags", scores.device, eligible)
        count = placed(count, scores.device)
        scores = scores.detach()
        fused = torch.compiler.is_compiling() and (shape[1] <= _FUSED or torch.compiler.is_exporting())
        if fused or scores.device.type != "cpu":
            won = _ranked(scores, eligible, count, absolute)
        else:
            won = _operator(scores, eligible, torch.as_tensor(count, device=scores.device), absolute)
    return won.reshape(shape)


def _counts(count: Tensor, rows: int, units: int, columns: int) -> Tensor:
    if count.ndim and tuple(count.shape) != (rows * columns,):
        raise ValueError(f"expected count of shape () or ({rows * columns},), got {tuple(count.shape)}")
    bounded = count.clamp(0, units)
    return bounded.reshape(rows, 1, columns) if count.ndim else bounded


# ---- any device and transform --------------------------------------------------------------------


def _ranked(scores: Tensor, eligible: Tensor | None, count: int | Tensor, absolute: bool) -> Tensor:
    keys = rank_keys(scores.abs() if absolute else scores, eligible)
    won = _by_pairs(keys, count) if keys.shape[1] <= _PAIRED else _by_units(keys, count)
    return won if eligible is None else won & eligible


def _by_pairs(keys: Tensor, count: int | Tensor) -> Tensor:
    units = keys.unbind(1)
    ranks = [torch.full_like(unit, place, dtype=torch.int32) for place, unit in enumerate(units)]
    for i, first in enumerate(units):
        for j in range(i + 1, len(units)):
            beaten = (units[j] > first).to(torch.int32)
            ranks[i], ranks[j] = ranks[i] + beaten, ranks[j] - beaten
    limit = count.squeeze(1) if isinstance(count, Tensor) and count.ndim else count
    return torch.stack([rank < limit for rank in ranks], 1)  # compared first: compiled code then stores bytes alone


def _by_units(keys: Tensor, count: int | Tensor) -> Tensor:
    place = torch.arange(keys.shape[1], device=keys.device).reshape(1, -1, 1)
    rank = torch.zeros_like(keys, dtype=torch.int32)
    for i in range(keys.shape[1]):
        unit = keys[:, i : i + 1]
        rank = rank + ((unit > keys) | ((unit == keys) & (place > i)))
    return rank < count


# ---- the operator, for CPU tensors that are plain inside ------------------------------------------


@torch.library.custom_op("sparsefn::narrow_winners", mutates_args=())
def _operator(scores: Tensor, eligible: Tensor | None, count: Tensor, absolute: bool) -> Tensor:
    """Winners of (rows, units, columns), with a count that is 0-d or spreads to that shape."""
    won = _in_memory(scores, eligible, count, absolute, visible_inside)
    return _ranked(scores, eligible, count, absolute) if won is None else won


@_operator.register_fake
def _(scores: Tensor, eligible: Tensor | None, count: Tensor, absolute: bool) -> Tensor:
    return torch.empty(scores.shape, dtype=torch.bool, device=scores.device)


@_operator.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], scores: Tensor, eligible: Tensor | None, count: Tensor, absolute: bool
) -> tuple[Tensor, int]:
    members = info.batch_size

    def rows(x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(members, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    every = rows(scores, in_dims[0])
    if count.ndim == 1:  # a number for each member
        count = count.reshape(-1, 1).expand(members, every.shape[0] // members).reshape(-1, 1, 1)
    elif count.ndim:
        count = rows(count, in_dims[2])
    won = _operator(every, None if eligible is None else rows(eligible, in_dims[1]), count, absolute)
    return won.reshape(members, won.shape[0] // members, *won.shape[1:]), 0


# ---- plain CPU tensors ---------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows in memory, (rows, units, columns): scores as signed words, and which word is inf."""

    words: Array
    infinity: int
    allow: Array | None
    limit: int | Array
    absolute: bool
    out: Array


class _Block(NamedTuple):
    """Some rows, or where one row has very many columns, some of those."""

    rows: slice
    columns: slice


def _in_memory(scores: Tensor, eligible: Tensor | None, count: int | Tensor, absolute: bool, see: See) -> Tensor | None:
    values = see(scores)
    allow = None if eligible is None else see(eligible)
    limit = count if isinstance(count, int) else see(count)
    if values is None or limit is None or (allow is None) != (eligible is None):
        return None
    if not isinstance(limit, int):
        same = limit.size and limit.min() == limit.max()  # one number is compared much faster
        limit = int(limit.flat[0]) if same else np.broadcast_to(limit.astype(np.uint8), values.shape)
    word, infinity = _WORDS[scores.dtype]
    out: Array = np.empty(values.shape, np.bool_)
    rows = _Rows(values.view(word), infinity, allow, limit, absolute, out)
    if out.size:
        blocks = _blocks(values.shape)
        share = -(-len(blocks) // torch.get_num_threads())
        each(partial(_select, rows), [blocks[i : i + share] for i in range(0, len(blocks), share)], out.size)
    return torch.from_numpy(out)


def _blocks(shape: tuple[int, ...]) -> list[_Block]:
    height, units, width = shape
    wide = min(width, max(1, _BLOCK // units))
    high = max(1, _BLOCK // (units * wide)) if wide == width else 1
    starts = [(i, j) for i in range(0, height, high) for j in range(0, width, wide)]
    return [_Block(slice(i, min(i + high, height)), slice(j, min(j + wide, width))) for i, j in starts]


def _select(rows: _Rows, blocks: list[_Block]) -> None:
    parts = [rows.out[at.rows, :, at.columns] for at in blocks]
    room = np.empty((2, max(part.size for part in parts)), rows.words.dtype)
    flags: Array = np.empty(room.shape, np.uint8)
    place, fits = _places(parts[0].shape)
    for at, out in zip(blocks, parts, strict=True):
        if place.shape != out.shape:
            place, fits = _places(out.shape)
        keys = _keys(rows, at, out.shape, room)
        rank, beaten = flags[:, : keys.size]
        rank[:] = place.reshape(-1)  # as if each lost to all before it
        for lag, inside in enumerate(fits, 1):
            end = keys.size - lag * out.shape[2]
            worse = beaten[:end]
            np.greater(keys[-end:], keys[:end], out=worse.view(np.bool_))
            np.bitwise_and(worse, inside[:end], out=worse)  # the last units of a row meet those of the next
            np.add(rank[:end], worse, out=rank[:end])
            np.subtract(rank[-end:], worse, out=rank[-end:])
        limit = rows.limit if isinstance(rows.limit, int) else rows.limit[at.rows, :, at.columns]
        np.less(rank.reshape(out.shape), limit, out=out)
        if rows.allow is not None:
            np.bitwise_and(out, rows.allow[at.rows, :, at.columns], out=out)


def _places(shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    # The place of each unit in its row, and for each lag, which units have one so far behind them.
    place: Array = np.empty(shape, np.uint8)
    place[:] = np.arange(shape[1], dtype=np.uint8)[:, None]
    flat = place.reshape(-1)
    return place, [(flat < shape[1] - lag).view(np.uint8) for lag in range(1, shape[1])]


def _keys(rows: _Rows, at: _Block, shape: tuple[int, ...], room: Array) -> Array:
    # Integers in the order of `rank_keys`. The words of floats above zero are that already.
    words = rows.words[at.rows, :, at.columns]
    bits = 8 * words.itemsize
    least = -1 << (bits - 1)
    keys: Array = room[0, : words.size]
    spare: Array = room[1, : words.size]
    if rows.absolute:
        np.bitwise_and(words, ~least, out=keys.reshape(shape))
    elif words.flags.c_contiguous:
        keys = words.reshape(-1)
    else:
        keys.reshape(shape)[:] = words
    if keys.min() < 0:
        np.right_shift(keys, bits - 1, out=spare)
        sizes = np.bitwise_and(keys, ~least, out=room[0, : keys.size])
        nan = sizes > rows.infinity if sizes.max() > rows.infinity else None
        np.bitwise_xor(sizes, spare, out=sizes)
        keys = np.subtract(sizes, spare, out=sizes)
    else:
        nan = keys > rows.infinity if keys.max() > rows.infinity else None
    if nan is not None:
        keys = np.where(nan, least + 1, keys)
    if rows.allow is not None:
        bound = spare  # the largest integer where a unit is eligible, the least where not
        bound.reshape(shape)[:] = rows.allow[at.rows, :, at.columns]
        np.subtract(bound, 1, out=bound)
        np.bitwise_xor(bound, ~least, out=bound)
        keys = np.minimum(keys, bound, out=room[0, : keys.size])
    return keys
