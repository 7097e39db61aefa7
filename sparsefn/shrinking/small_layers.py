"""Layers of smaller models; what torch's layers, and RMS norms in a module's own code,
keep about sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sparsefn.shrinking.norms import mean_dims
from sparsefn.shrinking.plan import PruningPlan
from sparsefn.shrinking.values import Value, module_of, node_arguments, opname


def is_transformers_conv(layer: nn.Module) -> bool:
    """Whether a layer is a `Conv1D` of transformers, known by the name of its class.

    >>> is_transformers_conv(nn.Conv1d(1, 1, 1))
    False
    """
    return any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def counted_mean(
    x: Tensor,
    count: int,
    dim: Sequence[int],
    keepdim: bool = False,
) -> Tensor:
    """The mean over `count` entries; entries that are missing from `x` are 0.

    >>> counted_mean(torch.tensor([1.0, 2.0]), 4, [0])
    tensor(0.7500)
    """
    return x.sum(list(dim), keepdim) / count


def counted_layer_norm(
    x: Tensor,
    count: int,
    ndim: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The layer norm over the last `ndim` dimensions, of `count` entries; entries that
    are missing from `x` are 0.

    >>> x, whole = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0, 2.0])
    >>> torch.allclose(
    ...     counted_layer_norm(x, 4, 1), nn.functional.layer_norm(whole, (4,))[[0, 3]]
    ... )
    True
    """
    given = x.dtype
    dims = list(range(-ndim, 0))
    x = _wide(x)
    mean = x.sum(dims, keepdim=True) / count
    centered = x - mean
    left_out = (count - math.prod(x.shape[-ndim:])) * mean.square()
    variance = (centered.square().sum(dims, keepdim=True) + left_out) / count
    return _scaled(centered * (variance + eps).rsqrt(), weight, bias).to(given)


def counted_rms_norm(
    x: Tensor,
    count: int,
    ndim: int,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The RMS norm over the last `ndim` dimensions, of `count` entries; entries that
    are missing from `x` are 0.

    >>> x, whole = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0, 2.0])
    >>> torch.allclose(
    ...     counted_rms_norm(x, 4, 1), nn.functional.rms_norm(whole, (4,))[[0, 3]]
    ... )
    True
    """
    given = x.dtype
    x = _wide(x)
    mean = x.square().sum(list(range(-ndim, 0)), keepdim=True) / count
    return _scaled(
        x * (mean + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt(),
        weight,
        None,
    ).to(given)


def counted_group_norm(
    x: Tensor,
    groups: int,
    count: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The group norm of groups of `count` entries each; entries that are missing from
    `x` are 0.

    >>> x, whole = (
    ...     torch.ones(1, 2, 1),
    ...     torch.tensor([1.0, 0.0, 1.0, 0.0]).reshape(1, 4, 1),
    ... )
    >>> torch.allclose(
    ...     counted_group_norm(x, 2, 2), nn.functional.group_norm(whole, 2)[:, ::2]
    ... )
    True
    """
    rows = counted_layer_norm(
        _wide(x).reshape(x.shape[0], groups, -1), count, 1, eps=eps
    )
    line = [-1, *[1] * (x.ndim - 2)]
    weight, bias = (None if p is None else p.reshape(line) for p in (weight, bias))
    return _scaled(rows.reshape(x.shape), weight, bias).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    # Half precision is normalised in float32, as torch does it.
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


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
    x = F.pad(x, (0, inner))
    wide = F.pad(w, (0, outer, 0, inner))
    made: Tensor = torch.ops.aten._grouped_mm.default(x, wide, offs)[:, : w.shape[2]]
    return made


class _Counted(nn.Module):
    count: int | None = None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, count={self.count}"


class CountedLayerNorm(_Counted, nn.LayerNorm):
    """A LayerNorm over `count` entries, of which some that are 0 are missing from its
    input; without `count` a plain one.
    """

    def forward(self, input: Tensor) -> Tensor:
        count = self.count or math.prod(self.normalized_shape)
        return counted_layer_norm(
            input, count, len(self.normalized_shape), self.weight, self.bias, self.eps
        )


class CountedRMSNorm(_Counted, nn.RMSNorm):
    """An RMSNorm over `count` entries, of which some that are 0 are missing from its
    input; without `count` a plain one.
    """

    def forward(self, x: Tensor) -> Tensor:
        count = self.count or math.prod(self.normalized_shape)
        return counted_rms_norm(
            x, count, len(self.normalized_shape), self.weight, self.eps
        )


class CountedGroupNorm(_Counted, nn.GroupNorm):
    """A GroupNorm over `count` channels a group, of which some that are 0 are missing
    from its input; without `count` a plain one.
    """

    def forward(self, input: Tensor) -> Tensor:
        count = self.count or self.num_channels // self.num_groups
        entries = count * math.prod(input.shape[2:])
        return counted_group_norm(
            input, self.num_groups, entries, self.weight, self.bias, self.eps
        )


class SmallAttention(nn.MultiheadAttention):
    """A MultiheadAttention whose heads need not make up the width of its inputs, with
    the same parameters' names.

    Attributes that `nn.MultiheadAttention` has not:
        head_dim: entries of the queries and keys of a head; the values of a head may
            have another number.
        scale: what the products of queries and keys are multiplied with.

    It computes what `nn.MultiheadAttention` does; masks by head are (batch * num_heads,
    length, length), with the number of its own heads. Raises ValueError for masks of
    other shapes, `is_causal` without a mask and nested tensors.
    """

    scale: float

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "SmallAttention: expected padded tensors with a key_padding_mask, got "
                "nested ones"
            )
        if is_causal and attn_mask is None:
            raise ValueError(
                "SmallAttention: expected the attn_mask that is_causal is a hint "
                "about, got None"
            )
        single = query.ndim == 2
        padding = key_padding_mask
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            padding = None if padding is None else padding.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        hint = is_causal and padding is None and not need_weights
        if hint:
            mask = None
        else:
            mask = self._mask(attn_mask, padding, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            products = q * self.scale @ k.transpose(-2, -1)
            weights = F.dropout(
                (products if mask is None else products + mask).softmax(-1), dropout
            )
            y = weights @ v
            if average_attn_weights:
                weights = weights.mean(1)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, hint, scale=self.scale
            )
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if single:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        # Queries, keys and values of each head: (batch, head, length, width).
        rows = self.num_heads * self.head_dim
        if self.in_proj_weight is None:
            parts = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        else:
            parts = list(
                torch.split(
                    self.in_proj_weight,
                    [rows, rows, len(self.in_proj_weight) - 2 * rows],
                )
            )
        bias: Any = self.in_proj_bias
        biases = (
            [None] * 3
            if bias is None
            else torch.split(bias, [len(part) for part in parts])
        )
        made = [
            F.linear(x, w, b)
            for x, w, b in zip((query, key, value), parts, biases, strict=True)
        ]
        for i, more in ((1, self.bias_k), (2, self.bias_v)):
            if more is not None:
                made[i] = torch.cat([made[i], more.expand(len(made[i]), -1, -1)], 1)
            if self.add_zero_attn:
                made[i] = F.pad(made[i], (0, 0, 0, 1))
        return [
            torch.unflatten(x, -1, (self.num_heads, -1)).transpose(1, 2) for x in made
        ]

    def _mask(
        self,
        mask: Tensor | None,
        padding: Tensor | None,
        q: Tensor,
        k: Tensor,
    ) -> Tensor | None:
        # Both masks as numbers that are added: (batch, head, length of q, length of k),
        # or to be expanded to that.
        more = (self.bias_k is not None) + self.add_zero_attn
        batch = len(q)
        length = q.shape[2]
        seen = k.shape[2] - more
        shapes = [(length, seen), (batch * self.num_heads, length, seen)]
        if mask is not None and tuple(mask.shape) not in shapes:
            raise ValueError(
                f"SmallAttention: expected attn_mask of shape {shapes[0]} or "
                f"{shapes[1]}, got {tuple(mask.shape)}"
            )
        if padding is not None and tuple(padding.shape) != (batch, seen):
            raise ValueError(
                f"SmallAttention: expected key_padding_mask of shape {(batch, seen)}, "
                f"got {tuple(padding.shape)}"
            )
        made = None
        if mask is not None:
            made = _added(mask, q.dtype)
            if mask.ndim == 3:
                made = torch.unflatten(made, 0, (-1, self.num_heads))
        if padding is not None:
            padding = _added(padding, q.dtype)[:, None, None]
            made = padding if made is None else made + padding
        if made is None:
            return None
        return F.pad(made, (0, more))


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


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


def averages(plan: PruningPlan) -> Iterator[Average]:
    """The norms and means of a program that lose entries."""
    for node in plan.analysis.graph.graph.nodes:
        name = opname(node) if node.op == "call_function" else ""
        if name not in ("mean", "layer_norm", "rms_norm", "group_norm"):
            continue
        given = node_arguments(node)
        x: Value = plan.analysis.values[node.args[0]]
        rank = x.ndim
        size = plan.size(x)
        whole = left = 1
        if name == "group_norm":
            dims = [1]
            whole = given["num_groups"]
            left = groups_after(plan, node, whole)
        elif name == "mean":
            dims = mean_dims(given.get("dim"), rank)
        else:
            dims = list(range(rank - len(given["normalized_shape"]), rank))
        before = math.prod(x.shape[d] for d in dims) // whole
        after = math.prod(size[d] for d in dims) // left
        if before != after:
            yield Average(node, before, after)


def groups_after(plan: PruningPlan, node: fx.Node, groups: int) -> int:
    """How many groups of a convolution or norm are left."""
    label = plan.analysis.log.groups.get(node)
    return int(plan.kept(label, groups).sum())


def resize(small: nn.Module, plan: PruningPlan) -> str:
    """Set what torch's layers in a model with smaller tensors keep about sizes; the
    reason where that cannot be.

    Norms that lose entries become the norms of this file, and attentions of other
    widths SmallAttention; all keep the names of their parameters.
    """
    nodes: dict[str, list[fx.Node]] = {}
    for node in plan.analysis.graph.graph.nodes:
        if node.op == "call_function":
            nodes.setdefault(module_of(node), []).append(node)
    counts = {module_of(average.node): average.counted for average in averages(plan)}
    for path, layer in small.named_modules():
        for kind, (tensor, names) in _SIZES.items():
            if isinstance(layer, kind):
                shape = getattr(layer, tensor).shape
                vars(layer).update(zip(names, shape, strict=True))
        for kind, end in _RECURRENT.items():
            if isinstance(layer, kind) and not getattr(layer, "proj_size", 0):
                layer.input_size = getattr(layer, f"weight_ih{end}").shape[1]
                layer.hidden_size = getattr(layer, f"weight_hh{end}").shape[1]
        if is_transformers_conv(layer):
            vars(layer).update(zip(("nx", "nf"), layer.weight.shape, strict=True))
        own = nodes.get(path, [])
        _convolution(layer, plan, own)
        _norm(layer, plan, own, counts.get(path))
        if type(layer) in (nn.MultiheadAttention, SmallAttention):
            why = _attention(layer, plan, path)
            if why:
                return f"the MultiheadAttention at {path!r} {why}"
    for layer in small.modules():
        if not isinstance(layer, nn.TransformerEncoderLayer):
            continue
        # its fast path takes the numbers of plain norms
        if isinstance(layer.norm1, CountedLayerNorm):
            _become_small(layer.self_attn)
    return ""


def _convolution(layer: Any, plan: PruningPlan, nodes: list[fx.Node]) -> None:
    if isinstance(layer, nn.modules.conv._ConvNd):
        for node in nodes:
            if node in plan.analysis.log.groups:
                layer.groups = groups_after(plan, node, layer.groups)
        first = layer.weight.shape[0]
        second = layer.weight.shape[1] * layer.groups
        if layer.transposed:
            layer.in_channels = first
            layer.out_channels = second
        else:
            layer.out_channels = first
            layer.in_channels = second


def _norm(
    layer: Any, plan: PruningPlan, nodes: list[fx.Node], count: int | None
) -> None:
    for node in nodes:
        name = opname(node)
        if not name.endswith("_norm"):
            continue
        x = plan.analysis.values[node.all_input_nodes[0]]
        size = plan.size(x)
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm) and name in _LAST:
            layer.normalized_shape = tuple(size[-len(layer.normalized_shape) :])
        elif isinstance(layer, nn.GroupNorm) and name == "group_norm":
            layer.num_groups = groups_after(plan, node, layer.num_groups)
            layer.num_channels = size[1]
        elif isinstance(layer, nn.modules.batchnorm._NormBase) and name in _CHANNELS:
            layer.num_features = size[1]
    if count is not None and type(layer) in COUNTED:
        layer.__class__ = COUNTED[type(layer)]
        layer.count = count


def _attention(layer: nn.MultiheadAttention, plan: PruningPlan, path: str) -> str:
    # Heads and widths from the rows that stay, of queries, keys and values.
    packed = layer.in_proj_weight is not None
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    kept = []
    inputs = []
    for name in ("in_proj_weight",) if packed else names:
        leaf = plan.analysis.leaves.get(f"{path}.{name}".removeprefix("."))
        if leaf is None:
            return ""  # it does not run
        kept.append(plan.kept(leaf.labels[0], leaf.shape[0]))
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


def fold_norms(small: nn.Module, plan: PruningPlan) -> dict[str, Tensor]:
    """Scale the weights and eps of RMS norms that lose entries; these weights by name,
    in float64.

    x / sqrt(mean(x^2) + eps) over N entries is sqrt(N / n) times that over the n that
    are left with eps * N / n. Weights in half precision are left alone, where rounding
    is much. Nothing asks whether a module is an RMS norm: running it will tell.
    """
    made: dict[str, Tensor] = {}
    for average in averages(plan):
        path = module_of(average.node)
        layer = small.get_submodule(path)
        found = _weight(plan.analysis.graph, path, layer)
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
