"""Operations of a program that get smaller: their new arguments, and the new places
along dimensions that lose entries.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from sparsefn.shrinking.channels import Flags
from sparsefn.shrinking.norms import mean_dims
from sparsefn.shrinking.plan import PruningPlan
from sparsefn.shrinking.small_layers import (
    counted_group_norm,
    counted_layer_norm,
    counted_mean,
    counted_rms_norm,
    padded_grouped_mm,
)
from sparsefn.shrinking.values import (
    Value,
    bind,
    by_name,
    module_of,
    node_arguments,
    opname,
    values_in,
)

Number = int | fx.Node
Places = npt.NDArray[np.int64]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An operation whose tensors lose entries: a rule changes `arguments`, or replaces
    the operation.
    """

    plan: PruningPlan
    root: nn.Module  # holds the leaves of the small program
    old: fx.Node
    node: fx.Node  # the same in the small program
    # the arguments by name: Values for tensors, numbers for symbolic sizes
    values: dict[str, Any]
    arguments: dict[str, Any]  # the same as nodes of the small program

    @property
    def name(self) -> str:
        return opname(self.old)

    @property
    def outs(self) -> list[Value]:
        return values_in(self.plan.analysis.values[self.old])

    def kept(self, value: Value, dim: int) -> Flags:
        return self.plan.kept(value.labels[dim], value.shape[dim])

    def lost(self, value: Value) -> list[int]:
        """The dimensions that lose entries."""
        return [d for d in range(value.ndim) if not self.kept(value, d).all()]

    @property
    def along(self) -> tuple[Value, int]:
        """The tensor that it takes, and the dimension along which it does something."""
        x: Value = self.values["self"]
        dim = self.values["dim"] % max(x.ndim, 1)
        return x, dim

    def refuse(self, why: str) -> NoReturn:
        raise refused(self.old, why)

    def moved(self, keep: Flags, places: Places, wanted: Any) -> Places:
        """The new places of the indices that are wanted."""
        some = places[wanted]
        if not keep[some].all():
            self.refuse("it reads one that goes")
        new_places = np.cumsum(keep) - 1
        made: Places = new_places[some]
        return made

    def write(self) -> None:
        """The new arguments into the node, without defaults at the end."""
        if not self.arguments:  # it became a function of Python
            return
        schema = self.node.target._schema.arguments  # type: ignore[union-attr]
        places = []
        named = {}
        for spec in schema:
            if not spec.kwarg_only:
                places.append(spec)
            elif not self._is_default(spec):
                named[spec.name] = self.arguments[spec.name]
        while places and self._is_default(places[-1]):
            places.pop()
        self.node.args = tuple(self.arguments[spec.name] for spec in places)
        self.node.kwargs = named

    def _is_default(self, spec: Any) -> bool:
        if not spec.has_default_value():
            return False
        default = spec.default_value
        value = self.arguments[spec.name]
        return bool(type(value) is type(default) and value == default)

    def become(self, target: Any, *args: Any) -> None:
        """Another operation in its place."""
        self.node.target = target
        self.node.args = args
        self.node.kwargs = {}
        self.arguments.clear()
        if hasattr(target, "_schema"):
            self.arguments.update(bind(target, args, {}))

    def insert(self, target: Any, *args: Any) -> fx.Node:
        """An operation before it."""
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(target, args)
        for key in {"nn_module_stack", "stack_trace"} & self.node.meta.keys():
            made.meta[key] = self.node.meta[key]
        return made

    def constant(self, name: str, places: Places) -> fx.Node:
        """Indices, in a tensor that is no parameter."""
        name = f"_{self.node.name}_{name}"
        device = self.old.meta["val"].device
        x = torch.from_numpy(places).to(device)
        self.root.register_buffer(name, x, persistent=False)
        with self.node.graph.inserting_before(self.node):
            return self.node.graph.get_attr(name)

    def fit(
        self,
        given: Sequence[Any],
        new: Sequence[int],
        was: Sequence[int],
        infer: bool = False,
    ) -> list[Any]:
        """Size arguments for the new sizes; at most one may be -1, to infer it."""
        made: list[Any] = []
        inferred = any(isinstance(size, int) and size == -1 for size in given)
        for size, n, before in zip(given, new, was, strict=True):
            if isinstance(size, fx.Node) and n != before:
                if infer and not inferred:
                    inferred = True
                    size = -1
                else:
                    size = self.scaled(size, n, before)
            elif isinstance(size, int) and size != -1:
                size = n
            made.append(size)
        return made

    def count(self, name: str, new: int) -> None:
        """A number of groups, which may be a symbolic size."""
        given = self.arguments[name]
        was = self.values[name]
        (self.arguments[name],) = self.fit([given], [new], [was])

    def scaled(self, size: fx.Node, new: int, was: int) -> fx.Node:
        """A symbolic size such as batch * heads, with fewer heads."""
        factors = scale(size.meta.get("val"), new, was)
        if factors is None:
            self.refuse("it takes a size that is no product")
        whole, part = factors
        rest = self.insert(operator.floordiv, size, whole)
        return self.insert(operator.mul, rest, part)

    def number(self, name: str, dims: Sequence[int], factor: int = 1) -> Number:
        """How many entries an argument had along dimensions of the whole program.

        The number is multiplied by a factor.
        """
        old = node_arguments(self.old)[name]
        shape = old.meta["val"].shape
        symbolic = [d for d in dims if isinstance(shape[d], torch.SymInt)]
        fixed = [shape[d] for d in dims if d not in symbolic]
        made: Number = factor * math.prod(fixed)
        for d in symbolic:
            size = self.insert(aten.sym_size.int, self.arguments[name], d)
            made = self.insert(operator.mul, size, made)
        return made


def scale(size: Any, new: int, was: int) -> tuple[int, int] | None:
    """The factor of a symbolic size that changes, and what it becomes; None where it is
    no product with such a factor.

    >>> scale(None, 1, 2) is None
    True
    """
    if not isinstance(size, torch.SymInt):
        return None
    number, rest = size.node.expr.as_coeff_Mul()
    factor = int(number)
    exact = rest.is_Symbol
    if rest.is_Mul:
        exact = all(part.is_Symbol for part in rest.args)
    if not exact or factor * new % was:
        return None
    return factor, factor * new // was


def refused(node: fx.Node, why: str) -> ValueError:
    where = f" of the module {module_of(node)!r}" if module_of(node) else ""
    return ValueError(
        f"the operation {opname(node)}{where} cannot follow entries that go: {why}"
    )


def resize_slice(rewrite: Rewrite) -> None:
    """A slice or narrow along a dimension that loses entries."""
    x, dim = rewrite.along
    if dim in rewrite.lost(x):
        places = _range(rewrite, x.shape[dim])
        rewrite.become(*_read(rewrite, dim, places))


def _range(rewrite: Rewrite, size: int) -> Places:
    # The indices that a slice takes.
    given = rewrite.arguments
    start = given["start"]
    end = given.get("end")
    if "length" in given:  # a narrow
        start = start % size
        end = start + given["length"]
    step = given.get("step")
    return np.arange(size)[start:end:step]


def resize_select(rewrite: Rewrite) -> None:
    """One index of a dimension that loses other indices."""
    x, dim = rewrite.along
    if dim in rewrite.lost(x):
        keep = rewrite.kept(x, dim)
        rewrite.arguments["index"] = _moved_index(rewrite, keep)


def _moved_index(rewrite: Rewrite, keep: Flags) -> int:
    places = np.arange(len(keep))
    index = rewrite.arguments["index"]
    return int(rewrite.moved(keep, places, index))


def resize_index_select(rewrite: Rewrite) -> None:
    x, dim = rewrite.along
    if dim in rewrite.lost(x):
        places = _known(rewrite, rewrite.values["index"])
        rewrite.become(*_read(rewrite, dim, places))


def resize_roll(rewrite: Rewrite) -> None:
    x = rewrite.values["self"]
    lost = rewrite.lost(x)
    dims = [d % x.ndim for d in rewrite.values["dims"]]
    shifts = dict(zip(dims, rewrite.arguments["shifts"], strict=False))
    if not shifts or any(isinstance(shifts.get(d), fx.Node) for d in lost):
        rewrite.refuse(
            "it rolls them by what depends on the sizes of inputs, or as one row"
        )
    for dim in [d for d in shifts if d in lost]:
        shift = shifts.pop(dim)
        places = np.roll(np.arange(x.shape[dim]), shift)
        index_map = _read(rewrite, dim, places)
        rewrite.arguments["self"] = rewrite.insert(*index_map)
    rewrite.arguments["shifts"] = list(shifts.values()) or [0]
    rewrite.arguments["dims"] = list(shifts) or [0]


def resize_index(rewrite: Rewrite) -> None:
    """Tensors of indices: the indices that stay get new numbers."""
    x = rewrite.values["self"]
    out = rewrite.outs[0]
    indices = list(rewrite.values["indices"])
    at = [d for d, index in enumerate(indices) if index is not None]
    if not set(at) & set(rewrite.lost(x)) and not rewrite.lost(out):
        return
    rank = max(indices[d].ndim for d in at)
    are_neighbours = at == list(range(at[0], at[-1] + 1))
    first = at[0] if are_neighbours else 0
    made = list(rewrite.arguments["indices"])
    for d in at:
        index = indices[d]
        keep = rewrite.kept(x, d)
        wanted = []
        for i, n in enumerate(index.shape, first + rank - index.ndim):
            flags = np.ones(1, bool)
            if n > 1:
                flags = rewrite.kept(out, i)
            wanted.append(flags)
        if not keep.all() or not all(flags.all() for flags in wanted):
            places = _known(rewrite, index) % len(keep)
            new = rewrite.moved(keep, places, np.ix_(*wanted))
            made[d] = rewrite.constant(f"index{d}", new)
    rewrite.arguments["indices"] = made


def resize_slice_scatter(rewrite: Rewrite) -> None:
    """A slice or one index of a dimension, written into."""
    x, dim = rewrite.along
    if dim not in rewrite.lost(x):
        return
    keep = rewrite.kept(x, dim)
    if "index" in rewrite.arguments:
        rewrite.arguments["index"] = _moved_index(rewrite, keep)
        return
    places = _range(rewrite, x.shape[dim])
    new = rewrite.moved(keep, places, keep[places])
    part = _as_slice(new)
    if part is None:
        rewrite.refuse("what stays does not lie at even distances")
    rewrite.arguments.update(zip(("start", "end", "step"), part, strict=True))


def resize_pad(rewrite: Rewrite) -> None:
    """Pads on both sides of dimensions, some negative."""
    x = rewrite.values["self"]
    out = rewrite.outs[0]
    pads = list(rewrite.arguments["pad"])
    for place in range(len(pads) // 2):
        dim = x.ndim - 1 - place
        if dim not in rewrite.lost(x) and dim not in rewrite.lost(out):
            continue
        both = slice(2 * place, 2 * place + 2)
        left, right = pads[both]
        resize_output = isinstance(left, fx.Node) or isinstance(right, fx.Node)
        if resize_output or rewrite.values.get("mode", "constant") != "constant":
            rewrite.refuse(
                "it pads them with others of them, or as many as inputs have"
            )
        keep = rewrite.kept(x, dim)
        made = rewrite.kept(out, dim)
        left = _pad(left, keep, made)
        right = _pad(right, keep[::-1], made[::-1])
        pads[both] = [left, right]
    rewrite.arguments["pad"] = pads


def _pad(n: int, keep: Flags, made: Flags) -> int:
    # How many of n entries in front stay: of the entries that a pad makes, or takes
    # away.
    if n > 0:
        return int(made[:n].sum())
    return -int(keep[:-n].sum())


def _known(rewrite: Rewrite, index: Any) -> Places:
    real = index.real if isinstance(index, Value) else None
    if real is None or index.dtype == torch.bool:
        rewrite.refuse("it reads them at indices that depend on inputs")
    places: Places = real.cpu().numpy()
    return places


def _read(rewrite: Rewrite, dim: int, places: Places) -> tuple[Any, ...]:
    # The operation that reads these places of the input along a dimension, as far as
    # its output keeps them.
    keep = rewrite.kept(rewrite.values["self"], dim)
    wanted = rewrite.kept(rewrite.outs[0], dim)
    new = rewrite.moved(keep, places, wanted)
    x = rewrite.arguments["self"]
    part = _as_slice(new)
    if part is None:
        index = rewrite.constant(f"index{dim}", new)
        return aten.index_select.default, x, dim, index
    return aten.slice.Tensor, x, dim, *part


def _as_slice(new: Places) -> tuple[int, int, int] | None:
    # The start, end and step of a slice that takes these places, if there is one.
    if not len(new):
        return 0, 0, 1
    steps = np.unique(np.diff(new)).tolist()
    step = 1
    if steps:
        step = steps[0]
    if len(steps) > 1 or step <= 0:
        return None
    start = int(new[0])
    end = int(new[-1]) + 1
    return start, end, step


Rule = Callable[[Rewrite], None]


def resize_output(rewrite: Rewrite) -> None:
    """Sizes of the output, as arguments."""
    out = rewrite.outs[0]
    key = next(name for name in ("size", "shape", "sizes") if name in rewrite.arguments)
    given = rewrite.arguments[key]
    first = out.ndim - len(given)
    if rewrite.name == "unflatten":
        first = rewrite.along[1]
    part = slice(first, first + len(given))
    infer = rewrite.name in ("view", "reshape", "_unsafe_view")
    rewrite.arguments[key] = rewrite.fit(
        given, rewrite.plan.size(out)[part], out.shape[part], infer
    )


def resize_split(rewrite: Rewrite) -> None:
    """Parts of a dimension that loses entries, which lose some each."""
    x, dim = rewrite.along
    if dim in rewrite.lost(x):
        sizes = [rewrite.plan.size(out)[dim] for out in rewrite.outs]
        whole = rewrite.arguments["self"]
        rewrite.become(aten.split_with_sizes.default, whole, sizes, dim)


def resize_repeat(rewrite: Rewrite) -> None:
    """How often dimensions are repeated, of which repeats may go."""
    x = rewrite.values["self"]
    out = rewrite.outs[0]
    key = "repeats" if "repeats" in rewrite.arguments else "dims"
    made = list(rewrite.arguments[key])
    for i in range(1, len(made) + 1):
        if i <= x.ndim:
            inside = x.shape[-i]
        else:
            inside = 1
        kept = rewrite.kept(out, out.ndim - i)
        made[-i] = _times(made[-i], kept.reshape(-1, inside))
    rewrite.arguments[key] = made


def resize_repeat_interleave(rewrite: Rewrite) -> None:
    times = rewrite.values.get("repeats")
    if rewrite.values.get("dim") is None or not isinstance(times, int):
        rewrite.refuse("it repeats each of them by a number of its own")
    x, dim = rewrite.along
    kept = rewrite.kept(rewrite.outs[0], dim)
    table = kept.reshape(x.shape[dim], -1).T
    rewrite.arguments["repeats"] = _times(rewrite.arguments["repeats"], table)


def _times(times: Any, table: Flags) -> Any:
    # How many repeats stay, of a table (repeats, indices).
    rows = table.any(1)
    if rows.all():
        return times
    return int(rows.sum())


def resize_squeeze(rewrite: Rewrite) -> None:
    """Dimensions of size 1 in the trace, none that is left with one index."""
    x = rewrite.values["self"]
    dims = rewrite.values.get("dim")
    if dims is None:
        dims = range(x.ndim)
    if isinstance(dims, int):
        dims = [dims]
    dims = [d % max(x.ndim, 1) for d in dims]
    after = rewrite.plan.size(x)
    if any(after[d] == 1 != x.shape[d] for d in dims):
        one = [d for d in dims if x.shape[d] == 1]
        rewrite.become(aten.squeeze.dims, rewrite.arguments["self"], one)


def resize_convolution(rewrite: Rewrite) -> None:
    """Groups that go as a whole, and the same entries of each group."""
    x = rewrite.values["input"]
    w = rewrite.values["weight"]
    groups = rewrite.values["groups"]
    if groups > 1:
        keep = rewrite.kept(x, x.ndim - w.ndim + 1)
        rewrite.count("groups", _groups(keep, groups))


def _groups(keep: Flags, groups: int) -> int:
    # How many groups stay.
    entries = keep.reshape(groups, -1)
    return int(entries.any(1).sum())


def resize_channel_shuffle(rewrite: Rewrite) -> None:
    x = rewrite.values["self"]
    groups = rewrite.values["groups"]
    rewrite.count("groups", _groups(rewrite.kept(x, 1), groups))


def resize_layer_norm(rewrite: Rewrite) -> None:
    x = rewrite.values["input"]
    given = rewrite.arguments
    some = len(given["normalized_shape"])
    dims = list(range(x.ndim - some, x.ndim))
    if set(dims) & set(rewrite.lost(x)):
        count = rewrite.number("input", dims)
        norm = counted_layer_norm if "bias" in given else counted_rms_norm
        tail = [given[name] for name in ("weight", "bias", "eps") if name in given]
        rewrite.become(norm, given["input"], count, some, *tail)


def resize_group_norm(rewrite: Rewrite) -> None:
    x = rewrite.values["input"]
    groups = rewrite.values["num_groups"]
    given = rewrite.arguments
    keep = rewrite.kept(x, 1)
    left = _groups(keep, groups)
    rewrite.count("num_groups", left)
    if keep.sum() * groups != len(keep) * left:
        count = rewrite.number("input", range(2, x.ndim), len(keep) // groups)
        rewrite.become(
            counted_group_norm,
            given["input"],
            given["num_groups"],
            count,
            given["weight"],
            given["bias"],
            given["eps"],
        )


def resize_mean(rewrite: Rewrite) -> None:
    x = rewrite.values["self"]
    given = rewrite.arguments
    dims = mean_dims(given.get("dim"), x.ndim)
    if set(dims) & set(rewrite.lost(x)):
        if given["dtype"] is not None:
            rewrite.refuse("it counts them in another dtype")
        count = rewrite.number("self", dims)
        keepdim = given.get("keepdim", False)
        rewrite.become(counted_mean, given["self"], count, dims, keepdim)


def resize_attention(rewrite: Rewrite) -> None:
    """The width of a head is part of the scale."""
    q = rewrite.values["query"]
    if rewrite.arguments["scale"] is None and q.ndim - 1 in rewrite.lost(q):
        rewrite.arguments["scale"] = q.shape[-1] ** -0.5


def resize_grouped_mm(rewrite: Rewrite) -> None:
    """Products with one matrix of each expert: torch has them for widths of whole 16
    bytes.
    """
    given = rewrite.arguments
    if (
        given["offs"] is None
        or given["bias"] is not None
        or given["out_dtype"] is not None
    ):
        rewrite.refuse("it is of another form")
    rewrite.become(padded_grouped_mm, given["self"], given["mat2"], given["offs"])


# Of other operations no argument speaks of sizes or places: the proof tells where one
# does.
RULES: dict[str, Rule] = by_name(
    {
        "view reshape _unsafe_view expand broadcast_to unflatten full zeros ones empty "
        "rand randn new_zeros new_ones new_full new_empty": resize_output,
        "split split_with_sizes unsafe_split unsafe_split_with_sizes tensor_split "
        "chunk unsafe_chunk": resize_split,
        "repeat tile": resize_repeat,
        "repeat_interleave": resize_repeat_interleave,
        "squeeze": resize_squeeze,
        "slice narrow": resize_slice,
        "select": resize_select,
        "index_select": resize_index_select,
        "index": resize_index,
        "roll": resize_roll,
        "slice_scatter select_scatter": resize_slice_scatter,
        "constant_pad_nd pad": resize_pad,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "convolution": resize_convolution,
        "channel_shuffle": resize_channel_shuffle,
        "layer_norm rms_norm": resize_layer_norm,
        "group_norm": resize_group_norm,
        "mean": resize_mean,
        "_grouped_mm": resize_grouped_mm,
        "scaled_dot_product_attention": resize_attention,
    }
)
