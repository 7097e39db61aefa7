"""What operations do, found by running them: which dimensions pass, and which slices of
the results are constant.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsefn.shrinking.values import (
    AnalysisLog,
    Constants,
    Step,
    Value,
    kept_slices,
    labelled,
    replaced,
    run_op,
    values_in,
)

Shapes = list[tuple[int, ...]]
_DRAWS = 8  # for what varies: numbers of many sizes and both signs


def of_leaf(
    log: AnalysisLog,
    leaf: Tensor,
    real: Tensor | None,
    mask: Tensor | None,
    d: int,
) -> Constants:
    """The constants of a leaf along a dimension: masked slices are 0, and a slice of
    one entry is a constant.
    """
    size = leaf.shape[d]
    if isinstance(leaf, nn.Parameter) and log.masks is None:
        return np.zeros(size)
    found = np.full(size, np.nan)
    if leaf.numel() == size and leaf.is_floating_point() and real is not None:
        numbers = real.double().cpu().reshape(-1)
        found = numbers.numpy().copy()
    if mask is not None:
        masked = ~kept_slices(mask, d)
        found[masked] = 0
    if not np.isfinite(found).any():
        return None
    return found


@functools.lru_cache(maxsize=64)
def many_sizes(count: int) -> Tensor:
    """Numbers from 1e-6 to 1e6 of both signs, and 0: a function that is the same at all
    of them does not vary.

    >>> many_sizes(4).shape
    torch.Size([8, 4])
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(_DRAWS, count, generator=draw, device="cpu", dtype=torch.float64)
    made = 10 ** (12 * x - 6)
    made[1::2] *= -1
    made[-1] = 0
    return made


def elementwise(
    step: Step,
    ins: list[Value],
    at: Sequence[int | None],
    size: int,
) -> Constants:
    """The constants of a result along a dimension, which is this dimension of each
    input (None: it has none).

    All draws of what varies must give the same number, and a number. The operation
    takes the first input with a dimension in front of it, as norms take a batch.
    """
    known = []
    for value, d in zip(ins, at, strict=True):
        known.append(None if d is None else value.constants[d])
    if all(constants is None for constants in known):
        return None
    for value in ins:
        if not value.dtype.is_floating_point:
            return None
        if value.real is None and 0 in value.shape:
            return None
    rows = []
    for value, constants in zip(ins, known, strict=True):
        if value.real is not None and value.real.numel() == 1:
            constants = np.full(size, float(value.real))
        elif constants is None:
            constants = np.full(size, np.nan)
        rows.append(torch.from_numpy(constants))
    vary = [row.isnan() for row in rows]
    draws = 1
    if any(some.any() for some in vary):
        draws = _DRAWS
    given = []
    for i, row in enumerate(rows):
        made = row.expand(draws, size)
        if vary[i].any():
            numbers = many_sizes((i + 1) * size)[:, -size:]
            made = torch.where(vary[i], numbers, row)
        given.append(made.reshape(-1))
    given[0] = given[0][None]
    arguments = in_double(step.arguments)
    try:
        out = run_op(step.target, arguments, given)[0]
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None
    if out.numel() != draws * size or not out.dtype.is_floating_point:
        return None
    return _same(out.reshape(draws, size))


def in_double(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for float64 tensors: no cast to another floating-point type, and on
    the CPU.
    """
    made = dict(arguments)
    dtype = made.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        made["dtype"] = torch.float64
    if "device" in made:
        made["device"] = None
    return made


def _same(draws: Tensor, near: float = 0.0) -> Constants:
    rows = draws.double().numpy()
    first = rows[0]
    constant = np.isclose(rows, first, near, 0.0).all(0)
    constant &= np.isfinite(first)
    if not constant.any():
        return None
    return np.where(constant, first, np.nan)


Place = tuple[int, int]  # (number of the tensor, dimension)
_SHORT = 3
_FAILS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError)


class TiedDims(NamedTuple):
    """Dimensions that lose the same entries."""

    ties: tuple[Place, ...]  # of inputs
    places: tuple[Place, ...]  # of outputs; none where the operation sums over it


def pointwise(step: Step) -> Any:
    """The outputs of an elementwise operation: aligned dimensions are joined."""
    ins = values_in(step.arguments)
    made = []
    for out in values_in(step.outs):
        labels = list(out.labels)
        constants = list(out.constants)
        for e, size in enumerate(out.shape):
            at: list[int | None] = []
            aligned = []
            for value in ins:
                d = e - out.ndim + value.ndim
                if d >= 0 and value.shape[d] == size > 1:
                    at.append(d)
                    aligned.append(value.labels[d])
                else:
                    at.append(None)
            labels[e] = step.join(*aligned) if aligned else None
            if labels[e] is not None:
                constants[e] = elementwise(step, ins, at, size)
        made.append(out.along(labels, constants))
    return replaced(step.outs, made)


def probed(step: Step) -> Any:
    """The outputs of any operation: a dimension passes if f(x[keep]) == f(x)[keep].

    One that is summed over passes where f(x[keep]) == f(x with zeros elsewhere), for
    entries that are 0 when they go. What fails stays. What takes integers that are not
    known is not tried.
    """
    ins = values_in(step.arguments)
    outs = values_in(step.outs)
    open_ = set(labelled(ins))
    labels = [list(out.labels) for out in outs]
    if open_:
        passes = _passes(step, ins, frozenset(open_))
    else:
        passes = []
    for passed in passes:
        open_ -= set(passed.ties)
        tied = [ins[k].labels[d] for k, d in passed.ties]
        label = step.join(*tied)
        if not passed.places:
            zeros = [ins[k].zero(d) for k, d in _zeroed(ins, passed.ties)]
            step.sums(label, np.all(zeros, 0))
        for j, e in passed.places:
            labels[j][e] = label
    for k, d in sorted(open_):
        step.freeze(ins[k].labels[d], "mixes its entries")
    made = [
        out.along(some, out.constants) for out, some in zip(outs, labels, strict=True)
    ]
    return replaced(step.outs, with_constants(step, ins, made))


def with_constants(step: Step, ins: list[Value], outs: list[Value]) -> list[Value]:
    """The outputs with the constants of their dimensions that have a label, found by
    running the operation twice at each of two lengths.

    The lengths are of dimensions that have no label, such as tokens, whose number may
    differ when the program runs: the mean of a constant over them is the same at all
    lengths, and its softmax is not.
    """
    if not labelled(outs):
        return outs
    if all(constants is None for value in ins for constants in value.constants):
        return outs
    whole = [value.shape for value in ins]
    other = _shapes(ins, _length)
    for lengths in ([whole, other], [whole]):
        with contextlib.suppress(*_FAILS):
            return _constant_at(step, ins, outs, lengths)
    return outs


def _constant_at(
    step: Step,
    ins: list[Value],
    outs: list[Value],
    lengths: list[Shapes],
) -> list[Value]:
    # A slice is constant if all of its entries are one number in all draws. Slices of
    # inputs that are constant have their constant in them.
    runs = []
    arguments = in_double(step.arguments)
    for shapes in lengths:
        for sign in (1.0, -1.0):
            given = []
            for x, value in zip(_draw(ins, sign, shapes), ins, strict=True):
                if value.real is not None:
                    x = value.real.to(x.dtype)
                given.append(_with_own_constants(x, value))
            runs.append(run_op(step.target, arguments, given))
    constants = [list(out.constants) for out in outs]
    for j, e in labelled(outs):
        size = outs[j].shape[e]
        slices = [run[j].movedim(e, 0).reshape(size, -1) for run in runs]
        rows = torch.cat(slices, 1)
        if rows.is_floating_point() and rows.shape[1]:
            # a mean of one number over another length is rounded otherwise
            constants[j][e] = _same(rows.T, 1e-12)
    return [
        out.along(out.labels, some) for out, some in zip(outs, constants, strict=True)
    ]


def _with_own_constants(x: Tensor, value: Value) -> Tensor:
    if not x.is_floating_point():
        return x
    for d, constants in enumerate(value.constants):
        if constants is not None:
            later = [1] * (x.ndim - d - 1)
            view = torch.from_numpy(constants).reshape(-1, *later)
            x = torch.where(view.isnan(), x, view)
    return x


def _length(n: int) -> int:
    if n == 1:
        return n
    return _SHORT if n > _SHORT else n + 1


def _shapes(ins: list[Value], length: Callable[[int], int]) -> Shapes:
    # With other lengths of the dimensions that have no label, such as tokens and the
    # sides of images.
    made = []
    for value in ins:
        sizes = []
        for n, label in value.dims:
            if label is None:
                sizes.append(length(n))
            else:
                sizes.append(n)
        made.append(tuple(sizes))
    return made


def _zeroed(ins: list[Value], ties: Iterable[Place]) -> list[Place]:
    # The dimensions of which any slice is 0, should it go.
    return [(k, d) for k, d in ties if ins[k].zero(d).any()]


def _passes(step: Step, ins: list[Value], open_: frozenset[Place]) -> list[TiedDims]:
    every = [(k, d) for k, value in enumerate(ins) for d in range(value.ndim)]
    kinds = tuple((value.shape, value.dtype) for value in ins)
    zeroed = tuple(_zeroed(ins, every))
    key = ("tried", step.target, step.shown, open_, kinds, zeroed)
    known = step.log.known
    # these decide, and are no part of the key
    integers = [value for value in ins if not value.dtype.is_floating_point]
    if key not in known or any(value.real is not None for value in integers):
        short = _shapes(ins, lambda n: min(n, _SHORT))
        whole = [value.shape for value in ins]
        known[key] = _found_at(step, ins, open_, short)
        if not known[key] and short != whole:
            known[key] = _found_at(step, ins, open_, whole)
    passes: list[TiedDims] = known[key]
    return passes


def _found_at(
    step: Step,
    ins: list[Value],
    open_: frozenset[Place],
    shapes: Shapes,
) -> list[TiedDims]:
    integers = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    for value in ins:
        unknown = value.dtype in integers and value.real is None
        if value.dtype.is_complex or unknown:
            return []

    run = partial(run_op, step.target, in_double(step.arguments))
    try:
        outs = run(_draw(ins, 0.0, shapes))
        signs = (0.0, -1.0)
        if any(out.isnan().any() for out in outs):
            signs = (2.0, 2.0)
        draws = [_draw(ins, sign, shapes) for sign in signs]
        wanted = [run(draw) for draw in draws]
        again = run(draws[0])
    except _FAILS:
        return []
    # it draws numbers itself
    if not all(map(_close, wanted[0], again)):
        return []
    # a constant tells nothing
    for out in wanted[0]:
        if out.numel() > 1 and (out == out.reshape(-1)[0]).all():
            return []
    found: list[TiedDims] = []
    done: set[Place] = set()
    for k, d in sorted(open_):
        size = ins[k].shape[d]
        right = ins[k].ndim - d
        aligned: list[Place] = []
        vectors: list[Place] = []
        for i, value in enumerate(ins):
            if value.ndim >= right and value.shape[-right] == size:
                aligned.append((i, value.ndim - right))
            if i != k and value.shape == (size,):
                vectors.append((i, 0))
        for ties in (aligned, [(k, d), *vectors], [(k, d)]):
            if (k, d) in done or done & set(ties):
                continue
            pairs = list(zip(draws, wanted, strict=True))
            places = _places(run, ins, ties, pairs)
            if places is not None:
                done |= set(ties)
                found.append(TiedDims(tuple(ties), places))
    return found


Run = Callable[[list[Tensor]], list[Tensor]]


def _places(
    run: Run,
    ins: list[Value],
    ties: list[Place],
    draws: Any,
) -> tuple[Place, ...] | None:
    # Where the outputs lose what the inputs lose; None where they do not.
    first, dim = ties[0]
    size = ins[first].shape[dim]
    found = []
    counts = (max(1, size // 2), size - 1)
    for (draw, wanted), count in zip(draws, counts, strict=True):
        generator = np.random.default_rng(size)
        order = torch.from_numpy(generator.permutation(size))
        keep = order[:count].sort().values
        smaller = list(draw)
        try:
            for i, d in ties:
                smaller[i] = draw[i].index_select(d, keep)
            got = run(smaller)
        except _FAILS:
            return None
        places = _lost(wanted, got, keep, size)
        some = sum(out.numel() > 0 for out in got)
        if places is None or 0 < len(places) < some:
            return None
        if not places:
            zeroed = _zeroed(ins, ties)
            if not zeroed:
                return None
            masked = list(draw)
            for i, d in zeroed:
                masked[i] = draw[i].index_fill(d, order[count:], 0)
            if not all(map(_close, run(masked), got)):
                return None
        found.append(places)
    if found[0] != found[1]:
        return None
    return tuple(found[0])


def _lost(
    wanted: list[Tensor],
    got: list[Tensor],
    keep: Tensor,
    size: int,
) -> list[Place] | None:
    # The dimensions of outputs that lost what is not kept, and nothing else did; None
    # where that is not so.
    places = []
    for j, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if a.shape == b.shape:
            continue
        if a.ndim != b.ndim:
            return None
        moved = [e for e in range(a.ndim) if a.shape[e] != b.shape[e]]
        if len(moved) > 1:
            return None
        e = moved[0]
        if a.shape[e] != size or b.shape[e] != len(keep):
            return None
        if not _close(a.index_select(e, keep), b):
            return None
        places.append((j, e))
    return places


def _draw(ins: list[Value], sign: float, shapes: Shapes) -> list[Tensor]:
    # Numbers of both signs (0), of one, or further positive ones (2).
    made = []
    for i, (value, shape) in enumerate(zip(ins, shapes, strict=True)):
        x = _numbers(shape, i)
        if value.dtype.is_floating_point:
            if sign:
                x = sign * (x.abs() + 0.1)
            made.append(x)
        elif value.real is None:
            made.append((x > 0).to(value.dtype))
        else:
            made.append(value.real)
    return made


@functools.lru_cache(maxsize=64)
def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    # The same for all operations, as layers repeat.
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cpu", dtype=torch.float64)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True)
