"""Norms and means that go on counting left-out entries that were 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def counted_mean(
    x: Tensor, count: int, dim: Sequence[int], keepdim: bool = False
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
    """The layer norm over the last `ndim` dimensions, which had `count` entries: those
    that are left out were 0.

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
    """The RMS norm over the last `ndim` dimensions, which had `count` entries: those
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
    """The group norm of groups which had `count` entries each: those that are left out
    were 0.

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
    x = x if weight is None else x * weight
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
