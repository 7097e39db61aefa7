"""What is known of the tensors and operations of a traced program."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from sparsefn.shrinking.atoms import Atoms, Flags, Label

# By index: the constant that the slice holds, NaN where it varies; None: all vary.
Constants = npt.NDArray[np.float64] | None


class Value(NamedTuple):
    """A tensor of the program: for each dimension its label, and which constant each
    index holds, should it go.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    labels: tuple[Label, ...]
    gone: tuple[Constants, ...]
    real: Tensor | None = (
        # the values of leaves that have some, masked, and of integers that are made of
        # such
        None
    )
    name: str | None = None  # of a leaf
    mask: Tensor | None = None  # of a parameter, where masks are given
    reads: int = 0  # how many operations read a leaf

    def zero(self, dim: int) -> npt.NDArray[np.bool_]:
        """At which indices the slices are 0, should they go."""
        known = self.gone[dim]
        return np.zeros(self.shape[dim], bool) if known is None else known == 0


def blank(val: Any) -> Any:
    """The Values of an output of which nothing is known: no dimension has a label."""
    if isinstance(val, list | tuple):
        return [blank(v) for v in val]
    if not isinstance(val, Tensor):
        return hint(val)
    shape = tuple(hint(n) for n in val.shape)
    return Value(shape, val.dtype, (None,) * len(shape), (None,) * len(shape))


def hint(x: Any) -> Any:
    """The number that a symbolic size had in the trace."""
    if isinstance(x, torch.SymInt):
        hinted: Any = x.node.hint
        return int(hinted)
    if isinstance(x, torch.SymFloat):
        hinted = x.node.hint
        return float(hinted)
    return x


def values_in(tree: Any) -> list[Value]:
    """The Values of arguments or outputs, in order.

    >>> values_in([1, {"x": blank(torch.ones(2))}])[0].shape
    (2,)
    """
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, Tensor | str) or not isinstance(tree, Sequence):
        return []
    return [value for part in tree for value in values_in(part)]


def replaced(tree: Any, made: Sequence[Any]) -> Any:
    """The tree with other things for its Values, in their order."""
    left = iter(made)

    def of(part: Any) -> Any:
        if isinstance(part, Value):
            return next(left)
        if isinstance(part, Mapping):
            return {key: of(one) for key, one in part.items()}
        return [of(one) for one in part] if isinstance(part, list | tuple) else part

    return of(tree)


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ATen operation by name, with defaults.

    >>> bind(torch.ops.aten.sum.default, (3,), {})
    {'self': 3, 'dtype': None}
    """
    schema = target._schema.arguments
    return {
        s.name: args[i] if i < len(args) else kwargs.get(s.name, s.default_value)
        for i, s in enumerate(schema)
    }


def run_op(
    target: Any, arguments: Mapping[str, Any], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors that an operation gives for other tensors, left unchanged."""
    given = replaced(arguments, [x.clone() for x in tensors])
    positional = []
    for arg in target._schema.arguments:
        if arg.kwarg_only:
            break
        positional.append(given.pop(arg.name))
    out = target(*positional, **given)
    return [
        x
        for x in (out if isinstance(out, list | tuple) else [out])
        if isinstance(x, Tensor)
    ]


def opname(node: fx.Node) -> str:
    """The name of an operation without its overload: "add" of aten.add.Tensor and of
    aten.add_.Tensor.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    name = str(schema.name).split("::")[1]
    return name if name.startswith("__") else name.rstrip("_")


def module_of(node: fx.Node, up: int = 0) -> str:
    """The path of the module in whose forward an operation is.

    With `up`, it is that of a module around it.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return (
        str(stack[-1 - up][0]).removeprefix("L['self']").removeprefix(".")
        if len(stack) > up
        else ""
    )


def named_module(model: nn.Module, path: str) -> str:
    """A module for a message.

    >>> named_module(torch.nn.Sequential(torch.nn.ReLU()), "0")
    "the ReLU at '0'"
    """
    return (
        "the "
        f"{type(model.get_submodule(path)).__name__}{f' at {path!r}' if path else ''}"
    )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, under all of their names.

    >>> list(named_tensors(nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def tensors_of(graph: fx.GraphModule) -> dict[str, Any]:
    """The parameters and buffers of a program by name, and what else its nodes read."""
    made: dict[str, Any] = {**named_tensors(graph)}
    others = [
        name
        for node in graph.graph.find_nodes(op="get_attr")
        if (name := str(node.target)) not in made
    ]
    return made | {name: operator.attrgetter(name)(graph) for name in others}


@dataclasses.dataclass
class Book:
    """What the analysis of one program writes down."""

    atoms: Atoms
    counted: (
        bool  # norms and means may lose entries that are 0, and go on counting them
    )
    equal_parts: bool  # the parts of a chunk lose the same entries
    # of parameters by name; None: whatever goes is masked wherever it lies
    masks: Mapping[str, Tensor] | None
    # of grouped convolutions and norms
    groups: dict[fx.Node, Label] = dataclasses.field(default_factory=dict)
    folds: list[Fold] = dataclasses.field(default_factory=list)
    # by operation and shapes: layers repeat
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Inputs of a layer that are constant: where they go, its bias takes in what the
    weights make of them.
    """

    bias: str
    weights: npt.NDArray[np.float64]  # (groups, outputs, inputs)
    constants: npt.NDArray[np.float64]  # of all inputs, NaN where they vary
    label: Label


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation with its arguments by name: Values stand for tensors, and numbers
    for symbolic sizes.
    """

    node: fx.Node
    name: str
    where: str
    arguments: dict[str, Any]
    outs: Any
    book: Book
    splits: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def atoms(self) -> Atoms:
        return self.book.atoms

    @property
    def shown(self) -> str:
        """The arguments, without tensors."""
        return repr(replaced(self.arguments, ["x"] * len(values_in(self.arguments))))

    @property
    def is_symbolic(self) -> bool:
        """Whether an argument is a number that depends on the sizes of inputs."""
        return any(
            isinstance(n.meta.get("val"), torch.SymInt)
            for n in self.node.all_input_nodes
        )

    def join(self, *labels: Label) -> Label:
        """The label of dimensions whose indices stay or go together."""
        for other in labels[1:]:
            self.atoms.join(labels[0], other, f"joined with what stays by {self.where}")
        return labels[0] if all(label is not None for label in labels) else None

    def sums(self, label: Label, zero: Flags) -> None:
        """The operation sums over a dimension: indices stay that are not 0 where they
        go.
        """
        self.freeze(label, "sums over it, and it is not 0 where it is masked", ~zero)

    def mixes(self, *values: Value) -> None:
        """All indices of these tensors stay."""
        for label in (label for value in values for label in value.labels):
            self.freeze(label, "mixes its entries")

    def freeze(self, label: Label, why: str, which: Flags | None = None) -> None:
        """These indices stay, because the operation does this."""
        self.atoms.freeze(label, f"{self.where} {why}", which)
