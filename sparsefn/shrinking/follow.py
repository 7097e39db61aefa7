"""How the channels of a module depend on each other, by following its traced graph from inputs to outputs."""

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

from sparsefn.shrinking import operations
from sparsefn.shrinking.channels import UNKNOWN, Input, Plan, Value
from sparsefn.shrinking.layers import LAYERS

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
    "cat": operations.cat,
    "flatten": operations.flattened,
    "view": operations.view,
    "reshape": operations.view,
    "mean": operations.averaged,
    "size": operations.size_of,
    "getattr": operations.attribute,
    "getitem": operations.getitem,
}

_NAMES: dict[object, str] = {getattr: "getattr"} | {
    getattr(space, name): name
    for name in (*_ELEMENTWISE.split(), *_BINARY, *_POOLS, *_RULES)
    for space in (torch, functional, operator)
    if hasattr(space, name)
}
_MODULES = {getattr(nn, name) for name in _ELEMENTWISE_MODULES.split()}
_POOL_MODULES = {getattr(nn, name.title().replace("_", "")[:-1] + "d"): name for name in _POOLS}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_MODES: tuple[type[nn.Module], ...] = (*_NORMS, *_DROPOUT_MODULES, nn.RReLU)
# `__iadd__` and the like, which have an `__add__`.
_IN_PLACE = [name for name in dir(operator) if name[:3] == "__i" and hasattr(operator, "__" + name[3:])] + [
    "__setitem__"
]


class _Proxy(fx.Proxy):
    """Records operators that change a tensor in place, where torch.fx would take `x += y` for a new tensor."""


def _record(operation: Callable[..., object]) -> Callable[..., fx.Proxy]:
    def recorded(self: fx.Proxy, *args: Value) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, *args), {})

    return recorded


for _name in _IN_PLACE:
    setattr(_Proxy, _name, _record(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def trace(module: nn.Module) -> tuple[nn.Module, fx.Graph]:
    """A copy of the module on the CPU, and the graph of its forward, whose tensors are those of the copy.

    >>> [node.op for node in trace(torch.nn.Sequential(torch.nn.Linear(1, 1)))[1].nodes]
    ['placeholder', 'call_module', 'output']

    Arguments after the first that default to None, a bool, a number or a string take their default. Raises ValueError
    where `torch.fx` fails.
    """
    root = copy.deepcopy(module).cpu()  # tracing may run code that changes it
    # A proxy in place of a default would never be None.
    parameters = list(inspect.signature(root.forward).parameters.values())[1:]
    plain = (bool, int, float, str, type(None))
    defaults: dict[str, object] = {p.name: p.default for p in parameters if isinstance(p.default, plain)}
    try:
        with torch.random.fork_rng(devices=[]):  # the forward may draw; no draw is used
            return root, _Tracer().trace(root, concrete_args=defaults)
    except Exception as error:  # the module's own code may fail on a proxy in any way
        raise ValueError(
            f"expected a {type(root).__name__} that torch.fx can follow, but: {error}; shrink the parts that it can "
            "follow one at a time, or put what it cannot into a function marked with torch.fx.wrap"
        ) from error


@torch.no_grad()
def follow(root: nn.Module, graph: fx.Graph, masks: Mapping[str, Tensor]) -> Plan:
    """The plan of the channels of a traced module under masks by name.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False), torch.nn.Linear(2, 1))
    >>> masks = {"0.weight": torch.tensor([[True], [False]]), "1.weight": torch.tensor(True)}
    >>> follow(*trace(net), masks).removed()
    tensor([False,  True, False])

    The weights of the traced module are 0 off the masks. Raises ValueError for batch norm and dropout in train mode.
    """
    plan, values = Plan(), dict[fx.Node, Value]()
    fixed, overwritten = _fixed(root, graph), _overwritten(root, graph)
    for node in graph.nodes:
        if node.users or node.target not in (operator.getitem, getattr):  # a size that nothing reads may change
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            plan.at = _words(root, node)
            if node.op == "call_module":
                value = _of_module(plan, root, masks, node, fixed, args, kwargs)
            elif node.op in ("call_function", "call_method"):
                value = _of_function(plan, node, args, kwargs)
            else:
                value = Input(node.name) if node.op == "placeholder" else UNKNOWN
            if node.op == "output":
                plan.pin(args, "they are outputs of the module")
            elif value is UNKNOWN:
                path = str(node.target) if node.op == "call_module" else ""
                plan.refuse(path, (args, kwargs), "not followed")
            elif node in overwritten:
                plan.pin((args, kwargs, value), "they are changed in place while something else reads them")
                value = UNKNOWN
            values[node] = value
    return plan


def _words(root: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"{str(node.target)!r} ({type(root.get_submodule(str(node.target))).__name__})"
    return f"{getattr(node.target, '__name__', node.target)}()"


def _of_module(
    plan: Plan,
    root: nn.Module,
    masks: Mapping[str, Tensor],
    node: fx.Node,
    fixed: set[str],
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
) -> Value:
    path = str(node.target)
    layer: Any = root.get_submodule(path)
    kind = type(layer)
    if isinstance(layer, _MODES) and layer.training and getattr(layer, "p", True):
        raise _mode_error(path, kind.__name__)
    if kwargs or len(args) != 1 or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        plan.refuse(path, (args, kwargs), "called with more than one tensor, or has hooks")
        return UNKNOWN
    if kind in LAYERS and path in fixed:
        plan.refuse(path, args, "called twice, or shares its weights")
        return UNKNOWN
    if kind in LAYERS:

        def kept(name: str) -> Tensor:
            return masks[f"{path}.{name}"].cpu().expand(getattr(layer, name).shape)

        return LAYERS[kind].rule(plan, path, layer, kept, args[0])
    if kind in _MODULES and getattr(layer, "num_parameters", 1) == 1:  # else a PReLU with a slope for each channel
        return operations.elementwise(plan, layer, args[0])
    if kind in _POOL_MODULES:
        return _pool(plan, _POOL_MODULES[kind], args[0], **{k: v for k, v in vars(layer).items() if k[0] != "_"})
    return operations.flattened(plan, args[0], layer.start_dim, layer.end_dim) if kind is nn.Flatten else UNKNOWN


def _of_function(plan: Plan, node: fx.Node, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    name = str(node.target) if node.op == "call_method" else _NAMES.get(node.target, "")
    fn: Any = getattr(Tensor, name, None) if node.op == "call_method" else node.target
    if fn in _DROPOUTS:
        if kwargs.get("training", True) and kwargs.get("p", 0.5):
            raise _mode_error(node.name, fn.__name__)
        return args[0]
    if name in _POOLS and args:
        names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        return _pool(plan, name, args[0], **dict(zip(names, args[1:], strict=False)), **kwargs)
    try:
        if name in _ELEMENTWISE.split():
            return operations.elementwise(plan, fn, *args, **kwargs)
        args, rule = ((fn, *args), operations.binary) if name in _BINARY else (args, _RULES[name])
        inspect.signature(rule).bind(plan, *args, **kwargs)
    except (KeyError, TypeError):  # no rule, or none for these arguments
        return UNKNOWN
    return rule(plan, *args, **kwargs)


def _pool(plan: Plan, name: str, x: Value, **settings: Value) -> Value:
    if settings.get("return_indices"):
        return UNKNOWN
    padding = settings.get("padding", 0)
    padded = any(padding) if isinstance(padding, tuple | list) else padding != 0
    even = not (padded and settings.get("count_include_pad", True)) and settings.get("divisor_override") is None
    return operations.pooled(plan, x, _POOLS[name], even or not name.startswith("avg"))


def _mode_error(path: str, kind: str) -> ValueError:
    return ValueError(
        f"expected {path!r} ({kind}) in eval mode, as its outputs depend on the batch or on chance in train mode: "
        "call module.eval() first"
    )


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]


def _fixed(root: nn.Module, graph: fx.Graph) -> set[str]:
    """Layers that run twice, or that share a tensor with another reader."""
    calls = collections.Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    readers = collections.Counter(id(tensor) for layer in root.modules() for tensor in _tensors(layer))
    readers.update(id(operator.attrgetter(str(node.target))(root)) for node in graph.nodes if node.op == "get_attr")
    return {
        path
        for path, times in calls.items()
        if times > 1 or any(readers[id(tensor)] > 1 for tensor in _tensors(root.get_submodule(path)))
    }


def _overwritten(root: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Tensors that an in-place operation changes although another node reads them too."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _in_place(root, node):
            aliases, ahead = set[fx.Node](), _sources(root, node)
            while ahead:
                source = ahead.pop()
                aliases.add(source)
                ahead += [] if _makes_new(root, source) else _sources(root, source)
            if any(len(alias.users) > 1 for alias in aliases):
                found |= aliases
    return found


def _sources(root: nn.Module, node: fx.Node) -> list[fx.Node]:
    # The tensors that a node changes if it works in place, else the ones that its result may be a view of.
    target = node.kwargs.get("out", next(iter(node.args), None))
    return [target] if _in_place(root, node) and isinstance(target, fx.Node) else list(node.all_input_nodes)


def _in_place(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    return node.op.startswith("call_") and bool(
        named or f"__{name}__" in _IN_PLACE or node.kwargs.get("inplace") or "out" in node.kwargs
    )


def _makes_new(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in LAYERS
    return _NAMES.get(node.target, "") in (*_BINARY, "cat", "mean") and not _in_place(root, node)
