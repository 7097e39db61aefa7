"""Integers in proportion to shares, with an exact sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn._engine.leaves import as_tensor_on
from sparsefn._engine.numbers import real_where
from sparsefn._engine.selection.dispatch import Entry, winners
from sparsefn._engine.transforms import as_constant, at_compile_time, outside_modes

_COUNT_BITS = 40  # of a number of units

CountsByName = dict[str, int] | dict[str, Tensor] | dict[str, int | Tensor]


def apportion(
    shares: Mapping[str, float | Tensor],
    total: int | Tensor,
    caps: Mapping[str, int | Tensor] | None = None,
) -> CountsByName:
    """Split a total into integers in proportion to shares, by largest remainder.

    >>> sf.budgets.apportion({"a": 2.0, "b": 1.0, "c": 1.0}, 10)
    {'a': 5, 'b': 3, 'c': 2}
    >>> sf.budgets.apportion(
    ...     {"a": 8.0, "b": 1.0, "c": 1.0}, 10, {"a": 4, "b": 9, "c": 9}
    ... )
    {'a': 4, 'b': 3, 'c': 3}

    Args:
        shares: By name, a float or a 0-d tensor. NaN counts as 0. A positive share
            below 2**-400 of the largest counts as that, and an infinite one in a tensor
            as the largest number.
        total: The sum of all counts, an int or a 0-d integer tensor.
        caps: By name, the largest count. By default `total`.

    Returns:
        Counts by name, whose sum is exactly `total`. They are ints, or 0-d int64
        tensors where any argument is a tensor.

    Raises:
        ValueError: `total` is above the sum of the caps or above 2**53, or a share is
            negative or infinite, where the values are known.

    The part of a share above its cap goes to the others by share. Equal remainders go
    to the name that sorts first, so that the order of the dict is irrelevant. Names of
    share 0 get something only when all others are full.
    """
    names = sorted(shares)
    parts: list[float | Tensor] = []
    for name in names:
        share = shares[name]
        if isinstance(share, float):
            share = as_constant(share)
        if not isinstance(share, Tensor) and (share < 0 or math.isinf(share)):
            raise ValueError(f"expected finite shares >= 0, got {share} at {name!r}")
        parts.append(share)
    if caps is None:
        limits = [total] * len(names)
    else:
        limits = [caps[name] for name in names]
    plain = not any(isinstance(x, Tensor) for x in (total, *parts, *limits))
    if plain and total > 2**53:
        raise ValueError(
            "expected a total of at most 2**53, up to which counts are exact in "
            f"float64, got {total}"
        )
    if plain and total > sum(limits):
        raise ValueError(
            f"cannot hand out {total} among caps that sum to {sum(limits)}"
        )
    counts: Sequence[int | Tensor]
    if plain:
        counts = _numbers(tuple(parts), total, tuple(limits))
    else:
        counts = _fill(parts, limits, total).unbind()
    placed = dict(zip(names, counts, strict=True))
    return {name: placed[name] for name in shares}


@at_compile_time
def _numbers(
    shares: Sequence[float | Tensor], total: int | Tensor, caps: Sequence[int | Tensor]
) -> Sequence[int | Tensor]:
    # Under compile this is computed while tracing, on real tensors: a budget of Python
    # numbers is not in the graph.
    with outside_modes():
        return tuple(int(n) for n in _fill(shares, caps, total))


def _fill(
    shares: Sequence[float | Tensor], caps: Sequence[int | Tensor], total: int | Tensor
) -> Tensor:
    device = _device_of(total, *shares, *caps)
    s = _scaled(torch.nan_to_num(vector(shares, device), nan=0.0))
    c = vector(caps, device)
    t = vector([total], device)[0]
    first = torch.where(s > 0, c, 0.0)
    given = torch.minimum(t, first.sum())
    by_share = _hand_out(s, given, first)
    of_others = torch.where(s > 0, 0.0, c)
    left = _hand_out(of_others, t - given, c - first)
    return (by_share + left).to(torch.int64)


def _device_of(*values: object) -> torch.device:
    for x in values:
        if isinstance(x, Tensor):
            return x.device
    return torch.device("cpu")


def _scaled(shares: Tensor) -> Tensor:
    # By a power of two, and not too far apart, so that no quotient or sum overflows.
    if not shares.shape[0]:
        return shares
    peak = shares.amax()
    up_or_not = real_where(peak < 2.0**-400, 2.0**600, 1.0)
    factor = real_where(peak > 2.0**400, 2.0**-600, up_or_not)
    held = torch.maximum(shares, peak * 2.0**-400)
    return torch.where(shares > 0, held, shares) * factor


def vector(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors of a device as one float64 tensor.

    >>> from sparsefn._engine.selection.shares import vector
    >>> vector([0.5, torch.tensor(2)], torch.device("cpu"))
    tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    tensors = [v for v in values if isinstance(v, Tensor)]
    if len(tensors) == len(values) and len({x.dtype for x in tensors}) == 1:
        return torch.stack(tensors).double()
    cells = []
    for v in values:
        if not isinstance(v, Tensor):
            v = torch.full((), v, dtype=torch.float64, device=device)
        cells.append(v.double())
    return torch.stack(cells)


def _hand_out(shares: Tensor, total: Tensor, caps: Tensor) -> Tensor:
    # Leaves fill up in the order of caps/shares; the level is what the other leaves get
    # for a share of 1. A leaf of share 0 has a cap of 0 here.
    if not shares.shape[0]:
        return shares
    fills_at = torch.where(shares > 0, caps / shares, torch.inf)
    order = torch.argsort(fills_at, stable=True)
    rising = fills_at[order]
    s = shares[order]
    c = caps[order]
    # what is left for each leaf and the later ones, once the earlier ones are full
    rest = s.flip(0).cumsum(0).flip(0)
    left = total - (c.cumsum(0) - c)
    level = torch.where(rest > 0, left / rest, torch.inf)
    is_open = rising > level
    place = torch.arange(len(s), device=s.device)
    first_open = torch.where(is_open, place, len(s) - 1).amin()
    # Where a small share was lost in `rest`, the level falls below what the full ones
    # needed.
    needed = torch.where(place < first_open, rising, 0.0).amax()
    own_level = level.gather(0, first_open.reshape(1))[0]
    level_of_open = torch.maximum(own_level, needed)
    water = torch.where(is_open.any(), level_of_open, torch.inf)
    by_share = torch.minimum(shares * water, caps)
    quota = torch.where(fills_at <= water, caps, by_share)
    whole = quota.floor()
    missing = (total - whole.sum()).to(torch.int64)
    remainders = (quota - whole).reshape(1, -1)
    has_room = (whole < caps).reshape(1, -1)
    (one_more,) = winners([Entry(remainders, has_room)], [missing])
    return whole + one_more[0]


def spread(
    count: int | Tensor,
    groups: int,
    room: Tensor | None = None,
    like: Tensor | None = None,
) -> int | Tensor:
    """A leaf's count split over its competing groups.

    The first groups take the remainder.

    >>> spread(6, 3), spread(7, 3)
    (2, tensor([3, 2, 2]))
    >>> spread(7, 3, room=torch.tensor([1, 8, 8]))
    tensor([1, 3, 3])

    With `room`, int64 (groups,), no group gets more than its room. For an int the
    result is on the device of `like`.
    """
    if groups <= 1:
        return count
    if room is not None:
        total = as_tensor_on(count, room.device).minimum(room.sum())
        return _filled(total.clamp(min=0), room)
    if isinstance(count, int) and count % groups == 0:
        return count // groups
    place = torch.arange(groups, device=_device_of(count, like))
    one_more = place < count % groups
    return count // groups + one_more


def _filled(total: Tensor, room: Tensor) -> Tensor:
    # Every group gets the same level or its room, if that is less; the highest level is
    # found bit by bit.
    level = torch.zeros_like(total)
    for bit in reversed(range(_COUNT_BITS)):
        higher = level + (1 << bit)
        needed = torch.minimum(room, higher).sum()
        level = torch.where(needed <= total, higher, level)
    counts = torch.minimum(room, level)
    has_room = room > level
    missing = total - counts.sum()
    one_more = has_room & (has_room.cumsum(-1) <= missing)
    return counts + one_more
