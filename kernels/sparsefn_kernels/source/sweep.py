"""The sweep of SparseGPT over some columns, with the bits of
`posttraining/solve/sweep.py`.

Tensors are (columns, rows); a program sweeps a few of the rows. Every operation rounds
once, as torch does: launch with `enable_fp_fusion=False`. A thread has one row, and
reads what it has written itself; the barriers hold if a compiler lays rows out
otherwise.
"""

import triton
import triton.language as tl


@triton.jit
def _follow(due, factors, changes, first, end, rows, inside):
    """`due` and what the changes of columns first to end add to it."""
    for j in range(first, end):
        change = tl.load(changes + j * rows, mask=inside, other=0.0)
        due = due + tl.load(factors + j) * change
    return due


@triton.jit
def _score(
    due, old, factor, width, scale, scores, first, rows, inside, SPAN: tl.constexpr
):
    """Write the scores of a span of columns, as if all of them are kept."""
    for i in range(SPAN):
        column = first + i
        kept = tl.load(due + column * rows, mask=inside, other=0.0)
        factors = factor + column * width + first
        kept = _follow(kept, factors, scores, 0, i, rows, inside)
        tl.store(scores + i * rows, kept, mask=inside)
        tl.debug_barrier()
    for i in range(SPAN):
        column = first + i
        now = tl.load(scores + i * rows, mask=inside, other=0.0)
        now = now - tl.load(old + column * rows, mask=inside, other=0.0)
        now = now * tl.load(scale + column)
        score = now * now
        score = tl.where(score == score, score, -1.0)  # NaN is the least
        tl.store(scores + i * rows, score, mask=inside)
        tl.debug_barrier()


@triton.jit
def _choose(scores, mask, first, rows, inside, SPAN: tl.constexpr, BEST: tl.constexpr):
    """Write the mask of a span of columns: the best, of equal ones the first."""
    for i in range(SPAN):
        score = tl.load(scores + i * rows, mask=inside, other=0.0)
        beaten = tl.zeros_like(inside.to(tl.int32))
        for j in range(SPAN):
            other = tl.load(scores + j * rows, mask=inside, other=0.0)
            ahead = (other > score) | ((other == score) & (j < i))
            beaten += ahead.to(tl.int32)
        kept = (beaten < BEST).to(tl.int8)
        tl.store(mask + (first + i) * rows, kept, mask=inside)
        tl.debug_barrier()


@triton.jit
def _rounding_error(x, scale, zero, LOW: tl.constexpr, HIGH: tl.constexpr):
    """What rounding to a grid takes from some weights."""
    if x.dtype == tl.float64:
        y = x / scale
    else:
        y = tl.div_rn(x, scale)
    # the bounds are integers, so that they may come before the rounding
    y = tl.where(y < LOW - zero, LOW - zero, y)
    y = tl.where(y > HIGH - zero, HIGH - zero, y)
    # to the nearest integer, half to even; each step is exact
    whole = y.to(tl.int32)
    nearest = whole.to(x.dtype)
    part = y - nearest
    is_odd = (whole & 1) != 0
    nearest += tl.where((part > 0.5) | ((part == 0.5) & is_odd), 1.0, 0.0)
    nearest -= tl.where((part < -0.5) | ((part == -0.5) & is_odd), 1.0, 0.0)
    return x - nearest * scale


@triton.jit
def sweep(
    due,
    changes,
    mask,
    factor,
    width,
    scale,
    scores,
    grid_scale,
    grid_zero,
    columns,
    rows,
    SPAN: tl.constexpr,
    BEST: tl.constexpr,
    CHOOSE: tl.constexpr,
    ROUND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    B: tl.constexpr,
):
    """Sweep B rows. CHOOSE: the mask is written, and keeps BEST of each SPAN columns.
    Otherwise it is given, and SPAN is 1. ROUND: kept weights are rounded to a grid of
    integers from LOW to HIGH.
    """
    row = tl.program_id(0) * B + tl.arange(0, B)
    inside = row < rows
    due += row
    changes += row
    mask += row
    scores += row
    for first in range(0, columns, SPAN):
        for i in range(SPAN):
            column = first + i
            at = due + column * rows
            complete = tl.load(at, mask=inside, other=0.0)
            factors = factor + column * width
            complete = _follow(complete, factors, changes, 0, first, rows, inside)
            tl.store(at, complete, mask=inside)
            tl.debug_barrier()
        if CHOOSE:
            _score(
                due, changes, factor, width, scale, scores, first, rows, inside, SPAN
            )
            _choose(scores, mask, first, rows, inside, SPAN, BEST)
        for i in range(SPAN):
            column = first + i
            change = tl.load(due + column * rows, mask=inside, other=0.0)
            factors = factor + column * width
            change = _follow(change, factors, changes, first, column, rows, inside)
            at = changes + column * rows
            kept = tl.load(mask + column * rows, mask=inside, other=0) != 0
            old = tl.load(at, mask=inside, other=0.0)
            if ROUND:
                there = column * rows + row
                step = tl.load(grid_scale + there, mask=inside, other=1.0)
                zero = tl.load(grid_zero + there, mask=inside, other=0.0)
                change += _rounding_error(old - change, step, zero, LOW, HIGH)
            tl.store(at, tl.where(kept, change, old), mask=inside)
            tl.debug_barrier()
