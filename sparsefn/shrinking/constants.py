"""Which slices are constant: of leaves, and of results, by running the operation on the
constants that are known.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsefn.shrinking.steps import Book, Step
from sparsefn.shrinking.values import Constants, Value, run_op

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
