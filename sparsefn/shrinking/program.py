"""The traced program with fewer entries: a module with the old parameter names."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from sparsefn.shrinking.arguments import RULES
from sparsefn.shrinking.change import Resizing, aten, refused, scale
from sparsefn.shrinking.cut import Cut
from sparsefn.shrinking.values import bind, opname, tensors_of, values_in


class Program(fx.GraphModule):
    """A traced module, with the code of the graph and the mode of the trace."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, class_name: str = "Program"
    ) -> None:
        super().__init__(nn.Module(), fx.Graph(), class_name)
        # GraphModule would make all buffers part of the state_dict
        vars(self).update(vars(root))
        self.graph = graph

    def _deepcopy_init(self) -> Any:
        return Program.__init__

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        with warnings.catch_warnings():
            # of torch, about its own signatures
            warnings.simplefilter("ignore", FutureWarning)
            made: fx.GraphModule = super().__deepcopy__(memo)
        return made

    def train(self, mode: bool = True) -> Program:
        """Set the flag alone: the operations are those of the mode in which the model
        was traced.
        """
        if mode != self.meta.get("train", False) and any(
            map(_has_mode, self.graph.nodes)
        ):
            made, other = ("eval", "True") if mode else ("train", "False")
            warnings.warn(
                f"this program was traced in {made} mode, and computes so whatever "
                f"train() and eval() say: take one with train={other}, and the "
                "parameters of this one by load_state_dict",
                stacklevel=2,
            )
        return super().train(mode)


def _has_mode(node: fx.Node) -> bool:
    # Whether an operation is told in which mode it is.
    schema = getattr(node.target, "_schema", None)
    names = {spec.name for spec in schema.arguments} if schema is not None else set()
    return (
        bool(names & {"train", "training"})
        and bind(node.target, node.args, node.kwargs).get("p") != 0
    )


def program(cut: Cut, tensors: Mapping[str, Tensor] | None = None) -> Program:
    """The traced program without the entries that go.

    Parameters and buffers are cut copies under their old names; those in `tensors` come
    from there. Arguments that say sizes or places are made anew, so that inputs may
    have other sizes wherever the traced program allows that. Inputs other than tensors
    have to be as in the trace. What the program makes itself lies on the device of its
    first input.

    Raises ValueError for an operation that cannot follow, with its name and module.
    """
    old = cut.analysis.graph
    graph = fx.Graph()
    nodes = dict[fx.Node, fx.Node]()
    leaves = tensors_of(old)
    root = _leaves(cut, leaves, tensors or {})
    for node in old.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    graph.set_codegen(old.graph._codegen)
    for before, node in nodes.items():
        if node.op == "call_function" and node.target is not operator.getitem:
            _follow(cut, root, before, node)
    _open(graph)
    read = {node.target for node in graph.find_nodes(op="get_attr")}
    with graph.inserting_before(nodes[old.graph.output_node()]):
        # a second name of a tensor
        for name in (name for name in leaves if name not in read):
            graph.get_attr(name)
    for node in nodes.values():  # of the sizes before the cut
        for key in ("val", "tensor_meta", "from_node"):
            node.meta.pop(key, None)
    made = Program(root, graph)
    made.meta["train"] = old.meta.get("train", False)
    nn.Module.train(made, made.meta["train"])
    return made


def _leaves(
    cut: Cut, leaves: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> nn.Module:
    # A module of modules with the smaller parameters, buffers and constants under their
    # names.
    old = cut.analysis.graph
    saved = set(cut.analysis.graph.state_dict())
    targets = [str(node.target) for node in old.graph.find_nodes(op="get_attr")]
    names = {id(leaves[name]): name for name in targets}
    made = dict[int, Tensor]()
    owners = {"": nn.Module()}
    for name, x in leaves.items():
        path, _, last = name.rpartition(".")
        owner = _owner(owners, path)
        if isinstance(x, Tensor) and id(x) not in made:
            new = cut.take(names.get(id(x), name), tensors.get(name, x))
            made[id(x)] = (
                nn.Parameter(new, x.requires_grad)
                if isinstance(x, nn.Parameter)
                else new
            )
        if isinstance(x, nn.Parameter) or not isinstance(x, Tensor):
            setattr(owner, last, made.get(id(x), x))
        else:
            owner.register_buffer(last, made[id(x)], persistent=name in saved)
    for node in old.graph.find_nodes(op="call_module"):  # checks of the inputs
        owners[""].add_module(str(node.target), old.get_submodule(str(node.target)))
    return owners[""]


def _owner(owners: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in owners:
        outer, _, last = path.rpartition(".")
        owners[path] = nn.Module()
        _owner(owners, outer).add_module(last, owners[path])
    return owners[path]


def _follow(cut: Cut, root: nn.Module, old: fx.Node, node: fx.Node) -> None:
    name = opname(old)
    known = cut.analysis.values
    lost = any(
        cut.loses(value)
        for one in (old, *old.all_input_nodes)
        for value in values_in(known[one])
    )
    if lost and not hasattr(node.target, "_schema"):
        raise refused(old, "it is a program of its own")
    if lost and (name in RULES or name.startswith("sym_")):
        values = bind(
            node.target, *fx.map_arg((old.args, old.kwargs), known.__getitem__)
        )
        change = Resizing(
            cut, root, old, node, values, bind(node.target, node.args, node.kwargs)
        )
        if name in RULES:
            RULES[name](change)
            change.write()
        else:
            _unchanged(change)
    # strides may be others
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default


def _unchanged(change: Resizing) -> None:
    # Numbers stay those of the whole program: a size that is read from a tensor is
    # scaled to what it was.
    if change.name != "sym_size":
        change.refuse("it counts them")
    node = change.node
    value = change.values["self"]
    dim = change.values["dim"]
    if dim % len(value.shape) in change.lost(value):
        factors = scale(
            change.old.meta.get("val"), change.cut.size(value)[dim], value.shape[dim]
        )
        if factors is None:
            change.refuse("it counts them, in a number that is no product")
        users = list(node.users)
        with node.graph.inserting_after(node):
            part = node.graph.call_function(operator.floordiv, (node, factors[1]))
        with node.graph.inserting_after(part):
            whole = node.graph.call_function(operator.mul, (part, factors[0]))
        for user in users:
            user.replace_input_with(node, whole)


def same_input(given: object, traced: object, name: str) -> None:
    """Raise ValueError for an argument that is not what it was when the model was
    traced.

    >>> same_input(None, None, "mask")
    >>> same_input(2, None, "mask")
    Traceback (most recent call last):
        ...
    ValueError: the program was traced with mask=None, got 2; ...
    """
    if given is not traced and (type(given) is not type(traced) or given != traced):
        raise ValueError(
            f"the program was traced with {name}={traced!r}, got {given!r}; trace the "
            "model with that"
        )


def _open(graph: fx.Graph) -> None:
    # Arguments that are no tensors have to be those of the trace; new tensors lie where
    # the first input does.
    inputs = graph.find_nodes(op="placeholder")
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    if not inputs:
        return
    with graph.inserting_before(inputs[-1].next):
        for node in inputs:
            if node not in tensors:
                graph.call_function(
                    same_input, (node, node.meta.get("val"), node.target)
                )
        device = (
            graph.call_function(getattr, (tensors[0], "device")) if tensors else None
        )
    for node in graph.nodes if device is not None else ():
        schema = getattr(node.target, "_schema", None)
        names = [spec.name for spec in schema.arguments] if schema is not None else []
        if (
            "device" in names
            and bind(node.target, node.args, node.kwargs)["device"]
            == tensors[0].meta["val"].device
        ):
            place = names.index("device")
            if place < len(node.args):
                node.update_arg(place, device)
            else:
                node.update_kwarg("device", device)
    if device is not None and not device.users:
        graph.erase_node(device)
