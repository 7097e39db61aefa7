"""Places along dimensions that lose entries: slices, indices, rolls, scatters, pads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from sparsefn.shrinking.atoms import Flags
from sparsefn.shrinking.change import Places, Resizing, aten
from sparsefn.shrinking.values import Value

_WITH_ONE = (None, "constant")  # modes of padding


def cut_slice(change: Resizing) -> None:
    """A slice or narrow along a dimension that loses entries."""
    x, dim = _along(change)
    if dim in change.lost(x):
        change.become(*_read(change, dim, _range(change, x.shape[dim])))


def _range(change: Resizing, size: int) -> Places:
    # The indices that a slice takes.
    given = change.arguments
    start = given["start"]
    end = given.get("end")
    if "length" in given:  # a narrow
        start = start % size
        end = start + given["length"]
    return np.arange(size)[slice(start, end, given.get("step"))]


def cut_select(change: Resizing) -> None:
    """One index of a dimension that loses others."""
    x, dim = _along(change)
    if dim in change.lost(x):
        change.arguments["index"] = _moved_index(change, change.kept(x, dim))


def _moved_index(change: Resizing, keep: Flags) -> int:
    return int(change.moved(keep, np.arange(len(keep)), change.arguments["index"]))


def cut_index_select(change: Resizing) -> None:
    x, dim = _along(change)
    if dim in change.lost(x):
        change.become(*_read(change, dim, _known(change, change.values["index"])))


def cut_roll(change: Resizing) -> None:
    x = change.values["self"]
    lost = change.lost(change.values["self"])
    shifts = dict(
        zip(
            [d % len(x.shape) for d in change.values["dims"]],
            change.arguments["shifts"],
            strict=False,
        )
    )
    if not shifts or any(isinstance(shifts.get(d), fx.Node) for d in lost):
        change.refuse(
            "it rolls them by what depends on the sizes of inputs, or as one row"
        )
    for dim in [d for d in shifts if d in lost]:
        places = np.roll(np.arange(x.shape[dim]), shifts.pop(dim))
        change.arguments["self"] = change.insert(*_read(change, dim, places))
    change.arguments["shifts"] = list(shifts.values()) or [0]
    change.arguments["dims"] = list(shifts) or [0]


def cut_index(change: Resizing) -> None:
    """Tensors of indices, of which those that stay get new numbers."""
    x = change.values["self"]
    out = change.outs[0]
    indices = list(change.values["indices"])
    at = [d for d, index in enumerate(indices) if index is not None]
    if not set(at) & set(change.lost(x)) and not change.lost(out):
        return
    rank = max(len(indices[d].shape) for d in at)
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    made = list(change.arguments["indices"])
    for d in at:
        index = indices[d]
        keep = change.kept(x, d)
        wanted = [
            change.kept(out, first + rank - len(index.shape) + i)
            for i in range(len(index.shape))
        ]
        wanted = [
            one if n > 1 else np.ones(1, bool)
            for n, one in zip(index.shape, wanted, strict=True)
        ]
        if not keep.all() or not all(one.all() for one in wanted):
            new = change.moved(keep, _known(change, index) % len(keep), np.ix_(*wanted))
            made[d] = change.constant(
                f"index{d}", torch.from_numpy(new).to(_device(change))
            )
    change.arguments["indices"] = made


def cut_slice_scatter(change: Resizing) -> None:
    """A slice or one index of a dimension, written into."""
    x, dim = _along(change)
    if dim not in change.lost(x):
        return
    keep = change.kept(x, dim)
    if "index" in change.arguments:
        change.arguments["index"] = _moved_index(change, keep)
        return
    places = _range(change, x.shape[dim])
    new = change.moved(keep, places, keep[places])
    step = _step(new)
    if step is None:
        change.refuse("what stays does not lie at even distances")
    change.arguments.update(
        zip(("start", "end", "step"), _bounds(new, step), strict=True)
    )


def cut_pad(change: Resizing) -> None:
    """Pads on both sides of dimensions, some negative."""
    x = change.values["self"]
    out = change.outs[0]
    pads = list(change.arguments["pad"])
    for place in range(len(pads) // 2):
        dim = len(x.shape) - 1 - place
        if dim not in change.lost(x) and dim not in change.lost(out):
            continue
        left, right = pads[2 * place : 2 * place + 2]
        if (
            any(isinstance(n, fx.Node) for n in (left, right))
            or change.values.get("mode") not in _WITH_ONE
        ):
            change.refuse("it pads them with others of them, or as many as inputs have")
        keep = change.kept(x, dim)
        made = change.kept(out, dim)
        pads[2 * place] = (
            int(made[:left].sum())
            if left > 0
            else -int(keep[:-left].sum() if left else 0)
        )
        pads[2 * place + 1] = (
            int(made[len(made) - right :].sum())
            if right > 0
            else -int(keep[len(keep) + right :].sum())
        )
    change.arguments["pad"] = pads


def _along(change: Resizing) -> tuple[Value, int]:
    x: Value = change.values["self"]
    return x, change.values["dim"] % max(len(x.shape), 1)


def _known(change: Resizing, index: Any) -> Places:
    if not isinstance(index, Value) or index.real is None or index.dtype == torch.bool:
        change.refuse("it reads them at indices that depend on inputs")
    places: Places = index.real.cpu().numpy()
    return places


def _read(change: Resizing, dim: int, places: Places) -> tuple[Any, ...]:
    # The operation that reads these places of the input along a dimension: those that
    # its output keeps.
    new = change.moved(
        change.kept(change.values["self"], dim),
        places,
        change.kept(change.outs[0], dim),
    )
    x = change.arguments["self"]
    step = _step(new)
    if step is None:
        index = change.constant(
            f"index{dim}", torch.from_numpy(new).to(_device(change))
        )
        return aten.index_select.default, x, dim, index
    return aten.slice.Tensor, x, dim, *_bounds(new, step)


def _bounds(new: Places, step: int) -> tuple[int, int, int]:
    # A slice that takes these places.
    return (int(new[0]), int(new[-1]) + 1, step) if len(new) else (0, 0, step)


def _step(new: Places) -> int | None:
    # The distance of places in a row, if it is one.
    steps = np.unique(np.diff(new))
    if not len(steps):
        return 1
    return int(steps[0]) if len(steps) == 1 and steps[0] > 0 else None


def _device(change: Resizing) -> torch.device:
    val = change.old.meta.get("val")
    return val.device if isinstance(val, torch.Tensor) else torch.device("cpu")
