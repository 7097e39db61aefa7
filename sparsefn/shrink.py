"""Physically smaller modules: channels that hold a constant are removed, and the constant moves on into biases."""

from __future__ import annotations

import collections
import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from sparsefn import channels
from sparsefn.channels import INPUT, UNKNOWN, Plan, Value
from sparsefn.layers import LAYERS
from sparsefn.modules import bake
from sparsefn.tree import Tree, flatten
from sparsefn.types import State, check_masks

_ELEMENTWISE_MODULES = """
    ReLU ReLU6 LeakyReLU RReLU PReLU ELU SELU CELU GELU SiLU Mish Tanh Sigmoid Hardtanh Hardsigmoid Hardswish Softplus
    Softsign LogSigmoid Threshold Hardshrink Softshrink Tanhshrink Identity Dropout Dropout1d Dropout2d Dropout3d
    AlphaDropout
"""
_ELEMENTWISE = """
    relu relu_ relu6 leaky_relu leaky_relu_ elu elu_ selu selu_ celu gelu silu mish tanh tanh_ sigmoid sigmoid_
    hardtanh hardtanh_ hardsigmoid hardswish softplus softsign logsigmoid hardshrink softshrink tanhshrink abs neg
    square clamp clamp_ contiguous clone detach
"""
_BINARY = ("add", "add_", "iadd", "sub", "sub_", "isub", "mul", "mul_", "imul")
_POOLS = {f"{kind}_pool{n}d": n for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)}
_DROPOUTS = [functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d]
_RULES: dict[str, Callable[..., Value]] = {
    "cat": channels.cat,
    "flatten": channels.flatten,
    "view": channels.view,
    "reshape": channels.view,
    "mean": channels.mean,
    "size": channels.size,
    "getattr": channels.attribute,
    "getitem": channels.getitem,
}

_NAMES: dict[Any, str] = {getattr: "getattr"} | {
    getattr(space, name): name
    for name in (*_ELEMENTWISE.split(), *_BINARY, *_POOLS, *_RULES)
    for space in (torch, functional, operator)
    if hasattr(space, name)
}
_MODULES = {getattr(nn, name) for name in _ELEMENTWISE_MODULES.split()}
_POOL_MODULES = {getattr(nn, name.title().replace("_", "")[:-1] + "d"): name for name in _POOLS}
_MODES: tuple[type[Any], ...] = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU)
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")}


def shrink(module: nn.Module, state: State) -> nn.Module:
    """A copy of the module with smaller layers and the outputs of the masked one.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> state = sf.static(0.5, where="0.weight", pattern=sf.patterns.channel(0)).init(sf.modules.params_of(net))
    >>> small, x = sf.shrink(net, state), torch.ones(1, 3)
    >>> small
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    >>> torch.allclose(small(x), sf.modules.call(net, state, x), atol=1e-6)
    True

    A channel goes when everyone who reads it can do without: its value is one constant, which moves on
    into their biases, or they keep no weight on it. A row is constant when it keeps no weight, by its
    mask, on inputs that vary; weights that are kept and happen to be 0 count as weights. Constants go
    through activations, pooling, batch norm, sums, products and concatenations; channels that meet go
    together or not at all. A channel stays where a layer without a bias reads a constant that is not 0 (no
    parameter is added), or a convolution that pads with zeros, as the border would differ, and where
    something not understood here (a layer norm, an attention, a view of fixed sizes) reads it. A hidden unit
    of an LSTM, GRU or RNN (one layer, one direction, without a given state) goes when it is 0 at all times: its
    candidate gate, the cell's in an LSTM, keeps no weight and no bias. The module's own outputs keep their shape,
    and one channel always stays. Names in `state_dict` stay; what is pruned but cannot go is 0.

    The forward is followed by `torch.fx`, with its optional arguments at their defaults, for inputs that
    come as batches: images (N, C, H, W), features of a batch norm (N, C). Raises TypeError for anything but a
    State, and ValueError for a module that `torch.fx` cannot follow, for batch norm or dropout in
    train mode, for a forward that computes with the sizes of its layers, and as `sf.modules.bake` does.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"expected a State, got {type(state).__name__}; of zeros in params make one by "
            "sf.State(params, sf.masks.from_zeros(params))"
        )
    small = bake(module, state)
    if fx.Tracer().is_leaf_module(small, "") or "forward" in vars(small):
        return small  # one layer: all its channels are outputs
    plan, graph = _walk(small, flatten(state.masks)[0])
    removed = plan.removed()
    for path, (inputs, outputs) in plan.sizes.items():
        layer = small.get_submodule(path)
        LAYERS[type(layer)].cut(layer, inputs, outputs, removed)
    if removed.any():
        _check_same(str(graph), str(_trace(copy.deepcopy(small))))
    return small


def prune_biases(masks: Tree) -> Tree:
    """The masks with each bias pruned whose whole row of weights is.

    >>> rows = {"weight": torch.tensor([[True, False], [False, False]]), "bias": torch.tensor(True)}
    >>> sf.prune_biases(rows)["bias"]
    tensor([ True, False])

    A bias is a leaf beside a leaf of the same name with `weight` for `bias`, and a row is an index of the
    first dimension. What a bias prunes already stays pruned. Raises TypeError for a mask that is not bool.
    """
    check_masks(masks, masks)
    named, rebuild = flatten(masks)

    def mask_of(path: str, mask: Tensor) -> Tensor:
        head, dot, name = path.rpartition(".")
        weight = named.get(head + dot + name.replace("bias", "weight"), mask)
        return mask & weight[..., None].flatten(1).any(1) if "bias" in name and weight.ndim else mask

    return rebuild([mask_of(path, mask) for path, mask in named.items()])


def _trace(root: nn.Module) -> fx.Graph:
    # A default that is a plain value is followed as such: a proxy in its place would never be None.
    parameters = inspect.signature(root.forward).parameters.values()
    plain = (bool, int, float, str, type(None))
    defaults: dict[str, Any] = {p.name: p.default for p in parameters if isinstance(p.default, plain)}
    try:
        return fx.Tracer().trace(root, concrete_args=defaults)
    except Exception as error:  # whatever the module's own code makes of a proxy
        raise ValueError(
            f"expected a {type(root).__name__} that torch.fx can follow, but: {error}; shrink the parts that it can "
            "follow one at a time, or put what it cannot into a function marked with torch.fx.wrap"
        ) from error


def _check_same(before: str, after: str) -> None:
    for old, new in zip(before.splitlines(), after.splitlines(), strict=False):
        if old != new:
            raise ValueError(
                "expected a forward that does not compute with the sizes of its layers, but they turn "
                f"{old.strip()!r} into {new.strip()!r}; take the sizes from a tensor's shape"
            )


@torch.no_grad()
def _walk(module: nn.Module, masks: Mapping[str, Tensor]) -> tuple[Plan, fx.Graph]:
    root = copy.deepcopy(module)  # tracing may run code that changes it
    graph, plan, values = _trace(root), Plan(), dict[fx.Node, Value]()
    fixed, overwritten = _fixed(root, graph), _overwritten(root, graph)
    for node in graph.nodes:
        if node.users or node.target not in (operator.getitem, getattr):  # the size that nobody reads is free
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "call_module":
                value = _of_module(plan, root, masks, node, fixed, args, kwargs)
            elif node.op in ("call_function", "call_method"):
                value = _of_function(plan, node, args, kwargs)
            else:
                value = INPUT if node.op == "placeholder" else UNKNOWN
            if value is UNKNOWN or node in overwritten:
                plan.pin((args, kwargs, value))
                value = UNKNOWN
            values[node] = value
    return plan, graph


def _of_module(
    plan: Plan, root: nn.Module, masks: Mapping[str, Tensor], node: fx.Node, fixed: set[str], args: Any, kwargs: Any
) -> Value:
    path = str(node.target)
    layer: Any = root.get_submodule(path)
    kind = type(layer)
    if isinstance(layer, _MODES) and layer.training and getattr(layer, "p", 1):
        raise _mode_error(path, kind.__name__)
    if kwargs or len(args) != 1 or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return UNKNOWN
    if kind in LAYERS and path not in fixed:

        def kept(name: str) -> Tensor:
            return masks[f"{path}.{name}"].cpu().expand(getattr(layer, name).shape)

        return LAYERS[kind].rule(plan, path, layer, kept, args[0])
    if kind in _MODULES and getattr(layer, "num_parameters", 1) == 1:  # else a PReLU with a slope for each channel
        return channels.elementwise(plan, layer, args[0])
    if kind in _POOL_MODULES:
        return _pool(plan, _POOL_MODULES[kind], args[0], **{k: v for k, v in vars(layer).items() if k[0] != "_"})
    return channels.flatten(plan, args[0], layer.start_dim, layer.end_dim) if kind is nn.Flatten else UNKNOWN


def _of_function(plan: Plan, node: fx.Node, args: Any, kwargs: Any) -> Value:
    name = str(node.target) if node.op == "call_method" else _NAMES.get(node.target, "")
    fn: Any = getattr(Tensor, name, None) if node.op == "call_method" else node.target
    if fn in _DROPOUTS:
        if kwargs.get("training", True) and kwargs.get("p", 0.5):
            raise _mode_error(node.name, fn.__name__)
        return args[0]
    if name in _POOLS:
        names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        return _pool(plan, name, args[0], **dict(zip(names, args[1:], strict=False)), **kwargs)
    try:
        if name in _ELEMENTWISE.split():
            return channels.elementwise(plan, fn, *args, **kwargs)
        args, rule = ((fn, *args), channels.binary) if name in _BINARY else (args, _RULES[name])
        inspect.signature(rule).bind(plan, *args, **kwargs)
    except (KeyError, TypeError):  # no rule, or none for these arguments
        return UNKNOWN
    return rule(plan, *args, **kwargs)


def _pool(plan: Plan, name: str, x: Value, **settings: Any) -> Value:
    if settings.get("return_indices"):
        return UNKNOWN
    padding = settings.get("padding", 0)
    padded = any(padding) if isinstance(padding, tuple | list) else padding != 0
    even = not (padded and settings.get("count_include_pad", True)) and settings.get("divisor_override") is None
    return channels.pool(plan, x, _POOLS[name], even or not name.startswith("avg"))


def _mode_error(path: str, kind: str) -> ValueError:
    return ValueError(
        f"expected {path!r} ({kind}) in eval mode, as its outputs depend on the batch or on chance in train mode: "
        "call module.eval() first"
    )


def _fixed(root: nn.Module, graph: fx.Graph) -> set[str]:
    """Layers that run twice, or that share a parameter with another reader."""
    calls = collections.Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    readers = collections.Counter(id(p) for layer in root.modules() for p in layer._parameters.values())
    readers.update(id(operator.attrgetter(str(node.target))(root)) for node in graph.nodes if node.op == "get_attr")
    return {
        path
        for path, times in calls.items()
        if times > 1 or any(readers[id(p)] > 1 for p in root.get_submodule(path).parameters(recurse=False))
    }


def _overwritten(root: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Tensors that an operation in place changes while someone else reads them too."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _in_place(root, node):
            chain, source = [], node.kwargs.get("out", next(iter(node.args), None))
            while isinstance(source, fx.Node):
                chain.append(source)
                source = None if _makes_new(root, source) else next(iter(source.args), None)
            if any(len(link.users) > 1 for link in chain):
                found.update(chain)
    return found


def _in_place(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call_") and bool(
        named or node.target in _IN_PLACE or node.kwargs.get("inplace") or "out" in node.kwargs
    )


def _makes_new(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in LAYERS
    return node.target in _NAMES and _NAMES[node.target] in _BINARY and not _in_place(root, node)
