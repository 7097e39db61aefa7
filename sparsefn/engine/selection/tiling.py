"""Square tiles with n kept in every row and every column: all patterns tried, or a
greedy start and swaps.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.selection.entries import Entry, eligible
from sparsefn.engine.surroundings import at_compile_time, concrete

_PATTERNS = (
    2048  # of so many all are tried: those of m up to 5, and of one or all but one in 6
)
_AT_A_TIME = 1 << 18  # numbers, few enough for a core's cache
_CLASS = 1.0, 17.0, 289.0  # of -inf, inf and NaN: sums over 16 entries keep their order


@at_compile_time
def patterns_of(n: int, m: int) -> tuple[tuple[int, ...], ...] | None:
    """All patterns of a tile, each as the choice of every row among
    `combinations(range(m), n)`; None for too many.

    >>> from sparsefn.engine.selection.tiling import patterns_of
    >>> patterns_of(1, 2), len(patterns_of(2, 4)), patterns_of(4, 8)
    (((0, 1), (1, 0)), 90, None)

    In the order of their rows, the first row first: a row with earlier columns comes
    first.
    """
    return _listed(n, m) if _number(n, m) <= _PATTERNS else None


@cache
def _listed(n: int, m: int) -> tuple[tuple[int, ...], ...]:
    rows = list(itertools.combinations(range(m), n))
    flags = np.array([np.isin(np.arange(m), row) for row in rows])
    chosen = np.array(list(itertools.product(range(len(rows)), repeat=m)))
    return tuple(map(tuple, chosen[(flags[chosen].sum(1) == n).all(1)].tolist()))


def _number(n: int, m: int) -> float:
    # How many patterns there are, or more where there are too many: m! of one in a row,
    # known few for small tiles.
    n = min(n, m - n)
    return math.factorial(m) ** n if n < 2 else {4: 90, 5: 2040}.get(m, math.inf)


def tiles(entry: Entry, n: int, m: int) -> Tensor:
    """Masks of tiles, (tiles, m * m) read row by row, with n in every row and column.

    >>> from sparsefn.engine.selection.tiling import tiles
    >>> tiles(Entry(torch.tensor([[1.0, 3.0, 2.0, 1.0]])), 1, 2)
    tensor([[False,  True,  True, False]])

    Sums of scores are in float64, added in one order. Tiles with the fewest NaN come
    first, then with the most inf, the fewest -inf, and the largest sum of the rest.
    Entries that are not eligible count as NaN, and are not kept.
    """
    open_ = eligible(entry.allow, entry.deny)
    scores = entry.scores.detach().double()
    scores = scores.abs() if entry.absolute else scores
    scores = scores if open_ is None else torch.where(open_, scores, torch.nan)
    known = patterns_of(n, m)
    some = max(1, _AT_A_TIME // (m * m if known is None else len(known)))
    if torch.compiler.is_compiling():  # one graph, whatever the size
        some = max(1, scores.shape[0])
    parts = [
        _swapped(part, n, m) if known is None else _best(part, n, m, known)
        for part in torch.split(scores, some)
    ]
    mask = torch.cat(parts) if parts else torch.zeros_like(scores, dtype=torch.bool)
    return mask if open_ is None else mask & open_


def _classes(scores: Tensor) -> tuple[Tensor, Tensor]:
    # Finite scores, and a number for the others that goes before any sum of them.
    low, high, none = _CLASS
    code = torch.where(
        scores.isnan(), -none, torch.where(scores == torch.inf, high, 0.0)
    )
    code = torch.where(scores == -torch.inf, -low, code)
    return torch.where(scores.isfinite(), scores, 0.0), code


# ---- all patterns --------------------------------------------------------------------


def _best(scores: Tensor, n: int, m: int, known: tuple[tuple[int, ...], ...]) -> Tensor:
    rows = torch.tensor(
        list(itertools.combinations(range(m), n)),
        dtype=torch.int64,
        device=scores.device,
    )
    chosen = torch.tensor(known, dtype=torch.int64, device=scores.device).reshape(-1, m)

    # (patterns, tiles), which are copied in whole rows
    def totals(values: Tensor) -> Tensor:
        entries = values.reshape(-1, m, m).permute(1, 2, 0).contiguous()
        sums = entries[:, rows[:, 0]] if n else entries.new_zeros(m, 1, values.shape[0])
        for i in range(1, n):
            sums = sums + entries[:, rows[:, i]]
        whole = sums[0][chosen[:, 0]]
        for i in range(1, m):
            whole = whole + sums[i][chosen[:, i]]
        return whole

    finite, code = _classes(scores)
    sums = totals(finite)
    # Scores that are not finite are rare, and their sums are left out where it is known
    # that there are none.
    if concrete((code != 0).any()) is not False:
        codes = totals(code)
        sums = torch.where(codes == codes.amax(0), sums, -torch.inf)
    index = torch.arange(len(known), device=scores.device)[:, None]
    at = torch.where(sums == sums.amax(0), index, len(known) - 1).amin(0)
    flags = torch.zeros(len(rows), m, dtype=torch.bool, device=scores.device)
    if n:
        flags = flags.scatter(1, rows, torch.ones_like(rows, dtype=torch.bool))
    return flags[chosen[at]].reshape(-1, m * m)


# ---- greedy, then swaps --------------------------------------------------------------


def _swapped(scores: Tensor, n: int, m: int) -> Tensor:
    # Ranks by class and value in one number each: what is not finite goes before any
    # sum of finite scores.
    finite, code = _classes(scores)
    reach = finite.abs().amax(-1, keepdim=True) * (4 * m * m)
    worth = (finite + code * torch.where(reach > 0, reach, 1.0)).reshape(-1, m, m)
    kept = _filled(_greedy(worth, n), worth, n)
    pairs = list(itertools.combinations(range(m), 2))
    for _ in range(m):  # sweeps; a few of them change anything
        before = kept
        for i, k in pairs:
            kept = _exchange(kept, worth, i, k)
        if concrete((before != kept).any()) is False:
            break
    return kept.reshape(-1, m * m)


def _one(flags: Tensor) -> Tensor:
    # The first flag of each row that is set, alone.
    index = torch.arange(flags.shape[-1], device=flags.device)
    first = torch.where(flags, index, len(index)).amin(-1, keepdim=True)
    return flags & (index == first)


def _greedy(worth: Tensor, n: int) -> Tensor:
    kept = torch.zeros_like(worth, dtype=torch.bool)
    m = worth.shape[1]
    for _ in range(n * m):
        free = ~kept & (kept.sum(2) < n)[:, :, None] & (kept.sum(1) < n)[:, None, :]
        open_ = torch.where(free, worth, -torch.inf).flatten(1)
        kept = kept | _one(
            free.flatten(1) & (open_ == open_.amax(1, keepdim=True))
        ).reshape(kept.shape)
    return kept


def _filled(kept: Tensor, worth: Tensor, n: int) -> Tensor:
    # A row i and a column j that lack an entry, and have (i, j): (k, l) gives way to
    # (i, l) and (k, j). There is one.
    m = worth.shape[1]
    for _ in range((n * m + 1) // 2):
        rows = kept.sum(2) < n
        columns = kept.sum(1) < n
        if concrete(rows.any()) is False:
            break
        i = _one(rows)
        j = _one(columns)
        row = (kept & i[:, :, None]).any(1)
        column = (kept & j[:, None, :]).any(2)
        gives = (
            kept & ~row[:, None, :] & ~column[:, :, None] & rows.any(1)[:, None, None]
        )
        across = torch.where(i[:, :, None], worth, 0.0).sum(1)[:, None, :]
        down = torch.where(j[:, None, :], worth, 0.0).sum(2)[:, :, None]
        gain = torch.where(gives, across + down - worth, -torch.inf).flatten(1)
        best = _one(gives.flatten(1) & (gain == gain.amax(1, keepdim=True))).reshape(
            kept.shape
        )
        k = best.any(2)
        at = best.any(1)
        kept = (
            (kept & ~best)
            | (i[:, :, None] & at[:, None, :])
            | (k[:, :, None] & j[:, None, :])
        )
    return kept


def _exchange(kept: Tensor, worth: Tensor, i: int, k: int) -> Tensor:
    # The best exchange of a column of row i for one of row k, where it gains.
    above = kept[:, i]
    below = kept[:, k]
    more = worth[:, k] - worth[:, i]
    give = torch.where(above & ~below, more, -torch.inf)
    take = torch.where(below & ~above, -more, -torch.inf)
    gain = give.amax(1, keepdim=True) + take.amax(1, keepdim=True)
    swap = (
        _one(give == give.amax(1, keepdim=True))
        | _one(take == take.amax(1, keepdim=True))
    ) & (gain > 0)
    flip = torch.zeros_like(kept)
    flip[:, i] = swap
    flip[:, k] = swap
    return kept ^ flip
