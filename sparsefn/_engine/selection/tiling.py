"""Square tiles with n kept in every row and every column: all patterns tried, or a
greedy start and swaps.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.selection.entries import Entry, eligible
from sparsefn._engine.transforms import at_compile_time, host_number

_AT_A_TIME = 1 << 18  # numbers, few enough for a core's cache
# Codes of -inf, inf and NaN. Each is above the sum of 16 entries with the code before
# it, so that a sum of codes tells which tile has fewer NaN, then more inf, then fewer
# -inf.
_LOW = 1.0
_HIGH = 17.0
_NONE = 289.0


@at_compile_time
def patterns_of(n: int, m: int) -> tuple[tuple[int, ...], ...] | None:
    """All patterns of a tile, each as the choice of every row among
    `combinations(range(m), n)`; None for too many.

    >>> from sparsefn._engine.selection.tiling import patterns_of
    >>> patterns_of(1, 2), len(patterns_of(2, 4)), patterns_of(4, 8)
    (((0, 1), (1, 0)), 90, None)

    In the order of their rows, the first row first: a row with earlier columns comes
    first.
    """
    fewest = min(n, m - n)
    # at most 2,040 patterns, of 2 in 5
    are_few = m <= 5 or fewest == 0 or (m == 6 and fewest == 1)
    return _patterns(n, m) if are_few else None


@cache
def _patterns(n: int, m: int) -> tuple[tuple[int, ...], ...]:
    rows = list(itertools.combinations(range(m), n))
    flags = np.array([np.isin(np.arange(m), row) for row in rows])
    choices = np.array(list(itertools.product(range(len(rows)), repeat=m)))
    of_columns = flags[choices].sum(1)
    fits = (of_columns == n).all(1)
    return tuple(map(tuple, choices[fits].tolist()))


def tiles(entry: Entry, n: int, m: int) -> Tensor:
    """Masks of tiles, (tiles, m * m) read row by row, with n in every row and column.

    >>> from sparsefn._engine.selection.tiling import tiles
    >>> tiles(Entry(torch.tensor([[1.0, 3.0, 2.0, 1.0]])), 1, 2)
    tensor([[False,  True,  True, False]])

    Sums of scores are in float64, added in one order. Tiles with the fewest NaN come
    first, then with the most inf, the fewest -inf, and the largest sum of the rest.
    Entries that are not eligible count as NaN, and are not kept.
    """
    open_ = eligible(entry.allow, entry.deny)
    scores = entry.scores.detach().double()
    if entry.absolute:
        scores = scores.abs()
    if open_ is not None:
        scores = torch.where(open_, scores, torch.nan)
    patterns = patterns_of(n, m)
    numbers = m * m if patterns is None else len(patterns)  # of a tile
    at_a_time = max(1, _AT_A_TIME // numbers)
    if torch.compiler.is_compiling():  # one graph, whatever the size
        at_a_time = max(1, scores.shape[0])
    masks = []
    for part in torch.split(scores, at_a_time):
        if patterns is None:
            masks.append(_by_swaps(part, n, m))
        else:
            masks.append(_best_of_all(part, n, m, patterns))
    if masks:
        mask = torch.cat(masks)
    else:
        mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask if open_ is None else mask & open_


def _classes(scores: Tensor) -> tuple[Tensor, Tensor]:
    # Finite scores, and codes for the other scores; a code decides before any sum of
    # scores.
    code = torch.where(scores == torch.inf, _HIGH, 0.0)
    code = torch.where(scores == -torch.inf, -_LOW, code)
    code = torch.where(scores.isnan(), -_NONE, code)
    return torch.where(scores.isfinite(), scores, 0.0), code


# ---- all patterns --------------------------------------------------------------------


def _best_of_all(
    scores: Tensor,
    n: int,
    m: int,
    patterns: tuple[tuple[int, ...], ...],
) -> Tensor:
    device = scores.device
    columns = list(itertools.combinations(range(m), n))  # of a row
    kept = torch.tensor(columns, dtype=torch.int64, device=device)
    choices = torch.tensor(patterns, dtype=torch.int64, device=device)
    choices = choices.reshape(-1, m)
    finite, code = _classes(scores)
    sums = _totals(finite, kept, choices)
    # Scores that are not finite are rare, and their sums are left out where it is known
    # that there are none.
    if host_number((code != 0).any()) is not False:
        codes = _totals(code, kept, choices)
        sums = torch.where(codes == codes.amax(0), sums, -torch.inf)
    index = torch.arange(len(patterns), device=device)[:, None]
    is_best = sums == sums.amax(0)
    first = torch.where(is_best, index, len(patterns) - 1).amin(0)
    flags = torch.zeros(len(columns), m, dtype=torch.bool, device=device)
    if n:
        ones = torch.ones_like(kept, dtype=torch.bool)
        flags = flags.scatter(1, kept, ones)
    rows = flags[choices[first]]
    return rows.reshape(-1, m * m)


def _totals(values: Tensor, kept: Tensor, choices: Tensor) -> Tensor:
    # What each pattern keeps of each tile: (patterns, tiles), copied in whole rows.
    m = choices.shape[1]
    n = kept.shape[1]
    entries = values.reshape(-1, m, m).permute(1, 2, 0).contiguous()
    if n:
        of_rows = entries[:, kept[:, 0]]
    else:
        of_rows = entries.new_zeros(m, 1, values.shape[0])
    for i in range(1, n):
        column = kept[:, i]
        of_rows = of_rows + entries[:, column]
    total = of_rows[0][choices[:, 0]]
    for i in range(1, m):
        choice = choices[:, i]
        total = total + of_rows[i][choice]
    return total


# ---- greedy, then swaps --------------------------------------------------------------


def _by_swaps(scores: Tensor, n: int, m: int) -> Tensor:
    # Class and value in one number: what is not finite goes before any sum of finite
    # scores.
    finite, code = _classes(scores)
    largest = finite.abs().amax(-1, keepdim=True)
    reach = largest * (4 * m * m)
    unit = torch.where(reach > 0, reach, 1.0)
    worth = finite + code * unit
    worth = worth.reshape(-1, m, m)
    kept = _greedy(worth, n)
    kept = _filled(kept, worth, n)
    pairs = list(itertools.combinations(range(m), 2))
    for _ in range(m):  # sweeps; a few of them change anything
        before = kept
        for i, k in pairs:
            kept = _exchange(kept, worth, i, k)
        if host_number((before != kept).any()) is False:
            break
    return kept.reshape(-1, m * m)


def _first(flags: Tensor) -> Tensor:
    # The first flag of each row that is set, alone.
    index = torch.arange(flags.shape[-1], device=flags.device)
    first = torch.where(flags, index, len(index)).amin(-1, keepdim=True)
    return flags & (index == first)


def _best(candidates: Tensor, worth: Tensor) -> Tensor:
    # The candidate of each tile that is worth most, the first of equal ones.
    flags = candidates.flatten(1)
    open_ = torch.where(candidates, worth, -torch.inf).flatten(1)
    is_best = open_ == open_.amax(1, keepdim=True)
    best = _first(flags & is_best)
    return best.reshape(candidates.shape)


def _greedy(worth: Tensor, n: int) -> Tensor:
    # The best entry whose row and column are not full, again and again.
    kept = torch.zeros_like(worth, dtype=torch.bool)
    for _ in range(n * worth.shape[1]):
        row_lacks = kept.sum(2, keepdim=True) < n
        column_lacks = kept.sum(1, keepdim=True) < n
        may_be_kept = ~kept & row_lacks & column_lacks
        kept = kept | _best(may_be_kept, worth)
    return kept


def _filled(kept: Tensor, worth: Tensor, n: int) -> Tensor:
    # A row i and a column j lack an entry, and have (i, j) already. So a kept (k, l)
    # gives way to (i, l) and (k, j), which are not kept. There is one.
    m = worth.shape[1]
    for _ in range((n * m + 1) // 2):
        row_lacks = kept.sum(2) < n
        column_lacks = kept.sum(1) < n
        if host_number(row_lacks.any()) is False:
            break
        i = _first(row_lacks)[:, :, None]
        j = _first(column_lacks)[:, None, :]
        in_row_i = (kept & i).any(1, keepdim=True)
        in_column_j = (kept & j).any(2, keepdim=True)
        lacks = row_lacks.any(1)[:, None, None]
        gives = kept & ~in_row_i & ~in_column_j & lacks
        across = torch.where(i, worth, 0.0).sum(1, keepdim=True)
        down = torch.where(j, worth, 0.0).sum(2, keepdim=True)
        given = _best(gives, across + down - worth)
        k = given.any(2, keepdim=True)
        l = given.any(1, keepdim=True)  # noqa: E741 (as above)
        kept = (kept & ~given) | (i & l) | (k & j)
    return kept


def _exchange(kept: Tensor, worth: Tensor, i: int, k: int) -> Tensor:
    # The best exchange of a column of row i for one of row k, where it gains.
    above = kept[:, i]
    below = kept[:, k]
    more = worth[:, k] - worth[:, i]
    give = torch.where(above & ~below, more, -torch.inf)
    take = torch.where(below & ~above, -more, -torch.inf)
    most_given = give.amax(1, keepdim=True)
    most_taken = take.amax(1, keepdim=True)
    gains = most_given + most_taken > 0
    given = _first(give == most_given)
    taken = _first(take == most_taken)
    swap = (given | taken) & gains
    flip = torch.zeros_like(kept)
    flip[:, i] = swap
    flip[:, k] = swap
    return kept ^ flip
