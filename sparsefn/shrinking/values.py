"""What is known of the tensors and operations of a traced program."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn
from torch.fx._pytree import tree_flatten_spec

from sparsefn.shrinking.channels import ChannelMap, CoupledChannels, Flags

T = TypeVar("T")
# By index: the constant that the slice holds, NaN where it varies; None: all vary.
Constants = npt.NDArray[np.float64] | None
Dims = tuple[tuple[int, ChannelMap], ...]  # the size and the label of each


class Value(NamedTuple):
    """A tensor of the program: of each dimension its label, and the constants that its
    slices hold if they go.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    labels: tuple[ChannelMap, ...]
    constants: tuple[Constants, ...]
    # the values of leaves that have some, masked, and of integers that are made of such
    real: Tensor | None = None
    name: str | None = None  # of a leaf
    mask: Tensor | None = None  # of a parameter, where masks are given
    reads: int = 0  # how many operations read a leaf
    whole: str | None = None  # the leaf whose entries it has, each once

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dims(self) -> Dims:
        """The size and the label of each dimension."""
        return tuple(zip(self.shape, self.labels, strict=True))

    def along(
        self, labels: Iterable[ChannelMap], constants: Iterable[Constants]
    ) -> Value:
        """The same tensor with these labels and constants of its dimensions."""
        return self._replace(labels=tuple(labels), constants=tuple(constants))

    def zero(self, dim: int) -> npt.NDArray[np.bool_]:
        """At which indices the slices are 0, should they go."""
        known = self.constants[dim]
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


def labelled(values: Iterable[Value]) -> list[tuple[int, int]]:
    """The dimensions that have a label, as (number of the tensor, dimension)."""
    return [
        (k, d)
        for k, value in enumerate(values)
        for d, label in enumerate(value.labels)
        if label is not None
    ]


def kept_slices(mask: Tensor, dim: int) -> Flags:
    """Which slices of a mask along a dimension keep any entry.

    >>> kept_slices(torch.eye(2, 3, dtype=torch.bool), 1).tolist()
    [True, True, False]
    """
    rows = mask.movedim(dim, 0).reshape(mask.shape[dim], -1)
    made: Flags = rows.any(1).cpu().numpy()
    return made


def by_name(rules: Mapping[str, T]) -> dict[str, T]:
    """Rules by each name in their keys.

    >>> by_name({"lstm gru": 1, "linear": 2})
    {'lstm': 1, 'gru': 1, 'linear': 2}
    """
    return {name: rule for names, rule in rules.items() for name in names.split()}


def replaced(tree: Any, made: Iterable[Any]) -> Any:
    """The tree with other things for its Values, in their order."""
    left = iter(made)

    def of(part: Any) -> Any:
        if isinstance(part, Value):
            return next(left)
        if isinstance(part, Mapping):
            return {key: of(one) for key, one in part.items()}
        if isinstance(part, list | tuple):
            return [of(one) for one in part]
        return part

    return of(tree)


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ATen operation by name, with defaults.

    >>> bind(torch.ops.aten.sum.default, (3,), {})
    {'self': 3, 'dtype': None}
    """
    made = {}
    for i, spec in enumerate(target._schema.arguments):
        if i < len(args):
            made[spec.name] = args[i]
        else:
            made[spec.name] = kwargs.get(spec.name, spec.default_value)
    return made


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name; none of a function of Python."""
    if not hasattr(node.target, "_schema"):
        return {}
    return bind(node.target, node.args, node.kwargs)


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
    outs = out if isinstance(out, list | tuple) else [out]
    return [x for x in outs if isinstance(x, Tensor)]


def opname(node: fx.Node) -> str:
    """The name of an operation without its overload: "add" of aten.add.Tensor and of
    aten.add_.Tensor.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    name = str(schema.name).split("::")[1]
    if name.startswith("__"):
        return name
    return name.rstrip("_")


def in_its_order(program: fx.GraphModule, call: tuple[Any, Any]) -> list[Any]:
    """The arguments of a call, (args, kwargs), in the order of a program's inputs.

    >>> from sparsefn.shrinking.trace import traced
    >>> program = traced(torch.nn.ReLU(), torch.ones(1))
    >>> in_its_order(program, ((torch.ones(1),), {}))
    [tensor([1.])]
    """
    made: list[Any] = tree_flatten_spec(call, program._in_spec)
    return made


def module_of(node: fx.Node, up: int = 0) -> str:
    """The path of the module in whose forward an operation is.

    With `up`, it is the path of a module around it.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if len(stack) <= up:
        return ""
    path, _ = stack[-1 - up]
    return str(path).removeprefix("L['self']").removeprefix(".")


def named_module(model: nn.Module, path: str) -> str:
    """A module for a message.

    >>> named_module(torch.nn.Sequential(torch.nn.ReLU()), "0")
    "the ReLU at '0'"
    """
    name = type(model.get_submodule(path)).__name__
    if not path:
        return f"the {name}"
    return f"the {name} at {path!r}"


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
    for node in graph.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in made:
            made[name] = operator.attrgetter(name)(graph)
    return made


class Product(NamedTuple):
    """Multiplications and additions, one of each for all combinations of indices of
    some dimensions.
    """

    dims: Dims
    leaves: tuple[str, ...]  # parameters that are a factor as a whole
    node: fx.Node  # of which it is

    @property
    def flops(self) -> int:
        """How many both are, before anything goes."""
        return 2 * math.prod(size for size, _ in self.dims)


@dataclasses.dataclass
class AnalysisLog:
    """What the analysis of one program is asked for, and what it finds."""

    channels: CoupledChannels
    # norms and means may lose entries that are 0, and go on counting them
    counted: bool
    equal_parts: bool  # the parts of a chunk lose the same entries
    # of parameters by name; None: what goes is masked in every parameter that holds it
    masks: Mapping[str, Tensor] | None
    products: list[Product] = dataclasses.field(default_factory=list)
    # of grouped convolutions and norms
    groups: dict[fx.Node, ChannelMap] = dataclasses.field(default_factory=dict)
    folds: list[BiasFold] = dataclasses.field(default_factory=list)
    # by operation and shapes: layers repeat
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BiasFold:
    """Constant inputs of a layer: if they go, its bias takes in what its weights make
    of them.
    """

    bias: str
    weights: npt.NDArray[np.float64]  # (groups, outputs, inputs)
    constants: npt.NDArray[np.float64]  # of all inputs, NaN where they vary
    label: ChannelMap


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation with its arguments by name: Values stand for tensors, and numbers
    for symbolic sizes.
    """

    node: fx.Node
    arguments: dict[str, Any]
    outs: Any
    log: AnalysisLog
    splits: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def name(self) -> str:
        return opname(self.node)

    @functools.cached_property
    def where(self) -> str:
        """The operation and its module, for a reason."""
        path = module_of(self.node)
        return f"{self.name} at {path!r}" if path else self.name

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def channels(self) -> CoupledChannels:
        return self.log.channels

    @property
    def shown(self) -> str:
        """The arguments, without tensors."""
        names = ["x"] * len(values_in(self.arguments))
        return repr(replaced(self.arguments, names))

    @property
    def is_symbolic(self) -> bool:
        """Whether an argument is a number that depends on the sizes of inputs."""
        return any(
            isinstance(n.meta.get("val"), torch.SymInt)
            for n in self.node.all_input_nodes
        )

    def join(self, *labels: ChannelMap) -> ChannelMap:
        """The label of dimensions whose indices stay or go together."""
        for other in labels[1:]:
            self.channels.join(
                labels[0], other, f"joined with what stays by {self.where}"
            )
        if any(label is None for label in labels):
            return None
        return labels[0]

    def multiplies(self, dims: Dims, *factors: Value) -> None:
        """The operation takes a product over these dimensions."""
        whole = [value.whole for value in factors if value.whole is not None]
        self.log.products.append(Product(dims, tuple(whole), self.node))

    def sums(self, label: ChannelMap, zero: Flags) -> None:
        """The operation sums over a dimension: indices stay that are not 0 where they
        go.
        """
        self.freeze(label, "sums over it, and it is not 0 where it is masked", ~zero)

    def freeze(self, label: ChannelMap, why: str, which: Flags | None = None) -> None:
        """These indices stay, because the operation does this."""
        self.channels.freeze(label, f"{self.where} {why}", which)

    def freeze_all(self, values: Iterable[Value], why: str) -> None:
        """All indices of these tensors stay."""
        for label in (label for value in values for label in value.labels):
            self.freeze(label, why)
