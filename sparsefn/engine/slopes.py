"""Whether derivatives are wanted, and torch's own functions, which have them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

EXP_MIN, EXP_MAX = -708.0, 709.782712893384  # below: 0, no subnormals (compiled code may flush them); above: inf

_SLOPED = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative may be wanted; always in compiled code, which is traced once.

    >>> from sparsefn.engine.slopes import differentiated
    >>> differentiated(torch.zeros(1)), differentiated(torch.zeros(1, requires_grad=True))
    (False, True)
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return True
    layers = torch._C._functorch.get_interpreter_stack() or []
    return any(layer.key() in _SLOPED for layer in layers) or any(x.requires_grad for x in tensors)


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
