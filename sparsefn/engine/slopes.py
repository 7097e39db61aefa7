"""Torch's own elementary functions, whose derivatives serve where someone asks for one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

EXP_MIN, EXP_MAX = -708.0, 709.782712893384  # below: 0, no subnormals (compiled code may flush them); above: inf


def _cospi(x: Tensor, y: Tensor, value: Tensor) -> Tensor:
    return torch.cos(math.pi * (x - 2.0 * torch.floor(x * 0.5)))


def _exp(x: Tensor, y: Tensor, value: Tensor) -> Tensor:
    return torch.exp(torch.where((x > EXP_MIN) & (x < EXP_MAX), x, 0.0))


def _log(x: Tensor, y: Tensor, value: Tensor) -> Tensor:
    return torch.log(torch.where((x > 0.0) & (x < math.inf), x, 1.0))


def _power(x: Tensor, y: Tensor, value: Tensor) -> Tensor:
    tame = (x > 0.0) & (value < 1e308)
    power = torch.pow(torch.where(tame, x, 1.0), torch.where(tame, y, 1.0))
    return torch.where(tame, power, torch.where((x == 0.0) & (y == 1.0), x, 0.0))


# Where they are finite and have a slope; elsewhere constants.
SLOPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cospi": _cospi,
    "exp": _exp,
    "log": _log,
    "power": _power,
}
