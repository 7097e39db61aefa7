"""One operation of a program that gets smaller: its new arguments, and the new places
along dimensions that lose entries.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from sparsefn.shrinking.analysis import Cut
from sparsefn.shrinking.atoms import Flags
from sparsefn.shrinking.values import (
    Value,
    bind,
    module_of,
    node_arguments,
    opname,
    values_in,
)

Number = int | fx.Node
Places = npt.NDArray[np.int64]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Resizing:
    """An operation whose tensors lose entries: a rule sets `arguments` anew, or
    replaces the operation.
    """

    cut: Cut
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
        return values_in(self.cut.analysis.values[self.old])

    def kept(self, value: Value, dim: int) -> Flags:
        return self.cut.kept(value.labels[dim], value.shape[dim])

    def lost(self, value: Value) -> list[int]:
        """The dimensions that lose entries."""
        return [d for d in range(value.ndim) if not self.kept(value, d).all()]

    @property
    def along(self) -> tuple[Value, int]:
        """The tensor that it takes, and the dimension along which it does something."""
        x: Value = self.values["self"]
        return x, self.values["dim"] % max(x.ndim, 1)

    def refuse(self, why: str) -> NoReturn:
        raise refused(self.old, why)

    def moved(self, keep: Flags, places: Places, wanted: Any) -> Places:
        """The new places of those of some indices that are wanted."""
        some = places[wanted]
        if not keep[some].all():
            self.refuse("it reads one that goes")
        made: Places = (np.cumsum(keep) - 1)[some]
        return made

    def write(self) -> None:
        """The new arguments into the node, without defaults at the end."""
        if not self.arguments:  # it became a function of Python
            return
        schema = self.node.target._schema.arguments  # type: ignore[union-attr]
        places = [spec for spec in schema if not spec.kwarg_only]
        while places and self._is_default(places[-1]):
            places.pop()
        named = [
            spec.name
            for spec in schema
            if spec.kwarg_only and not self._is_default(spec)
        ]
        self.node.args = tuple(self.arguments[spec.name] for spec in places)
        self.node.kwargs = {name: self.arguments[name] for name in named}

    def _is_default(self, spec: Any) -> bool:
        default = spec.default_value
        value = self.arguments[spec.name]
        same = type(value) is type(default) and value == default
        return bool(spec.has_default_value() and same)

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
        x = torch.from_numpy(places).to(self.old.meta["val"].device)
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
        made = list(given)
        for i, (size, n, before) in enumerate(zip(given, new, was, strict=True)):
            if isinstance(size, fx.Node) and n != before:
                free = infer and not any(
                    isinstance(one, int) and one == -1 for one in made
                )
                made[i] = -1 if free else self.scaled(size, n, before)
            elif isinstance(size, int) and size != -1:
                made[i] = n
        return made

    def count(self, name: str, new: int) -> None:
        """A number of groups, which may be a symbolic size."""
        (made,) = self.fit([self.arguments[name]], [new], [self.values[name]])
        self.arguments[name] = made

    def scaled(self, size: fx.Node, new: int, was: int) -> fx.Node:
        """A symbolic size such as batch * heads, with fewer heads."""
        whole, part = scale(size.meta.get("val"), new, was) or self.refuse(
            "it takes a size that is no product"
        )
        rest = self.insert(operator.floordiv, size, whole)
        return self.insert(operator.mul, rest, part)

    def number(self, name: str, dims: Sequence[int], factor: int = 1) -> Number:
        """How many entries an argument had along dimensions before the cut.

        The number is multiplied by a factor.
        """
        shape = node_arguments(self.old)[name].meta["val"].shape
        fixed = [shape[d] for d in dims if not isinstance(shape[d], torch.SymInt)]
        made: Number = factor * math.prod(fixed)
        for d in dims:
            if isinstance(shape[d], torch.SymInt):
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
    factor, rest = size.node.expr.as_coeff_Mul()
    exact = rest.is_Symbol or (
        rest.is_Mul and all(part.is_Symbol for part in rest.args)
    )
    if not exact or int(factor) * new % was:
        return None
    return int(factor), int(factor) * new // was


def refused(node: fx.Node, why: str) -> ValueError:
    where = f" of the module {module_of(node)!r}" if module_of(node) else ""
    return ValueError(
        f"the operation {opname(node)}{where} cannot follow entries that go: {why}"
    )


def cut_slice(change: Resizing) -> None:
    """A slice or narrow along a dimension that loses entries."""
    x, dim = change.along
    if dim in change.lost(x):
        places = _range(change, x.shape[dim])
        change.become(*_read(change, dim, places))


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
    x, dim = change.along
    if dim in change.lost(x):
        change.arguments["index"] = _moved_index(change, change.kept(x, dim))


def _moved_index(change: Resizing, keep: Flags) -> int:
    places = np.arange(len(keep))
    return int(change.moved(keep, places, change.arguments["index"]))


def cut_index_select(change: Resizing) -> None:
    x, dim = change.along
    if dim in change.lost(x):
        places = _known(change, change.values["index"])
        change.become(*_read(change, dim, places))


def cut_roll(change: Resizing) -> None:
    x = change.values["self"]
    lost = change.lost(x)
    dims = [d % x.ndim for d in change.values["dims"]]
    shifts = dict(zip(dims, change.arguments["shifts"], strict=False))
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
    rank = max(indices[d].ndim for d in at)
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    made = list(change.arguments["indices"])
    for d in at:
        index = indices[d]
        keep = change.kept(x, d)
        wanted = []
        for i, n in enumerate(index.shape, first + rank - index.ndim):
            wanted.append(change.kept(out, i) if n > 1 else np.ones(1, bool))
        if not keep.all() or not all(one.all() for one in wanted):
            places = _known(change, index) % len(keep)
            new = change.moved(keep, places, np.ix_(*wanted))
            made[d] = change.constant(f"index{d}", new)
    change.arguments["indices"] = made


def cut_slice_scatter(change: Resizing) -> None:
    """A slice or one index of a dimension, written into."""
    x, dim = change.along
    if dim not in change.lost(x):
        return
    keep = change.kept(x, dim)
    if "index" in change.arguments:
        change.arguments["index"] = _moved_index(change, keep)
        return
    places = _range(change, x.shape[dim])
    part = _as_slice(change.moved(keep, places, keep[places]))
    if part is None:
        change.refuse("what stays does not lie at even distances")
    change.arguments.update(zip(("start", "end", "step"), part, strict=True))


def cut_pad(change: Resizing) -> None:
    """Pads on both sides of dimensions, some negative."""
    x = change.values["self"]
    out = change.outs[0]
    pads = list(change.arguments["pad"])
    for place in range(len(pads) // 2):
        dim = x.ndim - 1 - place
        if dim not in change.lost(x) and dim not in change.lost(out):
            continue
        left, right = pads[2 * place : 2 * place + 2]
        sized = any(isinstance(n, fx.Node) for n in (left, right))
        if sized or change.values.get("mode", "constant") != "constant":
            change.refuse("it pads them with others of them, or as many as inputs have")
        keep = change.kept(x, dim)
        made = change.kept(out, dim)
        pads[2 * place] = _pad(left, keep, made)
        pads[2 * place + 1] = _pad(right, keep[::-1], made[::-1])
    change.arguments["pad"] = pads


def _pad(n: int, keep: Flags, made: Flags) -> int:
    # How many of n entries in front stay: of those that a pad makes, or takes away.
    if n > 0:
        return int(made[:n].sum())
    return -int(keep[:-n].sum())


def _known(change: Resizing, index: Any) -> Places:
    if not isinstance(index, Value) or index.real is None or index.dtype == torch.bool:
        change.refuse("it reads them at indices that depend on inputs")
    places: Places = index.real.cpu().numpy()
    return places


def _read(change: Resizing, dim: int, places: Places) -> tuple[Any, ...]:
    # The operation that reads these places of the input along a dimension: those that
    # its output keeps.
    keep = change.kept(change.values["self"], dim)
    wanted = change.kept(change.outs[0], dim)
    new = change.moved(keep, places, wanted)
    x = change.arguments["self"]
    part = _as_slice(new)
    if part is None:
        index = change.constant(f"index{dim}", new)
        return aten.index_select.default, x, dim, index
    return aten.slice.Tensor, x, dim, *part


def _as_slice(new: Places) -> tuple[int, int, int] | None:
    # The start, end and step of a slice that takes these places, if there is one.
    steps = np.unique(np.diff(new))
    if len(steps) > 1 or (steps <= 0).any():
        return None
    if not len(new):
        return 0, 0, 1
    step = int(steps[0]) if len(steps) else 1
    return int(new[0]), int(new[-1]) + 1, step
