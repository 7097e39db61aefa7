"""Layers of smaller models: norms and means that go on counting left-out entries that
were 0, and attention of any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is a `Conv1D` of transformers, known by the name of its class.

    >>> is_conv1d(nn.Conv1d(1, 1, 1))
    False
    """
    return any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def counted_mean(
    x: Tensor,
    count: int,
    dim: Sequence[int],
    keepdim: bool = False,
) -> Tensor:
    """The mean of `count` entries, all of which that are not in `x` are 0.

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
    """The layer norm over the last `ndim` dimensions, which had `count` entries:
    entries that are left out were 0.

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
    apart = x - mean
    left_out = (count - math.prod(x.shape[-ndim:])) * mean.square()
    variance = (apart.square().sum(dims, keepdim=True) + left_out) / count
    return _scaled(apart * (variance + eps).rsqrt(), weight, bias).to(given)


def counted_rms_norm(
    x: Tensor,
    count: int,
    ndim: int,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The RMS norm over the last `ndim` dimensions, which had `count` entries: entries
    that are left out were 0.

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
    """The group norm of groups which had `count` entries each: entries that are left
    out were 0.

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


class _Counted(nn.Module):
    count: int | None = None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, count={self.count}"


class CountedLayerNorm(_Counted, nn.LayerNorm):
    """A LayerNorm that counts `count` entries, where some that were 0 are left out;
    without `count` as it is.
    """

    def forward(self, input: Tensor) -> Tensor:
        count = self.count or math.prod(self.normalized_shape)
        return counted_layer_norm(
            input, count, len(self.normalized_shape), self.weight, self.bias, self.eps
        )


class CountedRMSNorm(_Counted, nn.RMSNorm):
    """An RMSNorm that counts `count` entries, where some that were 0 are left out;
    without `count` as it is.
    """

    def forward(self, x: Tensor) -> Tensor:
        count = self.count or math.prod(self.normalized_shape)
        return counted_rms_norm(
            x, count, len(self.normalized_shape), self.weight, self.eps
        )


class CountedGroupNorm(_Counted, nn.GroupNorm):
    """A GroupNorm that counts `count` channels in a group, where some that were 0 are
    left out; else as it is.
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
