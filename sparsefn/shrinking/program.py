"""The traced program with fewer entries: a module with the old parameter names."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from sparsefn.shrinking import resizing
from sparsefn.shrinking.analysis import Cut
from sparsefn.shrinking.atoms import Flags
from sparsefn.shrinking.layers import (
    counted_group_norm,
    counted_layer_norm,
    counted_mean,
    counted_rms_norm,
)
from sparsefn.shrinking.norms import mean_dims
from sparsefn.shrinking.resizing import Resizing, aten, refused, scale
from sparsefn.shrinking.values import (
    bind,
    by_name,
    node_arguments,
    opname,
    tensors_of,
    values_in,
)

Rule = Callable[[Resizing], None]


def sized(change: Resizing) -> None:
    """Sizes of the output, as arguments."""
    out = change.outs[0]
    key = next(name for name in ("size", "shape", "sizes") if name in change.arguments)
    given = change.arguments[key]
    first = out.ndim - len(given)
    if change.name == "unflatten":
        first = change.along[1]
    part = slice(first, first + len(given))
    infer = change.name in ("view", "reshape", "_unsafe_view")
    change.arguments[key] = change.fit(
        given, change.cut.size(out)[part], out.shape[part], infer
    )


def resize_split(change: Resizing) -> None:
    """Parts of a dimension that loses entries, which lose some each."""
    x, dim = change.along
    if dim in change.lost(x):
        sizes = [change.cut.size(out)[dim] for out in change.outs]
        whole = change.arguments["self"]
        change.become(aten.split_with_sizes.default, whole, sizes, dim)


def repeat(change: Resizing) -> None:
    """How often dimensions are repeated, of which repeats may go."""
    x = change.values["self"]
    out = change.outs[0]
    key = "repeats" if "repeats" in change.arguments else "dims"
    made = list(change.arguments[key])
    for i in range(1, len(made) + 1):
        if i <= x.ndim:
            inside = x.shape[-i]
        else:
            inside = 1
        kept = change.kept(out, out.ndim - i)
        made[-i] = _times(made[-i], kept.reshape(-1, inside))
    change.arguments[key] = made


def repeat_interleave(change: Resizing) -> None:
    times = change.values.get("repeats")
    if change.values.get("dim") is None or not isinstance(times, int):
        change.refuse("it repeats each of them by a number of its own")
    x, dim = change.along
    kept = change.kept(change.outs[0], dim)
    table = kept.reshape(x.shape[dim], -1).T
    change.arguments["repeats"] = _times(change.arguments["repeats"], table)


def _times(times: Any, table: Flags) -> Any:
    # How many repeats stay, of a table (repeats, indices).
    rows = table.any(1)
    if rows.all():
        return times
    return int(rows.sum())


def squeeze(change: Resizing) -> None:
    """Dimensions of size 1 in the trace, none that is left with one index."""
    x = change.values["self"]
    dims = change.values.get("dim")
    if dims is None:
        dims = range(x.ndim)
    if isinstance(dims, int):
        dims = [dims]
    dims = [d % max(x.ndim, 1) for d in dims]
    after = change.cut.size(x)
    if any(after[d] == 1 != x.shape[d] for d in dims):
        one = [d for d in dims if x.shape[d] == 1]
        change.become(aten.squeeze.dims, change.arguments["self"], one)


def resize_convolution(change: Resizing) -> None:
    """Groups that go as a whole, and the same entries of each group."""
    x = change.values["input"]
    w = change.values["weight"]
    groups = change.values["groups"]
    if groups > 1:
        keep = change.kept(x, x.ndim - w.ndim + 1)
        change.count("groups", _groups(keep, groups))


def _groups(keep: Flags, groups: int) -> int:
    # How many groups stay.
    entries = keep.reshape(groups, -1)
    return int(entries.any(1).sum())


def channel_shuffle(change: Resizing) -> None:
    x = change.values["self"]
    groups = change.values["groups"]
    change.count("groups", _groups(change.kept(x, 1), groups))


def resize_layer_norm(change: Resizing) -> None:
    x = change.values["input"]
    given = change.arguments
    some = len(given["normalized_shape"])
    dims = list(range(x.ndim - some, x.ndim))
    if set(dims) & set(change.lost(x)):
        count = change.number("input", dims)
        norm = counted_layer_norm if "bias" in given else counted_rms_norm
        tail = [given[name] for name in ("weight", "bias", "eps") if name in given]
        change.become(norm, given["input"], count, some, *tail)


def resize_group_norm(change: Resizing) -> None:
    x = change.values["input"]
    groups = change.values["num_groups"]
    given = change.arguments
    keep = change.kept(x, 1)
    left = _groups(keep, groups)
    change.count("num_groups", left)
    if keep.sum() * groups != len(keep) * left:
        count = change.number("input", range(2, x.ndim), len(keep) // groups)
        change.become(
            counted_group_norm,
            given["input"],
            given["num_groups"],
            count,
            given["weight"],
            given["bias"],
            given["eps"],
        )


def resize_mean(change: Resizing) -> None:
    x = change.values["self"]
    given = change.arguments
    dims = mean_dims(given.get("dim"), x.ndim)
    if set(dims) & set(change.lost(x)):
        if given["dtype"] is not None:
            change.refuse("it counts them in another dtype")
        count = change.number("self", dims)
        keepdim = given.get("keepdim", False)
        change.become(counted_mean, given["self"], count, dims, keepdim)


def resize_attention(change: Resizing) -> None:
    """The width of a head is part of the scale."""
    q = change.values["query"]
    if change.arguments["scale"] is None and q.ndim - 1 in change.lost(q):
        change.arguments["scale"] = q.shape[-1] ** -0.5


def resize_grouped_mm(change: Resizing) -> None:
    """Products with one matrix of each expert: torch has them for widths of whole 16
    bytes.
    """
    given = change.arguments
    if (
        given["offs"] is None
        or given["bias"] is not None
        or given["out_dtype"] is not None
    ):
        change.refuse("it is of another form")
    change.become(padded_grouped_mm, given["self"], given["mat2"], given["offs"])


def padded_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The product of rows with the matrix of their expert, of any widths.

    >>> padded_grouped_mm(
    ...     torch.ones(2, 3), torch.ones(1, 3, 5), torch.tensor([2], dtype=torch.int32)
    ... )
    tensor([[3., 3., 3., 3., 3.],
            [3., 3., 3., 3., 3.]])
    """
    inner = -w.shape[1] % 8
    outer = -w.shape[2] % 8
    x = nn.functional.pad(x, (0, inner))
    wide = nn.functional.pad(w, (0, outer, 0, inner))
    made: Tensor = aten._grouped_mm.default(x, wide, offs)[:, : w.shape[2]]
    return made


# Of other operations no argument speaks of sizes or places: the proof tells where one
# does.
RULES: dict[str, Rule] = by_name(
    {
        "view reshape _unsafe_view expand broadcast_to unflatten full zeros ones empty "
        "rand randn new_zeros new_ones new_full new_empty": sized,
        "split split_with_sizes unsafe_split unsafe_split_with_sizes tensor_split "
        "chunk unsafe_chunk": resize_split,
        "repeat tile": repeat,
        "repeat_interleave": repeat_interleave,
        "squeeze": squeeze,
        "slice narrow": resizing.cut_slice,
        "select": resizing.cut_select,
        "index_select": resizing.cut_index_select,
        "index": resizing.cut_index,
        "roll": resizing.cut_roll,
        "slice_scatter select_scatter": resizing.cut_slice_scatter,
        "constant_pad_nd pad": resizing.cut_pad,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "convolution": resize_convolution,
        "channel_shuffle": channel_shuffle,
        "layer_norm rms_norm": resize_layer_norm,
        "group_norm": resize_group_norm,
        "mean": resize_mean,
        "_grouped_mm": resize_grouped_mm,
        "scaled_dot_product_attention": resize_attention,
    }
)


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
        """Set the flag alone: the operations are as in the mode in which the model
        was traced.
        """
        other_mode = mode != self.meta.get("train", False)
        if other_mode and any(map(_has_mode, self.graph.nodes)):
            made, other = ("eval", "True") if mode else ("train", "False")
            warnings.warn(
                f"this program was traced in {made} mode, and computes so whatever "
                f"train() and eval() say: take one with train={other}, and the "
                "parameters of this one by load_state_dict",
                stacklevel=2,
            )
        return super().train(mode)


def _has_mode(node: fx.Node) -> bool:
    # Whether an operation has an argument that says the mode.
    given = node_arguments(node)
    has_flag = "train" in given or "training" in given
    return has_flag and given.get("p") != 0


def program(cut: Cut, tensors: Mapping[str, Tensor] | None = None) -> Program:
    """The traced program without the entries that go.

    Parameters and buffers are cut copies under their old names; entries of `tensors`
    take their place. Arguments that say sizes or places are computed, so that inputs
    may have other sizes wherever the traced program allows that. Inputs other than
    tensors have to be as in the trace. Tensors that the program makes are on the device
    of its first input.

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
        for name in leaves:
            if name not in read:
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
        if not isinstance(x, Tensor):
            setattr(owner, last, x)
            continue
        is_parameter = isinstance(x, nn.Parameter)
        if id(x) not in made:
            first_name = names.get(id(x), name)
            new = cut.take(first_name, tensors.get(name, x))
            if is_parameter:
                new = nn.Parameter(new, x.requires_grad)
            made[id(x)] = new
        if is_parameter:
            setattr(owner, last, made[id(x)])
        else:
            owner.register_buffer(last, made[id(x)], persistent=name in saved)
    for node in old.graph.find_nodes(op="call_module"):  # checks of the inputs
        name = str(node.target)
        owners[""].add_module(name, old.get_submodule(name))
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
    tensors = values_in([known[one] for one in (old, *old.all_input_nodes)])
    if any(map(cut.loses, tensors)):
        if not hasattr(node.target, "_schema"):
            raise refused(old, "it is a program of its own")
        args, kwargs = fx.map_arg((old.args, old.kwargs), known.__getitem__)
        values = bind(node.target, args, kwargs)
        change = Resizing(cut, root, old, node, values, node_arguments(node))
        if name in RULES:
            RULES[name](change)
            change.write()
        elif name.startswith("sym_"):
            _unchanged(change)
    # strides may differ
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default


def _unchanged(change: Resizing) -> None:
    # Numbers stay as in the whole program: a size that is read from a tensor is
    # scaled to what it was.
    if change.name != "sym_size":
        change.refuse("it counts them")
    node = change.node
    value = change.values["self"]
    dim = change.values["dim"]
    if dim % value.ndim in change.lost(value):
        new = change.cut.size(value)[dim]
        factors = scale(change.old.meta.get("val"), new, value.shape[dim])
        if factors is None:
            change.refuse("it counts them, in a number that is no product")
        before, after = factors
        users = list(node.users)
        with node.graph.inserting_after(node):
            part = node.graph.call_function(operator.floordiv, (node, after))
        with node.graph.inserting_after(part):
            whole = node.graph.call_function(operator.mul, (part, before))
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
    # Arguments that are no tensors have to be as in the trace; new tensors are on the
    # device of the first input.
    inputs = graph.find_nodes(op="placeholder")
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    if not inputs:
        return
    with graph.inserting_before(inputs[-1].next):
        for node in inputs:
            if node not in tensors:
                traced = node.meta.get("val")
                graph.call_function(same_input, (node, traced, node.target))
        if not tensors:
            return
        device = graph.call_function(getattr, (tensors[0], "device"))
    for node in graph.nodes:
        given = node_arguments(node)
        if given.get("device") == tensors[0].meta["val"].device:
            place = list(given).index("device")
            if place < len(node.args):
                node.update_arg(place, device)
            else:
                node.update_kwarg("device", device)
    if not device.users:
        graph.erase_node(device)
