"""Operations that move data: run on coordinates, they tell from which index of their
inputs each output index came. Tables: rows that any input may ask for stay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsefn.shrinking.channels import ChannelMap, Flags, Ids, Rank
from sparsefn.shrinking.values import (
    Constants,
    Step,
    Value,
    replaced,
    run_op,
    values_in,
)

_NAMES = """
view reshape _unsafe_view _reshape_alias view_as reshape_as permute transpose t T mT
numpy_T movedim swapaxes adjoint expand expand_as broadcast_to repeat tile
repeat_interleave slice narrow select cat concat concatenate stack hstack vstack split
split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk tensor_split
unbind flip roll squeeze unsqueeze flatten unflatten contiguous clone alias detach
lift_fresh_copy pixel_shuffle pixel_unshuffle constant_pad_nd pad unfold diagonal rot90
slice_scatter select_scatter
"""
MOVES = frozenset(_NAMES.split())
_SAME = frozenset(["contiguous", "clone", "alias", "detach", "lift_fresh_copy"])
_REPEATS = frozenset(["expand", "expand_as", "broadcast_to", "repeat", "tile"])


Array = npt.NDArray[np.float64]
_Place = tuple[int, int]  # (number of the tensor, dimension)


# Of the two factors of a dimension.
Ranks = tuple[Rank, Rank]
HEADS = (Rank.HEADS, Rank.WIDTHS)
GROUPS = (Rank.REPEATS, Rank.HEADS)


class IndexMap(NamedTuple):
    """Which index of one input dimension each place of an output has."""

    dims: tuple[int, ...]  # of the output, along which the index varies
    # the index, with an axis for each of dims; -1 where the input is not read
    places: npt.NDArray[np.int64]


def move(step: Step) -> Any:
    """The outputs of an operation that moves data: each dimension has the channels of
    what it is read from.

    An input dimension over several output dimensions is split; an output dimension that
    comes from several input dimensions is their product; one that comes from several
    inputs has the rows of each, which are joined where both reach.
    """
    ins = values_in(step.arguments)
    outs = values_in(step.outs)
    if step.name in _SAME:
        same = [out.along(ins[0].labels, ins[0].constants) for out in outs]
        return replaced(step.outs, same)
    dim = step.arguments.get("dim")
    if isinstance(dim, int) and step.is_symbolic and ins[0].shape:
        step.freeze(
            ins[0].labels[dim % ins[0].ndim],
            "cuts it at a place that depends on the sizes of inputs",
        )
    known = _index_maps(step, ins, outs)
    # of each dimension of an output what it has from each input
    pieces: dict[_Place, dict[int, list[_Rows]]]
    pieces = defaultdict(lambda: defaultdict(list))
    for (k, d), index_maps in known.index_maps.items():
        label = ins[k].labels[d]
        if label is None:
            label = np.zeros((ins[k].shape[d], 1), np.int64)
        for j, index_map in enumerate(index_maps):
            from_here = read_off(step, index_map, label, ins[k].constants[d])
            for e, piece in from_here.items():
                pieces[j, e][k].append(piece)
    made = []
    for j, out in enumerate(outs):
        labels = list(out.labels)
        constants = list(out.constants)
        for e, size in enumerate(out.shape):
            if (j, e) in pieces:
                parts = [_product(some) for some in pieces[j, e].values()]
                merged = _merged(step, parts)
                labels[e] = merged.label
                constants[e] = _constants(step, merged.constants, known.filled)
            elif (j, e) in known.repeats:
                labels[e] = step.channels.new(size, Rank.REPEATS)
            # places within a pixel
            if step.name == "pixel_shuffle" and e >= out.ndim - 2:
                step.freeze(labels[e], "divides it")
            if step.name.endswith("_as"):  # the sizes are another tensor's
                labels[e] = step.join(labels[e], ins[1].labels[e])
        made.append(out.along(labels, constants))
    return replaced(step.outs, made)


def _constants(step: Step, constants: Array, filled: bool) -> Constants:
    # The constants that are left where an operation fills in a number of its own.
    keep = np.isfinite(constants)
    if filled:
        fills_zero = not step.arguments.get("value")
        keep = (constants == 0) & fills_zero
    if not keep.any():
        return None
    return np.where(keep, constants, np.nan)


def pad(step: Step) -> Any:
    """The output of a pad: dimensions that it leaves alone pass, with the constants
    that it fills in.
    """
    x = step.arguments["self"]
    pads = step.arguments["pad"]
    padded = x.labels[x.ndim - len(pads) // 2 :]
    if step.is_symbolic or any(label is not None for label in padded):
        return move(step)
    constants: list[Constants] = []
    fills = step.arguments.get("mode", "constant") == "constant" and max(pads) > 0
    fill = step.arguments.get("value") or 0.0
    for label, some in zip(x.labels, x.constants, strict=True):
        if label is None:
            some = None
        elif some is not None and fills:
            some = np.where(some == fill, some, np.nan)
        constants.append(some)
    return step.outs.along(x.labels, constants)


def divided(
    step: Step,
    label: ChannelMap,
    m: int,
    n: int,
    ranks: Ranks = HEADS,
) -> tuple[ChannelMap, ChannelMap]:
    """The labels of the two dimensions of sizes m and n that one of m * n indices is
    made of.
    """
    if label is None:
        return None, None
    sizes = (m, n)
    dims = [axis for axis in range(2) if sizes[axis] > 1]
    index = np.arange(m * n).reshape([sizes[axis] for axis in dims])
    index_map = IndexMap(tuple(dims), index)
    pieces = read_off(step, index_map, label, None, ranks)
    labels: list[ChannelMap] = [None, None]
    for axis, piece in pieces.items():
        rows = step.channels.resolve(piece.rows)
        labels[axis] = piece._replace(rows=rows).label
    return labels[0], labels[1]


class _Rows(NamedTuple):
    rows: Ids
    reached: Flags  # which output indices come from here
    constants: Array

    @property
    def label(self) -> ChannelMap:
        return self.rows if self.rows.shape[1] else None


def read_off(
    step: Step,
    index_map: IndexMap,
    rows: Ids,
    constants: Constants,
    ranks: Ranks = HEADS,
) -> dict[int, _Rows]:
    dims, index = index_map
    reached = index >= 0
    if not dims:
        if reached.any():
            only = index.reshape(-1)[:1]
            step.freeze(rows[only], "takes this index alone")
        return {}
    grid = np.full(index.shape, np.nan)
    if constants is not None:
        grid = np.where(reached, constants[index], np.nan)
    made = {}
    rows = step.channels.resolve(rows)
    for axis, e in enumerate(dims):
        others = tuple(a for a in range(len(dims)) if a != axis)
        along: list[Ids] = []
        for column in rows.T:
            channels = np.where(reached, column[index], -1)
            part = _factor(step, channels, axis, ranks)
            if part is not None:
                along.append(part)
        label = np.zeros((index.shape[axis], 0), np.int64)
        if along:
            label = np.stack(along, 1)
        first = np.where(reached, grid, -np.inf).max(others)
        equal = grid == np.expand_dims(first, others)
        even = (equal | ~reached).all(others)
        kept = np.where(even & np.isfinite(first), first, np.nan)
        reached_here = np.asarray(reached.any(others))
        made[e] = _Rows(label, reached_here, kept)
    return made


def _factor(step: Step, channels: Ids, axis: int, ranks: Ranks) -> Ids | None:
    # The channels along one axis of a grid of channels, -1 for none; None where they
    # lie along other axes.
    if channels.ndim == 1:
        along = [0]
    else:
        along = _varies(channels)
    if not along:
        step.freeze(channels.max(keepdims=True).reshape(1, 1), "divides it")
    if axis not in along:
        return None
    constant = tuple(a for a in range(channels.ndim) if a not in along)
    table = channels.max(constant)
    if len(along) == 1:
        factor: Ids = table.clip(0)
        return factor
    key = (table.tobytes(), table.shape)
    # each channel of the grid is the product of one for each axis
    if key not in step.splits:
        outer, inner = ranks
        labels: list[Ids] = []
        for size in table.shape:
            labels.append(step.channels.new(size, inner if labels else outer))
        places = np.nonzero(table >= 0)
        factors = [label[at] for label, at in zip(labels, places, strict=True)]
        step.channels.join(
            table[places][:, None],
            np.concatenate(factors, 1),
            f"{step.where} divides it, and it is joined with what stays",
        )
        step.splits[key] = labels
    label = step.splits[key][along.index(axis)]
    factor = label[:, 0]
    return factor


def _product(pieces: list[_Rows]) -> _Rows:
    # What one output dimension has from several dimensions of an input.
    rows = np.concatenate([piece.rows for piece in pieces], 1)
    constants = pieces[0].constants
    for piece in pieces[1:]:
        constants = np.where(np.isnan(constants), piece.constants, constants)
    reached = np.any([piece.reached for piece in pieces], 0)
    return _Rows(rows, reached, constants)


def _merged(step: Step, parts: list[_Rows]) -> _Rows:
    # What one output dimension has from several inputs.
    rows, reached, constants = parts[0]
    rows = np.where(reached[:, None], rows, 0)
    for other in parts[1:]:
        both = reached & other.reached
        step.join(rows[both], other.rows[both])
        differ = both & ~(constants == other.constants)
        theirs = np.where(differ, np.nan, other.constants)
        constants = np.where(other.reached, theirs, constants)
        width = max(rows.shape[1], other.rows.shape[1])
        rows = _padded(rows, width)
        more = _padded(other.rows, width)
        new = other.reached & ~reached
        rows = np.where(new[:, None], more, rows)
        reached = reached | other.reached
    return _Rows(step.channels.resolve(rows), reached, constants)


def _padded(rows: Ids, width: int) -> Ids:
    more = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, more)))


# ------------------------------------------------ coordinates
class _Known(NamedTuple):
    # of each dimension of each input, one for each output
    index_maps: dict[_Place, list[IndexMap]]
    repeats: set[_Place]  # dimensions of outputs along which they repeat
    filled: bool  # some entries come from no input


def _index_maps(step: Step, ins: list[Value], outs: list[Value]) -> _Known:
    several = len(ins) > 1
    joined = several and any(
        label is not None for value in ins for label in value.labels
    )
    wanted = []
    for k, value in enumerate(ins):
        for d, label in enumerate(value.labels):
            if value.shape[d] > 1 and (label is not None or joined):
                wanted.append((k, d))
    shapes = tuple(value.shape for value in ins)
    key = ("move", step.target, step.shown, shapes, tuple(wanted))
    if step.log.known.get(key) is None:
        views = None
        if not several:
            views = _of_views(step, ins[0], wanted)
        step.log.known[key] = views or _of_grids(step, ins, outs, wanted)
    made: _Known = step.log.known[key]
    return made


def _of_views(step: Step, value: Value, wanted: list[_Place]) -> _Known | None:
    # Read off strides, without memory, where all outputs are views of a contiguous
    # input; else None.
    schema = step.target._schema
    if schema.returns[0].alias_info is None:
        return None
    base = torch.empty(value.shape, device="meta")
    given = replaced(step.arguments, [base])
    args = [given[spec.name] for spec in schema.arguments if not spec.kwarg_only]
    outs = step.target(*args)
    if isinstance(outs, list | tuple):
        outs = list(outs)
    else:
        outs = [outs]
    storage = base.untyped_storage()._cdata
    for out in outs:
        if out.untyped_storage()._cdata != storage or not out.numel():
            return None
    index_maps: dict[_Place, list[IndexMap]] = {}
    for _, d in wanted:
        below = math.prod(value.shape[d + 1 :])
        made = []
        for out in outs:
            index_map = _of_view(out, below, value.shape[d])
            if index_map is None:
                return None
            made.append(index_map)
        index_maps[0, d] = made
    repeats = {(j, e) for j, e in _dims_of(step, outs) if outs[j].stride(e) == 0}
    return _Known(index_maps, repeats, False)


def _dims_of(step: Step, outs: Sequence[Any]) -> set[_Place]:
    # The dimensions of the outputs of an operation that may repeat its input.
    found: set[_Place] = set()
    if step.name in _REPEATS:
        for j, out in enumerate(outs):
            found |= {(j, e) for e, n in enumerate(out.shape) if n > 1}
    return found


def _of_view(view: Tensor, below: int, size: int) -> IndexMap | None:
    # The index along an input dimension is position // below % size; None where lower
    # dimensions carry into it.
    span = below * size
    dims = []
    lower = 0  # how far the dimensions below reach
    for e, stride in enumerate(view.stride()):
        reach = stride * (view.shape[e] - 1)
        if stride % span == 0:
            continue
        if reach >= below:
            dims.append(e)
        else:
            lower += reach
    position = np.full((1,) * len(dims), view.storage_offset(), np.int64)
    for axis, e in enumerate(dims):
        line = np.arange(view.shape[e]) * view.stride(e)
        later = len(dims) - axis - 1
        position = position + line.reshape(-1, *[1] * later)
    highest = int((position % below).max())
    if highest + lower >= below:
        return None
    return _along(position // below % size, dims)


def _of_grids(
    step: Step,
    ins: list[Value],
    outs: list[Value],
    wanted: list[_Place],
) -> _Known:
    arguments = step.arguments
    # what padding fills in
    if "value" in arguments and arguments.get("mode", "constant") == "constant":
        arguments = {**arguments, "value": -1.0}
    index_maps: dict[_Place, list[IndexMap]] = {}
    repeats = _dims_of(step, outs)
    reached = [np.zeros(out.shape, bool) for out in outs]
    for k, value in enumerate(ins):
        given = []
        for other in ins:
            nowhere = torch.full(other.shape, -1, dtype=torch.float64, device="cpu")
            given.append(nowhere)
        count = math.prod(value.shape)
        places = torch.arange(count, dtype=torch.float64, device="cpu")
        given[k] = places.reshape(value.shape)
        grids = []
        for out in run_op(step.target, arguments, given):
            grids.append(out.numpy().astype(np.int64))
        for j, grid in enumerate(grids):
            reached[j] |= grid >= 0
        for j, e in list(repeats):
            first = grids[j].take([0], e)
            if not (grids[j] == first).all():
                repeats.remove((j, e))
        for d in [d for i, d in wanted if i == k]:
            below = max(1, math.prod(value.shape[d + 1 :]))
            index_maps[k, d] = []
            for grid in grids:
                index = np.where(grid < 0, -1, grid // below % value.shape[d])
                index_map = _along(index, list(range(index.ndim)))
                index_maps[k, d].append(index_map)
    filled = not all(some.all() for some in reached)
    return _Known(index_maps, repeats, filled)


def _along(index: npt.NDArray[np.int64], names: list[int]) -> IndexMap:
    along = _varies(index)
    over = tuple(axis for axis in range(index.ndim) if axis not in along)
    if index.size:
        index = index.max(over)
    else:
        index = np.zeros([0] * len(along), np.int64)
    return IndexMap(tuple(names[axis] for axis in along), index)


def _varies(grid: npt.NDArray[np.int64]) -> list[int]:
    # The axes along which a grid varies, where it is not -1.
    along: list[int] = []
    if not grid.size:
        return along
    for axis, size in enumerate(grid.shape):
        if size == 1:
            continue
        top = grid.max(axis, keepdims=True)
        differs = (grid != top) & (grid >= 0)
        if differs.any():
            along.append(axis)
        else:
            grid = top
    return along


def embedding(step: Step) -> Value:
    w = step.arguments["weight"]
    at = step.arguments["indices"]
    step.freeze(w.labels[0], "looks up any of its rows")
    nothing = [None] * at.ndim
    labels = (*at.labels, w.labels[1])
    made: Value = step.outs.along(labels, (*nothing, w.constants[1]))
    return made


def index(step: Step) -> Value:
    """x[indices]: known numbers move data, unknown ones may ask for any entry."""
    x = step.arguments["self"]
    given = step.arguments["indices"]
    at = {d: i for d, i in enumerate(given) if i is not None}
    return _looked_up(step, x, at)


def index_select(step: Step) -> Value:
    x = step.arguments["self"]
    dim = step.arguments["dim"] % x.ndim
    return _looked_up(step, x, {dim: step.arguments["index"]})


def _looked_up(step: Step, x: Value, at: dict[int, Value]) -> Value:
    out: Value = step.outs
    indices = list(at.values())
    step.freeze_all(indices, "is looked up by it")
    if any(index.dtype == torch.bool for index in indices):
        step.freeze_all([x], "looks up any of its entries")
        return out
    # The indices lie where the first of them is if they are neighbours, else in front.
    dims = sorted(at)
    are_neighbours = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if are_neighbours else 0
    shape = np.broadcast_shapes(*(index.shape for index in indices))
    nothing = [None] * len(shape)
    looked = out.along(nothing, nothing)
    known = indices[0].real
    rows = x.labels[first]
    if len(at) > 1 or known is None or known.ndim != 1:
        for d in at:
            step.freeze(x.labels[d], "looks up any of its entries")
    elif rows is not None:
        places = known.numpy() % x.shape[first]
        pieces = read_off(step, IndexMap((0,), places), rows, x.constants[first])
        looked = out.along([pieces[0].label], [pieces[0].constants])
    labels = [label for d, label in enumerate(x.labels) if d not in at]
    constants = [some for d, some in enumerate(x.constants) if d not in at]
    labels[first:first] = looked.labels
    constants[first:first] = looked.constants
    return out.along(labels, constants)
