"""One operation of a program that gets smaller: what it takes and gives before and
after, and its new arguments.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from sparsefn.shrinking.atoms import Flags
from sparsefn.shrinking.cut import Cut
from sparsefn.shrinking.values import Value, bind, module_of, opname, values_in

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
        return [d for d in range(len(value.shape)) if not self.kept(value, d).all()]

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
        places = [spec.name for spec in schema if not spec.kwarg_only]
        while places and _is_default(
            schema[len(places) - 1], self.arguments[places[-1]]
        ):
            places.pop()
        named = [
            spec
            for spec in schema
            if spec.kwarg_only and not _is_default(spec, self.arguments[spec.name])
        ]
        self.node.args = tuple(self.arguments[name] for name in places)
        self.node.kwargs = {spec.name: self.arguments[spec.name] for spec in named}

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
        made.meta = {
            key: self.node.meta[key]
            for key in ("nn_module_stack", "stack_trace")
            if key in self.node.meta
        }
        return made

    def constant(self, name: str, x: Tensor) -> fx.Node:
        """A tensor that is no parameter."""
        name = f"_{self.node.name}_{name}"
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
        self.arguments[name] = self.fit(
            [self.arguments[name]], [new], [self.values[name]]
        )[0]

    def scaled(self, size: fx.Node, new: int, was: int) -> fx.Node:
        """A symbolic size such as batch * heads, with fewer heads."""
        whole, part = scale(size.meta.get("val"), new, was) or self.refuse(
            "it takes a size that is no product"
        )
        return self.insert(
            operator.mul, self.insert(operator.floordiv, size, whole), part
        )

    def number(self, name: str, dims: Sequence[int], factor: int = 1) -> Number:
        """How many entries an argument had along dimensions before the cut.

        The number is multiplied by a factor.
        """
        old = bind(self.old.target, self.old.args, self.old.kwargs)[name].meta["val"]
        made: Number = factor
        for d in dims:
            if not isinstance(old.shape[d], torch.SymInt):
                made = old.shape[d] * made
        for d in dims:
            if isinstance(old.shape[d], torch.SymInt):
                made = self.insert(
                    operator.mul,
                    self.insert(aten.sym_size.int, self.arguments[name], d),
                    made,
                )
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
    return (
        (int(factor), int(factor) * new // was)
        if exact and int(factor) * new % was == 0
        else None
    )


def refused(node: fx.Node, why: str) -> ValueError:
    where = f" of the module {module_of(node)!r}" if module_of(node) else ""
    return ValueError(
        f"the operation {opname(node)}{where} cannot follow entries that go: {why}"
    )


def _is_default(spec: Any, value: Any) -> bool:
    return (
        bool(spec.has_default_value())
        and type(value) is type(spec.default_value)
        and value == spec.default_value
    )
