"""What operations do, found by running them: which dimensions pass, and which slices of
the results are constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsefn.shrinking.values import (
    Book,
    Constants,
    Step,
    Value,
    replaced,
    run_op,
    values_in,
)

_DRAWS = 8  # for what varies: numbers of many sizes and both signs


def of_leaf(
    book: Book, leaf: Tensor, real: Tensor | None, mask: Tensor | None, d: int
) -> Constants:
    """The constants of a leaf along a dimension: masked slices are 0, and a slice of
    one entry is a constant.
    """
    size = leaf.shape[d]
    if isinstance(leaf, nn.Parameter) and book.masks is None:
        return np.zeros(size)
    found = np.full(size, np.nan)
    if leaf.numel() == size and leaf.is_floating_point() and real is not None:
        found = real.double().cpu().reshape(-1).numpy().copy()
    if mask is not None:
        found[~mask.movedim(d, 0).reshape(size, -1).any(1).cpu().numpy()] = 0
    return found if np.isfinite(found).any() else None


@functools.lru_cache(maxsize=64)
def many_sizes(count: int) -> Tensor:
    """Numbers from 1e-6 to 1e6 of both signs, and 0: a function that is the same at all
    of them does not vary.

    >>> many_sizes(4).shape
    torch.Size([8, 4])
    """
    draw = torch.Generator().manual_seed(0)
    sizes = 10 ** (
        12
        * torch.rand(_DRAWS, count, generator=draw, device="cpu", dtype=torch.float64)
        - 6
    )
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64, device="cpu").repeat(
        _DRAWS // 2
    )[:, None]
    made = sizes * signs
    made[-1] = 0
    return made


def elementwise(
    step: Step,
    ins: list[Value],
    at: Sequence[int | None],
    size: int,
    *,
    flat: bool = False,
) -> Constants:
    """The constants of a result along a dimension, which is this dimension of each
    input (None: it has none).

    All draws of what varies must give the same number, and a number. `flat`: the
    operation takes one input with a dimension in front of it, and the others without.
    """
    known = [
        None if d is None else value.gone[d] for value, d in zip(ins, at, strict=True)
    ]
    if all(constants is None for constants in known) or not all(
        v.dtype.is_floating_point for v in ins
    ):
        return None
    if any(value.real is None and 0 in value.shape for value in ins):
        return None
    given = []
    for value, constants in zip(ins, known, strict=True):
        if value.real is not None and value.real.numel() == 1:
            given.append(value.real.double().reshape(1, 1))
        else:
            given.append(
                torch.from_numpy(
                    np.full(size, np.nan) if constants is None else constants
                )[None]
            )
    varies = [bool(x.isnan().any()) for x in given]
    draws = _DRAWS if any(varies) else 1
    for i, x in enumerate(given):
        made = (
            torch.where(x.isnan(), many_sizes((i + 1) * size)[:, -size:], x)
            if varies[i]
            else x.expand(draws, size)
        )
        if flat:
            made = made.reshape(-1) if i else made.reshape(1, -1)
        given[i] = made
    try:
        out = run_op(step.target, in_double(step.arguments), given)[0]
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None
    out = out.reshape(draws, size) if flat else out
    return (
        _same(out)
        if out.shape == (draws, size) and out.dtype.is_floating_point
        else None
    )


def in_double(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for float64 tensors: no cast to another floating-point type, and on
    the CPU.
    """
    made = dict(arguments)
    if isinstance(made.get("dtype"), torch.dtype) and made["dtype"].is_floating_point:
        made["dtype"] = torch.float64
    if "device" in made:
        made["device"] = None
    return made


def _same(draws: Tensor, near: float = 0.0) -> Constants:
    rows = draws.double().numpy()
    constant = np.isclose(rows, rows[0], near, 0.0).all(0) & np.isfinite(rows[0])
    return np.where(constant, rows[0], np.nan) if constant.any() else None


def by_running(
    step: Step,
    ins: list[Value],
    outs: list[Value],
    places: list[tuple[int, int]],
    made: list[list[Tensor]],
) -> dict[tuple[int, int], Constants]:
    """The constants of outputs along dimensions, found by running the operation on
    draws of its inputs.

    `made` are the draws. Slices of inputs that are constant have their constant in
    them. `places` are (output, dimension): a slice is constant if all of its entries
    are one number in all draws.
    """
    results = []
    for draw in made:
        given = []
        for x, value in zip(draw, ins, strict=True):
            for d, constants in enumerate(value.gone if x.is_floating_point() else ()):
                if constants is not None:
                    view = torch.from_numpy(constants).reshape(
                        [-1 if e == d else 1 for e in range(x.ndim)]
                    )
                    x = torch.where(view.isnan(), x, view)
            given.append(x)
        results.append(run_op(step.target, in_double(step.arguments), given))
    found: dict[tuple[int, int], Constants] = {}
    for j, e in places:
        rows = torch.cat(
            [run[j].movedim(e, 0).reshape(outs[j].shape[e], -1) for run in results], 1
        )
        if rows.is_floating_point() and rows.shape[1]:
            # a mean of one number over another length is rounded otherwise
            found[j, e] = _same(rows.T, 1e-12)
    return found


Place = tuple[int, int]  # (number of the tensor, dimension)
_SHORT = 3
_FAILS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError)


class Pass(NamedTuple):
    """Dimensions of inputs that lose entries together, and of outputs that lose the
    same; none where it is summed.
    """

    ties: tuple[Place, ...]
    places: tuple[Place, ...]


def pointwise(step: Step) -> Any:
    """The outputs of an elementwise operation: aligned dimensions are joined."""
    ins = values_in(step.arguments)
    made = []
    for out in values_in(step.outs):
        labels = []
        gone = []
        for e, size in enumerate(out.shape):
            at = [e - len(out.shape) + len(value.shape) for value in ins]
            has = [
                d if d >= 0 and value.shape[d] == size > 1 else None
                for value, d in zip(ins, at, strict=True)
            ]
            some = [
                value.labels[d]
                for value, d in zip(ins, has, strict=True)
                if d is not None
            ]
            labels.append(step.join(*some) if some else None)
            gone.append(
                elementwise(step, ins, has, size)
                if some and labels[-1] is not None
                else None
            )
        made.append(out._replace(labels=tuple(labels), gone=tuple(gone)))
    return replaced(step.outs, made)


def tried(step: Step) -> Any:
    """The outputs of any operation: a dimension passes if f(x[keep]) == f(x)[keep].

    One that is summed over passes where f(x[keep]) == f(x with zeros elsewhere), for
    entries that are 0 when they go. What fails stays. What takes integers that are not
    known is not tried.
    """
    ins = values_in(step.arguments)
    outs = values_in(step.outs)
    open_ = {
        (k, d)
        for k, value in enumerate(ins)
        for d, label in enumerate(value.labels)
        if label is not None
    }
    labels = [list(out.labels) for out in outs]
    gone = [list(out.gone) for out in outs]
    for passed in _passes(step, ins, outs, open_) if open_ else ():
        open_ -= set(passed.ties)
        label = step.join(*(ins[k].labels[d] for k, d in passed.ties))
        if not passed.places:
            zero = np.all([ins[k].zero(d) for k, d in _zeroed(ins, passed.ties)], 0)
            step.sums(label, zero)
        for j, e in passed.places:
            labels[j][e] = label
    for k, d in sorted(open_):
        step.freeze(ins[k].labels[d], "mixes its entries")
    places = [
        (j, e)
        for j, some in enumerate(labels)
        for e, label in enumerate(some)
        if label is not None
    ]
    for (j, e), constants in constants_of(step, ins, outs, places).items():
        gone[j][e] = constants
    made = [
        out._replace(labels=tuple(a), gone=tuple(b))
        for out, a, b in zip(outs, labels, gone, strict=True)
    ]
    return replaced(step.outs, made)


def constants_of(
    step: Step, ins: list[Value], outs: list[Value], places: list[Place]
) -> dict[Place, Any]:
    """The constants of these dimensions of outputs, found by running the operation
    twice at each of two lengths.

    The lengths are of dimensions that have no label, such as tokens, of which there may
    be others when the program runs: the mean of a constant over them is the same at all
    lengths, and its softmax is not.
    """
    if not places or all(
        constants is None for value in ins for constants in value.gone
    ):
        return {}
    whole = [value.shape for value in ins]
    other = _shapes(ins, _length)
    for lengths in ([whole, other], [whole]):
        try:
            draws = [
                _draw(ins, sign, shapes) for shapes in lengths for sign in (1.0, -1.0)
            ]
            made = [_with_real(ins, draw) for draw in draws]
            return by_running(step, ins, outs, places, made)
        except _FAILS:
            pass
    return {}


def _with_real(ins: list[Value], draw: list[Tensor]) -> list[Tensor]:
    # What is known of the inputs in place of drawn numbers.
    return [
        x if value.real is None else value.real.to(x.dtype)
        for x, value in zip(draw, ins, strict=True)
    ]


def _length(n: int) -> int:
    if n == 1:
        return n
    return _SHORT if n > _SHORT else n + 1


def _shapes(ins: list[Value], length: Callable[[int], int]) -> list[tuple[int, ...]]:
    # With other lengths of the dimensions that have no label, such as tokens and the
    # sides of images.
    def shape_of(value: Value) -> tuple[int, ...]:
        return tuple(
            length(n) if label is None else n
            for n, label in zip(value.shape, value.labels, strict=True)
        )

    return [shape_of(value) for value in ins]


def _zeroed(ins: list[Value], ties: tuple[Place, ...]) -> list[Place]:
    return [(k, d) for k, d in ties if ins[k].zero(d).any()]


def _with_zeros(value: Value) -> tuple[bool, ...]:
    # Of each dimension whether any slice is 0, should it go.
    return tuple(bool(value.zero(d).any()) for d in range(len(value.shape)))


def _passes(
    step: Step, ins: list[Value], outs: list[Value], open_: set[Place]
) -> list[Pass]:
    zero = tuple(_with_zeros(value) for value in ins)
    key = (
        "tried",
        step.target,
        step.shown,
        frozenset(open_),
        tuple((v.shape, v.dtype) for v in ins),
        zero,
    )
    known = step.book.known
    if key not in known or any(
        value.real is not None and not value.dtype.is_floating_point for value in ins
    ):
        known[key] = list(_found(step, ins, open_))
    passes: list[Pass] = known[key]
    return passes


def _found(step: Step, ins: list[Value], open_: set[Place]) -> Iterator[Pass]:
    short = _shapes(ins, lambda n: min(n, _SHORT))
    whole = [value.shape for value in ins]
    for shapes in [whole] if short == whole else [short, whole]:
        found = list(_found_at(step, ins, open_, shapes))
        if found:
            yield from found
            return


def _found_at(
    step: Step, ins: list[Value], open_: set[Place], shapes: list[tuple[int, ...]]
) -> Iterator[Pass]:
    whole = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    if any(
        value.dtype.is_complex or (value.dtype in whole and value.real is None)
        for value in ins
    ):
        return
    arguments = in_double(step.arguments)
    try:
        positive = any(
            out.isnan().any()
            for out in run_op(step.target, arguments, _draw(ins, 0.0, shapes))
        )
        draws = [_draw(ins, 2.0 if positive else sign, shapes) for sign in (0.0, -1.0)]
        wanted = [run_op(step.target, arguments, draw) for draw in draws]
        again = run_op(step.target, arguments, draws[0])
    except _FAILS:
        return
    # it draws numbers itself
    if not all(_close(a, b) for a, b in zip(wanted[0], again, strict=True)):
        return
    # a constant tells nothing
    if any(out.numel() > 1 and (out == out.reshape(-1)[0]).all() for out in wanted[0]):
        return
    done: set[Place] = set()
    for k, d in sorted(open_):
        size = ins[k].shape[d]
        right = len(ins[k].shape) - d
        aligned = [
            (i, len(v.shape) - right)
            for i, v in enumerate(ins)
            if v.shape[-right:][:1] == (size,) and len(v.shape) >= right
        ]
        with_vectors = [
            (k, d),
            *((i, 0) for i, v in enumerate(ins) if i != k and v.shape == (size,)),
        ]
        for ties in (tuple(aligned), tuple(with_vectors), ((k, d),)):
            if (k, d) in done or done & set(ties):
                continue
            places = _places(
                step, arguments, ins, ties, list(zip(draws, wanted, strict=True))
            )
            if places is not None:
                done |= set(ties)
                yield Pass(ties, places)


def _places(
    step: Step, arguments: Any, ins: list[Value], ties: tuple[Place, ...], draws: Any
) -> tuple[Place, ...] | None:
    # Where the outputs lose what the inputs lose; None where they do not.
    dims = dict(ties)
    size = ins[ties[0][0]].shape[ties[0][1]]
    found: list[tuple[Place, ...]] = []
    for draw, wanted, count in ((*draws[0], max(1, size // 2)), (*draws[1], size - 1)):
        order = torch.from_numpy(np.random.default_rng(size).permutation(size))
        keep = order[:count].sort().values
        gone = order[count:]
        places: list[Place] = []
        try:
            smaller = [
                x.index_select(dims[i], keep) if i in dims else x
                for i, x in enumerate(draw)
            ]
            got = run_op(step.target, arguments, smaller)
        except _FAILS:
            return None
        for j, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if not a.numel() and a.shape == b.shape:
                continue
            moved = [
                e
                for e in range(a.ndim)
                if a.ndim == b.ndim and a.shape[e] != b.shape[e]
            ]
            if len(moved) == 1 and (a.shape[moved[0]], b.shape[moved[0]]) == (
                size,
                count,
            ):
                places.append((j, moved[0]))
                if not _close(a.index_select(moved[0], keep), b):
                    return None
            elif moved or a.shape != b.shape:
                return None
        if places and len(places) < sum(out.numel() > 0 for out in got):
            return None
        if not places:
            zeroed = dict(_zeroed(ins, ties))
            with_zeros = [
                x.index_fill(zeroed[i], gone, 0) if i in zeroed else x
                for i, x in enumerate(draw)
            ]
            masked = run_op(step.target, arguments, with_zeros)
            if not zeroed or not all(
                _close(a, b) for a, b in zip(masked, got, strict=True)
            ):
                return None
        found.append(tuple(places))
    return found[0] if found[0] == found[1] else None


def _draw(ins: list[Value], sign: float, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    # Numbers of both signs (0), of one, or further positive ones (2).
    made = []
    for i, (value, shape) in enumerate(zip(ins, shapes, strict=True)):
        x = _numbers(shape, i)
        if not value.dtype.is_floating_point:
            made.append((x > 0).to(value.dtype) if value.real is None else value.real)
        else:
            made.append(x if sign == 0 else sign * (x.abs() + 0.1))
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
