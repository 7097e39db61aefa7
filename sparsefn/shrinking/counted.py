"""Temporary."""
import math
from typing import Any
import torch
from torch import Tensor
def counted_mean(x: Tensor, count: int, dim: Any, keepdim: bool = False) -> Tensor:
    return x.sum(dim, keepdim) / count


def counted_layer_norm(x: Tensor, count: int, ndim: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    dims, left = list(range(-ndim, 0)), count - math.prod(x.shape[-ndim:])
    mean = x.sum(dims, keepdim=True) / count
    var = ((x - mean).square().sum(dims, keepdim=True) + left * mean.square()) / count
    y = (x - mean) * (var + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def counted_rms_norm(x: Tensor, count: int, ndim: int, weight: Any = None, eps: float | None = None) -> Tensor:
    mean = x.square().sum(list(range(-ndim, 0)), keepdim=True) / count
    y = x * (mean + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return y if weight is None else y * weight


def counted_group_norm(x: Tensor, groups: int, count: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    y = counted_layer_norm(x.reshape(x.shape[0], groups, -1), count, 1, eps=eps).reshape(x.shape)
    weight, bias = (None if p is None else p.reshape(-1, *[1] * (x.ndim - 2)) for p in (weight, bias))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


