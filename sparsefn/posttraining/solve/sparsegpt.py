"""SparseGPT: columns from left to right; later columns make up for earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsefn._engine.leaves import check_device, member_product
from sparsefn._engine.processes import check_alike, gathered, own
from sparsefn._engine.selection import best_of_columns
from sparsefn._engine.transforms import host_number, read_number
from sparsefn.core.checks import check_int, check_sparsity, is_int, is_sequence
from sparsefn.core.rounding import n_kept
from sparsefn.masks.budgets.distributions import apportion
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.masks.patterns.units import Units
from sparsefn.masks.select import kept_count, topk_mask
from sparsefn.posttraining.solve.arguments import (
    USUAL,
    check_damp,
    check_kept,
    damp_in_place,
    factor_in_place,
    in_one_dtype,
    units_of_weight,
)
from sparsefn.posttraining.solve.grid import Grid
from sparsefn.posttraining.solve.sweep import (
    WIDTHS,
    Choice,
    Columns,
    Rounding,
    sweep,
    widths_of,
)

# Entries of the rows that are swept together. Fewer take longer, above all on a GPU,
# where launches take the time.
ENTRIES = 2**22, 2**26  # on a CPU, and elsewhere

Keep = float | int | Sequence[int]


def obs(
    weight: Tensor,
    hessian: Tensor,
    *,
    mask: Tensor | None = None,
    keep: Keep | None = None,
    pattern: Pattern | None = None,
    block: int = 128,
    damp: float = USUAL,
    round_to: Grid | None = None,
) -> tuple[Tensor, Tensor]:
    """SparseGPT: prune weights and change the others, so that outputs change little.

    >>> weight, hessian = (
    ...     torch.tensor([[1.0, 2.0]]),
    ...     torch.tensor([[2.0, 1.0], [1.0, 2.0]]),
    ... )
    >>> sf.solve.obs(weight, hessian, keep=1, damp=0.0)
    (tensor([[0.0000, 2.5000]]), tensor([[False,  True]]))

    Args:
        weight: Floating-point tensor (out, in).
        hessian: Symmetric tensor (in, in): a multiple of the gram of the inputs.
        mask: Bool tensor (out, in) of the weights to keep, in place of `keep` and
            `pattern`.
        keep: A share (a float) or a count (an int) of the whole weight, which is split
            over blocks so that the total is exact, or a sequence with the count of
            every block; all rows of a block compete. With a pattern that leaves the
            count open, the share or count of each group.
        pattern: A pattern whose groups lie inside blocks, such as `nm(2, 4)`: each
            group is chosen when its first column is reached.
        block: Number of columns of a block, which is how far the choice of a mask looks
            ahead. Time hardly depends on it.
        damp: Share of the mean of the hessian's diagonal that is added to the diagonal.
        round_to: Grid that kept weights are rounded to, as `sf.solve.grid(weight, 4)`
            makes it: later columns make up for rounding, too (GPTQ). None: no rounding.

    Returns:
        The new weight, +0.0 where it is pruned, and its mask, both of the weight's
        shape. Computed in the wider dtype of the two, float32 at least; the result has
        the dtype of the weight, and no gradient.

    Raises:
        ValueError: Shapes do not fit, values are not finite, the hessian is singular at
            this `damp` or all zeros, counts cannot be met, or groups cross blocks.
            `round_to` is for another number of rows, its groups do not divide the
            columns, or a scale of it is not above 0.
        TypeError: A dtype is not floating-point, nothing says what is kept, or a mask
            is given beside `keep` or `pattern`.

    Scores are w^2 / [H^-1]_jj, of the weights as they are by then, over the inverse for
    column j and all later columns; ties go to the lowest index. Inputs that were always
    0 have weights of 0; a block or a group of such inputs alone keeps its count in the
    mask all the same.

    Runs under `vmap`, on a CPU with the bits of a loop. The same inputs, device and
    number of threads give the same bits, also where processes share the rows
    (`sf.distributed.by_rows`); with another number of threads products round
    differently, and scores that nearly tie may be ranked otherwise.

    Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1; with `round_to` sec. 3.5,
    and GPTQ: Frantar et al. 2022, arXiv 2210.17323.
    """
    check_int("obs", "block", block, 1)
    share = check_damp("obs", damp)
    w, h = in_one_dtype("obs", weight, hessian)
    size = _rows(w)
    # whose products have the same bits on one process and on several
    parts = own(-(-len(w) // size))
    mine = slice(parts.start * size, parts.stop * size)
    choice = _choice(w, mask, keep, pattern, block, mine)
    if not w.numel():
        return torch.zeros_like(w, dtype=weight.dtype), torch.zeros_like(
            w, dtype=torch.bool
        )
    grid = None if round_to is None else _check_grid(round_to, w)
    check_alike("obs", w, h, mask, keep, pattern, block, damp, *(round_to or ()))
    separate = not size % max(choice.rows, 1) or len(w) <= size
    if not separate:  # rows of one part compete with rows of other parts
        choose = choice.choose
        choice = choice._replace(
            choose=lambda scores, i: choose(gathered(scores.T)[0].T, i)[:, mine]
        )

    new = w[mine]
    kept = torch.empty_like(w[mine], dtype=torch.bool)
    if parts or not separate:
        # The authors factor the inverse, U'U with U upper triangular. Here H = R R'
        # with R = U^-1, and no inverse is made: their errors e and the changes d of the
        # weights, new = old - d, are related by d = e U, hence e = d R. Reversing the
        # order of rows and columns turns R into the usual factor.
        h = h.flip(0, 1)
        dead = damp_in_place("obs", h, share).flip(0)
        if host_number(dead.any()) is False:
            w = new
        else:
            w = new.masked_fill(dead, 0.0)
        factor = factor_in_place("obs", h, share)
        given = [] if mask is None else [mask]
        if grid is not None:
            grid = _rows_of(grid, mine)
            given += [grid.scale, grid.zero]
        new, kept = _swept(w, size, factor, choice, grid, given)
    new, kept = gathered(new.to(weight.dtype), kept)
    return new, kept


def _check_grid(grid: Grid, w: Tensor) -> Grid:
    # The grid in the dtype that is computed in.
    if not isinstance(grid, Grid):
        raise TypeError(
            "obs: expected round_to to be a grid such as sf.solve.grid(weight, 4), got "
            f"{type(grid).__name__}"
        )
    _, _, low, high = grid
    if not (is_int(low) and is_int(high) and low <= high):
        raise ValueError(
            "obs: expected round_to with ints low <= high, got "
            f"{low!r} and {high!r}: sf.solve.grid(weight, 4) makes them"
        )
    if grid.scale.ndim != 2 or grid.zero.shape != grid.scale.shape:
        raise ValueError(
            "obs: expected round_to with scale and zero of shape (rows, groups), got "
            f"{tuple(grid.scale.shape)} and {tuple(grid.zero.shape)}: make it of this "
            "weight, as sf.solve.grid(weight, 4) does"
        )
    rows, groups = grid.scale.shape
    if rows != len(w) or not groups or w.shape[1] % groups:
        raise ValueError(
            f"obs: expected round_to of (rows, groups) that fit a weight of "
            f"{tuple(w.shape)}, got {rows, groups}: make it of this weight, as "
            "sf.solve.grid(weight, 4) does"
        )
    check_device("weight and round_to", w.device, grid.scale, grid.zero)
    scale = grid.scale.detach().to(w.dtype)
    zero = grid.zero.detach().to(w.dtype)
    usable = scale.isfinite() & (scale > 0)
    usable &= (zero == zero.round()) & (zero >= low) & (zero <= high)
    if read_number(usable.all()) is False:
        row = int((~usable).any(1).nonzero()[0])
        raise ValueError(
            f"obs: expected round_to with scales that are finite and above 0 in "
            f"{w.dtype}, and zeros that are integers from {low} to {high}, got others "
            f"in row {row}: groups of zeros have the scale 1, as sf.solve.grid(weight, "
            "4) makes it"
        )
    return Grid(scale, zero, low, high)


def _rows_of(grid: Grid, rows: slice) -> Grid:
    return grid._replace(scale=grid.scale[rows], zero=grid.zero[rows])


def _swept(
    w: Tensor,
    size: int,
    lower: Tensor,
    choice: Choice,
    grid: Grid | None,
    others: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    # New weights and their mask, from the factor of the reversed hessian; `others` are
    # tensors that decide them, too.
    columns = len(lower)
    widths = widths_of(choice, w.device)
    wide = widths[0]
    # batched by vmap if one of them is
    entry = sum(x[:1, :1] for x in (w, lower, *others))
    assert isinstance(entry, Tensor)
    like = entry.expand(w.shape)
    plain = torch.contiguous_format
    new = torch.empty_like(like, dtype=w.dtype, memory_format=plain)
    kept = torch.empty_like(like, dtype=torch.bool, memory_format=plain)
    rows = [slice(i, i + size) for i in range(0, len(w), size)] or [slice(0, 0)]
    parts = []
    for at in rows:
        changes = torch.empty_like(new[at].T, memory_format=plain).copy_(w[at].T)
        mask = torch.empty_like(kept[at].T, memory_format=plain)
        rounding = None
        if grid is not None:
            rounding = Rounding.of(columns, _rows_of(grid, at))
        parts.append((changes, mask, rounding))
    for a in range(0, columns, wide):
        b = min(a + wide, columns)
        # columns a to b of R, rows up to b
        factor = lower[columns - b :, columns - b : columns - a].flip(0, 1)
        scale = factor[a:].diagonal().clone()
        factor.div_(-scale)
        within = factor[a:].triu(1).T.contiguous()
        swept = []
        for changes, mask, rounding in parts:
            swept.append(
                Columns(
                    member_product(factor[:a].T, changes[:a]),
                    changes[a:b],
                    mask[a:b],
                    within,
                    scale,
                    None if rounding is None else rounding.part(a, b),
                )
            )
        sweep(swept, choice, widths, a // choice.span)
    for (changes, mask, _), at in zip(parts, rows, strict=True):
        new[at].copy_(changes.T)
        kept[at].copy_(mask.T)
    new = new.neg_().add_(w)  # in this order -0.0 stays -0.0
    if grid is not None:  # old - (old - new) may differ from new in its last bit
        new = grid.round(new)
    return torch.where(kept, new, 0.0), kept


def _rows(w: Tensor) -> int:
    # How many rows a part has, by the shape alone.
    rows = ENTRIES[int(w.device.type != "cpu")] // max(w.shape[1], 1)
    return max(16, rows // 16 * 16)


# ---- what is kept --------------------------------------------------------------------


def _choice(
    w: Tensor,
    mask: Tensor | None,
    keep: Keep | None,
    pattern: Pattern | None,
    block: int,
    mine: slice,
) -> Choice:
    columns = max(w.shape[1], 1)
    if mask is not None:
        if keep is not None or pattern is not None:
            raise TypeError(
                "obs: expected a mask, or keep or a pattern that make one, got both"
            )
        given = check_kept("obs", mask, w)[mine]
        wide = WIDTHS[0]

        def given_columns(scores: Tensor, i: int) -> Tensor:
            return given[:, i * wide : (i + 1) * wide].contiguous().T

        return Choice(wide, 1, given_columns)
    if pattern is None:
        if keep is None:
            raise TypeError(
                "obs: expected one of mask, keep and pattern, got none of them"
            )
        sizes = []
        for a in range(0, w.shape[1], block):
            sizes.append(min(block, columns - a) * w.shape[0])
        counts = _counts(keep, sizes)
        return Choice(
            min(block, columns),
            len(w),
            lambda scores, i: topk_mask(scores.T, counts[i]).T,
        )
    units = units_of_weight("obs", pattern, w)
    span = min(units.group[1] * units.unit[1], columns)
    if block < columns and (not span or block % span):
        raise ValueError(
            f"obs: expected groups inside blocks of {block} columns, got {pattern}, "
            f"whose groups have {span} columns in a weight of shape {tuple(w.shape)}; "
            f"give block={span} or a multiple of it"
        )
    if (len(w), span) != w.shape:  # parts are cut as the whole weight is
        pattern = replace(
            pattern,
            unit=lambda shape: units.unit,
            group=lambda grid: units.group,
            fixed=units.fixed,
        )
    if isinstance(keep, Sequence):
        raise TypeError(
            f"obs: expected keep to be the share or count of a group of {pattern}, "
            f"got {keep!r}"
        )
    count = _kept(keep, units.rows[1]) if isinstance(keep, float) else keep
    height = units.group[0] * units.unit[0]
    number = kept_count(units, count) if _are_single(units) and w.numel() else None
    if height == 1 and isinstance(number, int):
        best = best_of_columns(span, number, w.device)
        n_best = None if columns % span else number  # the last group may have fewer
        # a group is in a column of the scores
        return Choice(span, 1, lambda scores, i: best(scores), n_best)
    return Choice(
        span,
        height,
        lambda scores, i: topk_mask(scores.T, count, pattern=pattern).T,
    )


def _are_single(units: Units) -> bool:
    # Whether units are single weights that are chosen by their scores alone.
    pattern = units.pattern
    plain = type(pattern) is Pattern and pattern.zeros is None
    return plain and units.single and units.allowed is None


def _counts(keep: Keep, sizes: list[int]) -> list[int]:
    # How many entries each block keeps, of as many as it has.
    total = sum(sizes)
    if is_sequence(keep):
        counts = list(keep)
        if len(counts) != len(sizes):
            raise ValueError(
                f"obs: expected a count for each of {len(sizes)} blocks, got "
                f"{len(counts)}"
            )
        for i, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            if not is_int(count):
                raise TypeError(
                    f"obs: expected counts to be ints, got {count!r} for block {i}"
                )
            if not 0 <= count <= size:
                raise ValueError(
                    f"obs: expected 0 <= keep <= {size} for block {i}, got {count}"
                )
        return counts
    wanted = keep
    if isinstance(keep, float):
        wanted = _kept(keep, total)
    if not is_int(wanted):
        raise TypeError(
            "obs: expected keep to be a float, an int or a sequence of ints, got "
            f"{keep!r}"
        )
    if not 0 <= wanted <= total:
        raise ValueError(
            f"obs: expected 0 <= keep <= {total}, as many as the weight has, got "
            f"{wanted}"
        )
    shares = {f"{i:09d}": size for i, size in enumerate(sizes)}
    return [int(count) for count in apportion(shares, wanted, shares).values()]


def _kept(share: float, n: int) -> int:
    check_sparsity(share, "keep")
    return int(n_kept(n, 1.0 - share))
