"""What torch's own layers keep about sizes, and RMS norms in a module's own code, set
to the shapes of smaller tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from sparsefn.shrinking.analysis import Cut
from sparsefn.shrinking.layers import (
    CountedGroupNorm,
    CountedLayerNorm,
    CountedRMSNorm,
    SmallAttention,
    is_conv1d,
)
from sparsefn.shrinking.norms import mean_dims
from sparsefn.shrinking.values import Value, module_of, node_arguments, opname

# Of a layer, the tensor whose shape says its sizes, and their names, dimension by
# dimension.
_SIZES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: ("weight", ("out_features", "in_features")),
    nn.Bilinear: ("weight", ("out_features", "in1_features", "in2_features")),
    nn.Embedding: ("weight", ("num_embeddings", "embedding_dim")),
    nn.EmbeddingBag: ("weight", ("num_embeddings", "embedding_dim")),
    nn.PReLU: ("weight", ("num_parameters",)),
}
_RECURRENT: dict[type[nn.Module], str] = {nn.RNNBase: "_l0", nn.RNNCellBase: ""}
_LAST = ("layer_norm", "rms_norm")  # over the last dimensions
_CHANNELS = ("batch_norm", "instance_norm")
COUNTED: dict[type[nn.Module], Any] = {
    nn.LayerNorm: CountedLayerNorm,
    nn.RMSNorm: CountedRMSNorm,
    nn.GroupNorm: CountedGroupNorm,
}


class Average(NamedTuple):
    """A norm or mean that loses entries: how many it counts, and how many are left."""

    node: fx.Node
    counted: int
    left: int


def averages(cut: Cut) -> Iterator[Average]:
    """The norms and means of a program that lose entries."""
    for node in cut.analysis.graph.graph.nodes:
        name = opname(node) if node.op == "call_function" else ""
        if name not in ("mean", "layer_norm", "rms_norm", "group_norm"):
            continue
        given = node_arguments(node)
        x: Value = cut.analysis.values[node.args[0]]
        rank = x.ndim
        size = cut.size(x)
        whole = left = 1
        if name == "group_norm":
            dims = [1]
            whole = given["num_groups"]
            left = groups_after(cut, node, whole)
        elif name == "mean":
            dims = mean_dims(given["dim"], rank)
        else:
            dims = list(range(rank - len(given["normalized_shape"]), rank))
        before = math.prod(x.shape[d] for d in dims) // whole
        after = math.prod(size[d] for d in dims) // left
        if before != after:
            yield Average(node, before, after)


def groups_after(cut: Cut, node: fx.Node, groups: int) -> int:
    """How many groups of a convolution or norm are left."""
    label = cut.analysis.book.groups.get(node)
    return int(cut.kept(label, groups).sum())


def resize(small: nn.Module, cut: Cut) -> str:
    """Set what torch's layers in a model with smaller tensors keep about sizes; the
    reason where that cannot be.

    Norms that lose entries become norms of `sparsefn.shrinking.layers`, and attentions
    of other widths SmallAttention; all keep the names of their parameters.
    """
    nodes: dict[str, list[fx.Node]] = {}
    for node in cut.analysis.graph.graph.nodes:
        if node.op == "call_function":
            nodes.setdefault(module_of(node), []).append(node)
    counts = {module_of(average.node): average.counted for average in averages(cut)}
    for path, layer in small.named_modules():
        for kind, (tensor, names) in _SIZES.items():
            if isinstance(layer, kind):
                shape = getattr(layer, tensor).shape
                vars(layer).update(zip(names, shape, strict=True))
        for kind, end in _RECURRENT.items():
            if isinstance(layer, kind) and not getattr(layer, "proj_size", 0):
                layer.input_size = getattr(layer, f"weight_ih{end}").shape[1]
                layer.hidden_size = getattr(layer, f"weight_hh{end}").shape[1]
        if is_conv1d(layer):
            vars(layer).update(zip(("nx", "nf"), layer.weight.shape, strict=True))
        own = nodes.get(path, [])
        _convolution(layer, cut, own)
        _norm(layer, cut, own, counts.get(path))
        if type(layer) in (nn.MultiheadAttention, SmallAttention):
            why = _attention(layer, cut, path)
            if why:
                return f"the MultiheadAttention at {path!r} {why}"
    for layer in small.modules():
        if not isinstance(layer, nn.TransformerEncoderLayer):
            continue
        # its fast path takes the numbers of plain norms
        if isinstance(layer.norm1, CountedLayerNorm):
            _become_small(layer.self_attn)
    return ""


def _convolution(layer: Any, cut: Cut, nodes: list[fx.Node]) -> None:
    if isinstance(layer, nn.modules.conv._ConvNd):
        for node in nodes:
            if node in cut.analysis.book.groups:
                layer.groups = groups_after(cut, node, layer.groups)
        first = layer.weight.shape[0]
        second = layer.weight.shape[1] * layer.groups
        if layer.transposed:
            layer.in_channels = first
            layer.out_channels = second
        else:
            layer.out_channels = first
            layer.in_channels = second


def _norm(layer: Any, cut: Cut, nodes: list[fx.Node], count: int | None) -> None:
    for node in nodes:
        name = opname(node)
        if not name.endswith("_norm"):
            continue
        x = cut.analysis.values[node.all_input_nodes[0]]
        size = cut.size(x)
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm) and name in _LAST:
            layer.normalized_shape = tuple(size[-len(layer.normalized_shape) :])
        elif isinstance(layer, nn.GroupNorm) and name == "group_norm":
            layer.num_groups = groups_after(cut, node, layer.num_groups)
            layer.num_channels = size[1]
        elif isinstance(layer, nn.modules.batchnorm._NormBase) and name in _CHANNELS:
            layer.num_features = size[1]
    if count is not None and type(layer) in COUNTED:
        layer.__class__ = COUNTED[type(layer)]
        layer.count = count


def _attention(layer: nn.MultiheadAttention, cut: Cut, path: str) -> str:
    # Heads and widths from the rows that stay, of queries, keys and values.
    packed = layer.in_proj_weight is not None
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    kept = []
    inputs = []
    for name in ("in_proj_weight",) if packed else names:
        leaf = cut.analysis.leaves.get(f"{path}.{name}".removeprefix("."))
        if leaf is None:
            return ""  # it does not run
        kept.append(cut.kept(leaf.labels[0], leaf.shape[0]))
        inputs.append(getattr(layer, name).shape[1])
    if packed:
        inputs *= 3
    rows = layer.num_heads * layer.head_dim
    parts = []
    for part in np.split(np.concatenate(kept), [rows, 2 * rows]):
        parts.append(part.reshape(layer.num_heads, -1))
    heads = parts[0].any(1)
    widths = []
    for part in parts:
        of_heads = part.sum(1)[heads]
        widths.append(set(of_heads.tolist()))
    queries, keys, values = widths
    others = any((part.any(1) != heads).any() for part in parts)
    if others or queries != keys or max(map(len, widths)) > 1:
        return "has heads that do not lose the same"
    count = int(heads.sum())
    (width,) = queries
    (last,) = values
    outputs = layer.out_proj.weight.shape[0]
    same_width = width == last == layer.head_dim
    if not same_width or not count * width == inputs[0] == outputs:
        _become_small(layer)
    layer.num_heads = count
    layer.head_dim = width
    layer.embed_dim, layer.kdim, layer.vdim = inputs
    return ""


def _become_small(layer: nn.MultiheadAttention) -> None:
    if type(layer) is nn.MultiheadAttention:
        layer.__class__ = SmallAttention
        layer.scale = layer.head_dim**-0.5
        layer._qkv_same_embed_dim = False  # so that no fast path takes its tensors


def fold_norms(small: nn.Module, cut: Cut) -> dict[str, Tensor]:
    """Scale the weights and eps of RMS norms that lose entries; these weights by name,
    in float64.

    x / sqrt(mean(x^2) + eps) over N entries is sqrt(N / n) times that over the n that
    are left with eps * N / n. Weights in half precision are left alone, where rounding
    is much. Nothing asks whether a module is an RMS norm: running it will tell.
    """
    made: dict[str, Tensor] = {}
    for average in averages(cut):
        path = module_of(average.node)
        layer = small.get_submodule(path)
        found = _weight(cut.analysis.graph, path, layer)
        eps = _eps(average.node)
        own = []
        for key, value in vars(layer).items():
            if type(value) is float and value == eps:
                own.append(key)
        if opname(average.node) != "mean" or found is None or not own:
            continue
        name, shift = found
        weight = layer.get_parameter(name)
        whole = f"{path}.{name}".removeprefix(".")
        if weight.dtype in (torch.float32, torch.float64) and whole not in made:
            ratio = average.counted / average.left
            factor = ratio**0.5
            scaled = weight.detach().double() * factor + shift * (factor - 1)
            made[whole] = scaled
            weight.data = scaled.to(weight.dtype)
            vars(layer).update(dict.fromkeys(own, eps * ratio))
    return made


def _eps(mean: fx.Node) -> float:
    # The number that is added to the mean.
    for user in mean.users:
        if opname(user) == "add" and isinstance(user.args[1], float):
            return user.args[1]
    return 0.0


def _weight(
    graph: fx.GraphModule, path: str, layer: nn.Module
) -> tuple[str, float] | None:
    # The parameter that something is multiplied with, and what is added to it before.
    for node in graph.graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        shift = 0.0
        while owner == path and name in layer._parameters and node.users:
            node = next(iter(node.users))
            if opname(node) == "add" and isinstance(node.args[1], float):
                shift += node.args[1]
            elif opname(node) == "mul":
                return name, shift
            elif opname(node) not in ("to", "_to_copy"):
                break
    return None
