"""The analysis of a traced program: a label for every dimension of every tensor;
shuffles of channels as one operation.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from sparsefn.shrinking import norms, products, reindexing
from sparsefn.shrinking.channels import (
    ChannelMap,
    CoupledChannels,
    Flags,
    Ids,
    product,
)
from sparsefn.shrinking.probe import of_leaf, pointwise, probed
from sparsefn.shrinking.trace import with_tensors
from sparsefn.shrinking.values import (
    AnalysisLog,
    Step,
    Value,
    bind,
    blank,
    by_name,
    hint,
    opname,
    replaced,
    run_op,
    tensors_of,
    values_in,
)

Rule = Callable[[Step], Any]
# operations that read a part of a tensor
_CUTS = ("slice", "narrow", "index", "index_select")


class Analysis(NamedTuple):
    """What is known of a program: of each node the Values of its outputs, and of each
    leaf its Value.
    """

    graph: fx.GraphModule
    values: dict[fx.Node, Any]
    leaves: dict[str, Value]
    log: AnalysisLog

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of the program, under all of their names."""
        return dict(self.graph.named_parameters(remove_duplicate=False))


def analyse(
    graph: fx.GraphModule,
    masks: Mapping[str, Tensor] | None = None,
    *,
    counted: bool = False,
    equal_parts: bool = True,
) -> Analysis:
    """Follow a program from `torch.export` through all of its operations.

    A channel that is not frozen in the end may go, with all indices that are made of
    it. Without `masks` it may go once it is masked in all parameters that hold it; with
    masks it may go as they are, and what the layers that read a constant have to add to
    their biases is in `log.folds`.
    """
    log = AnalysisLog(CoupledChannels(), counted, equal_parts, masks)
    made = Analysis(graph, {}, {}, log)
    held = tensors_of(graph)
    seen = dict[int, Value]()
    reads = Counter[int]()
    for node in graph.graph.find_nodes(op="get_attr"):
        leaf = held[str(node.target)]
        reads[id(leaf)] += len(node.users)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            made.values[node] = _leaf(made, name, held[name], reads, seen)
        else:
            made.values[node] = _of_node(made, node)
    _keep_tables(made)
    return _settled(made)


def _keep_tables(made: Analysis) -> None:
    # A table may be cut to the size of this example: what the cut leaves out is read
    # for larger inputs, and stays.
    varies = set[fx.Node]()
    for node in made.graph.graph.nodes:
        if node.op == "placeholder" or not varies.isdisjoint(node.all_input_nodes):
            varies.add(node)
    channels = made.log.channels
    read = _channels_in(channels, [made.values[node] for node in varies])
    for node, cut in made.values.items():
        if node in varies or node.op != "call_function" or opname(node) not in _CUTS:
            continue
        known = np.union1d(read, _channels_in(channels, cut))
        for value in values_in([made.values[one] for one in node.all_input_nodes]):
            for label in value.labels:
                if label is not None:
                    unread = _without(channels.resolve(label), known)
                    channels.freeze(label, "may be read for larger inputs", unread)


def _without(label: Ids, known: Ids) -> Flags:
    # Which indices of a dimension are made of other channels than these.
    return np.asarray(~np.isin(label, known).any(1))


def _channels_in(channels: CoupledChannels, tree: Any) -> Ids:
    # All channels of the tensors in a tree. Channel 0 stands for empty places.
    labels = [x for value in values_in(tree) for x in value.labels if x is not None]
    ids = [channels.resolve(x).ravel() for x in labels]
    found = np.unique(np.concatenate(ids)) if ids else np.empty(0, np.int64)
    return found[found > 0]


def labels_of(analysis: Analysis) -> list[Ids]:
    """The labels of all dimensions in a program, each once, without empty ones."""
    found: dict[int, Ids] = {}
    for value in values_in([analysis.leaves, list(analysis.values.values())]):
        for label in value.labels:
            if label is not None and len(label):
                found[id(label)] = label
    return list(found.values())


def _settled(made: Analysis) -> Analysis:
    # With the labels as they are in the end, of which equal ones are one array.
    ends = dict[int, Ids]()
    known = dict[Any, Ids]()
    for label in labels_of(made):
        end = made.log.channels.resolve(label)
        key = (end.shape, end.tobytes())
        ends[id(label)] = known.setdefault(key, end)

    def resolved(value: Value) -> Value:
        labels = [ends.get(id(label)) for label in value.labels]
        return value.along(labels, value.constants)

    def settle(tree: Any) -> Any:
        return replaced(tree, map(resolved, values_in(tree)))

    values = {node: settle(tree) for node, tree in made.values.items()}
    return made._replace(values=values, leaves=settle(made.leaves))


def _leaf(
    made: Analysis,
    name: str,
    leaf: Any,
    reads: Mapping[int, int],
    seen: dict[int, Value],
) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    if id(leaf) not in seen:
        log = made.log
        if log.masks is None:
            mask = None
        else:
            mask = log.masks.get(name)
        if mask is not None and not mask.ndim:  # the leaf is dense
            mask = None
        real = None if leaf.is_meta else leaf.detach()
        if real is not None and mask is not None:
            real = real * mask
        # What nothing reads stays whole.
        read = reads[id(leaf)]
        labels: list[ChannelMap] = []
        constants = []
        for d, n in enumerate(leaf.shape):
            labels.append(log.channels.new(n) if n > 1 and read else None)
            constants.append(of_leaf(log, leaf, real, mask, d))
        seen[id(leaf)] = Value(
            tuple(leaf.shape),
            leaf.dtype,
            tuple(labels),
            tuple(constants),
            real,
            name,
            mask,
            read,
            whole=name,
        )
    made.leaves[name] = seen[id(leaf)]
    return seen[id(leaf)]


def _of_node(made: Analysis, node: fx.Node) -> Any:
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made.values[n])
    ins = values_in([args, kwargs])
    if node.op == "output":
        for value in ins:
            for label in value.labels:
                made.log.channels.freeze(label, "it is an output of the model")
        return None
    outs = blank(node.meta.get("val"))
    if node.op != "call_function" or not values_in(outs):
        return outs
    if node.target is operator.getitem:
        values, place = args
        return values[place]
    if not hasattr(node.target, "_schema"):
        step = Step(node, {}, outs, made.log)
        step.freeze_all(ins, "is a program of its own")
        return outs
    step = Step(node, bind(node.target, args, kwargs), outs, made.log)
    rule = _rule(step)
    outs = _known(step, ins, rule(step))
    if node.target._schema.is_mutable:
        for read in node.all_input_nodes:
            if isinstance(made.values.get(read), Value):
                made.values[read] = outs
                break
    return outs


def _rule(step: Step) -> Rule:
    if step.name in _RULES:
        return _RULES[step.name]
    overload = step.target._overloadname
    if step.name in reindexing.MOVES and overload not in ("dtype", "self_Tensor"):
        tied = step.name in _PARTS and step.log.equal_parts
        return _parts if tied else reindexing.move
    if torch.Tag.pointwise in step.target.tags or step.name in _POINTWISE:
        return pointwise
    return probed


def _known(step: Step, ins: list[Value], out: Any) -> Any:
    # With the numbers of integers that do not depend on inputs, such as indices, and
    # with the leaf all of whose entries a move has.
    if not ins or not isinstance(out, Value):
        return out
    known = []
    for value in ins:
        if value.real is not None and not value.dtype.is_floating_point:
            known.append(value.real)
    if len(known) == len(ins) and not out.dtype.is_floating_point:
        real = run_op(step.target, step.arguments, known)[0]
        out = out._replace(real=real)
    if step.name in reindexing.MOVES and len(ins) == 1:
        whole = None
        if math.prod(out.shape) == math.prod(ins[0].shape):
            whole = ins[0].whole
        out = out._replace(whole=whole)
    return out


def _parts(step: Step) -> Any:
    # The parts of a chunk lose the same entries, so that code that cuts in equal parts
    # runs as it is.
    outs = reindexing.move(step)
    parts = values_in(outs)
    whole = values_in(step.arguments)[0]
    for d, size in enumerate(whole.shape):
        sizes = {part.shape[d] for part in parts}
        if len(sizes) == 1 and not sizes <= {1, size}:
            step.join(*(part.labels[d] for part in parts))
    return outs


def _uniform(step: Step) -> Any:
    """Tensors of one number: any of their indices may go, as the size is an
    argument.
    """
    fills = {"zeros": 0.0, "new_zeros": 0.0, "ones": 1.0, "new_ones": 1.0}
    fill = fills.get(step.name, step.arguments.get("fill_value"))
    out: Value = step.outs
    labels = list(out.labels)
    constants = list(out.constants)
    plain = isinstance(fill, int | float) and out.dtype.is_floating_point
    # sizes of batches and sequences are symbols
    for d, size in enumerate(step.node.meta["val"].shape):
        n = out.shape[d]
        if n > 1 and isinstance(size, int):
            labels[d] = step.channels.new(n)
        if n > 1 and plain:
            constants[d] = np.full(n, float(fill))  # type: ignore[arg-type]
    return out.along(labels, constants)


def _arange(step: Step) -> Any:
    args = step.node.args
    known = all(isinstance(x, int | bool | None) for x in args)
    if not known or step.outs.dtype.is_floating_point:
        return step.outs
    return step.outs._replace(real=torch.arange(*args, device="cpu"))  # type: ignore[arg-type]


def _dropout(step: Step) -> Any:
    x = values_in(step.arguments)[0]
    drops = step.arguments["train"] and step.arguments["p"]
    constants = []
    for some in x.constants:
        if some is not None and drops:
            some = np.where(some == 0, 0.0, np.nan)
        constants.append(some)
    outs = values_in(step.outs)
    return replaced(step.outs, [out.along(x.labels, constants) for out in outs])


def _shuffle(step: Step) -> Any:
    """Channels (groups, n) as (n, groups): any group, and any place in all groups, may
    go.
    """
    x = step.arguments["self"]
    groups = step.arguments["groups"]
    size = x.shape[1] // groups
    group, place = reindexing.divided(step, x.labels[1], groups, size)
    step.log.groups[step.node] = group
    labels = list(x.labels)
    constants = list(x.constants)
    labels[1] = product(place, size, group, groups)
    if constants[1] is not None:
        constants[1] = constants[1].reshape(groups, size).T.reshape(-1)
    return step.outs.along(labels, constants)


_PARTS = frozenset(
    [
        "chunk",
        "split",
        "tensor_split",
        "split_with_sizes",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
    ]
)
_POINTWISE = frozenset(["to", "_to_copy", "type_as", "masked_fill"])
_RULES: dict[str, Rule] = by_name(
    {
        "linear": products.linear_layer,
        "addmm": products.addmm,
        "matmul mm bmm mv dot addmv baddbmm": products.matmul,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "convolution": products.convolution,
        "einsum": products.einsum,
        "bilinear": products.bilinear,
        "_grouped_mm grouped_mm_fallback": products.grouped_mm,
        "scaled_dot_product_attention": products.attention,
        "lstm gru rnn_tanh rnn_relu": products.recurrent,
        "embedding": reindexing.embedding,
        "index": reindexing.index,
        "index_select": reindexing.index_select,
        "pad constant_pad_nd": reindexing.pad,
        "layer_norm rms_norm": norms.layer_norm,
        "group_norm": norms.group_norm,
        "batch_norm _native_batch_norm_legit_no_training": norms.batch_norm,
        "mean": norms.mean_over,
        "full zeros ones empty new_zeros new_ones new_full new_empty": _uniform,
        "arange": _arange,
        "dropout": _dropout,
        "channel_shuffle": _shuffle,
    }
)


_VIEWS = [
    "view",
    "_unsafe_view",
    "reshape",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
]
_STEPS = frozenset([*_VIEWS, "clone", "contiguous", "channel_shuffle"])


def without_shuffles(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of the program in which views and transposes that permute one dimension
    are one `index_select`.

    Of a view in groups every group would have to lose the same channels, of a
    permutation any may go; but grouped convolutions may be better off with the views.
    """
    program = with_tensors(program)
    graph = program.graph
    for first in list(graph.nodes):
        for chain in _chains(first):
            dim, places = _permuted(chain) or (0, None)
            if places is not None:
                last = chain[-1]
                device = chain[-1].meta["val"].device
                # the analysis reads them
                if device.type != "meta":
                    places = places.to(device)
                program.register_buffer(
                    f"_{last.name}_places", places, persistent=False
                )
                with graph.inserting_before(last):
                    index = graph.get_attr(f"_{last.name}_places")
                    made = graph.call_function(
                        torch.ops.aten.index_select.default, (first.args[0], dim, index)
                    )
                made.meta = last.meta
                last.replace_all_uses_with(made)
                for node in reversed(chain):
                    graph.erase_node(node)
                break
    program.recompile()
    return program


def has_shuffles(program: fx.GraphModule) -> bool:
    """Whether a program has views and transposes that permute one dimension."""
    return any(
        _permuted(chain) for first in program.graph.nodes for chain in _chains(first)
    )


def _chains(first: fx.Node) -> Iterator[list[fx.Node]]:
    # Operations that follow in one line, and give the shape that the first one takes.
    chain = list[fx.Node]()
    following = [first]
    size = None
    if first.args:
        size = _size(first.args[0])
    while (
        len(following) == 1
        and following[0].op == "call_function"
        and opname(following[0]) in _STEPS
    ):
        chain.append(following[0])
        if _size(chain[-1]) == size:
            yield chain
        following = list(chain[-1].users)


def _size(node: Any) -> list[str] | None:
    val = None
    if isinstance(node, fx.Node):
        val = node.meta.get("val")
    if isinstance(val, Tensor):
        return list(map(str, val.shape))
    return None


def _permuted(chain: list[fx.Node]) -> tuple[int, Tensor] | None:
    # Which dimension operations permute, and from which places; None where they do
    # anything else.
    shape = tuple(hint(n) for n in chain[-1].meta["val"].shape)
    made = cells = torch.arange(math.prod(shape), device="cpu").reshape(shape)
    for node in chain:
        run: Any = node.target
        made = run(
            made,
            *fx.map_arg(node.args[1:], lambda n: hint(n.meta["val"])),
            **node.kwargs,
        )
    for d, size in enumerate(shape):
        places = (
            made.movedim(d, 0).reshape(size, -1)[:, 0]
            // math.prod(shape[d + 1 :])
            % size
        )
        if not places.equal(torch.arange(size, device="cpu")) and made.equal(
            cells.index_select(d, places)
        ):
            return d, places
    return None
