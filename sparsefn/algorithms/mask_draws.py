"""What the algorithms share that learn masks of frozen weights by draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsefn._engine.numbers import folded
from sparsefn.core.checks import is_number
from sparsefn.core.tree import Leaves

_EDGE = 1e-6  # draws stay this far from 0 and 1, where the noise is infinite


def prior_of(name: str, path: str, leaf: Tensor, priors: Leaves) -> Tensor:
    """The prior mask of a leaf, on the device of the leaf.

    >>> prior_of("maskllm", "w", torch.ones(2), {"w": torch.tensor([True, False])})
    tensor([ True, False])

    Raises ValueError where there is none, or one of another shape.
    """
    if path not in priors or priors[path].shape != leaf.shape:
        got = tuple(priors[path].shape) if path in priors else "none"
        raise ValueError(
            f"{name}: expected a prior mask of shape {tuple(leaf.shape)} at "
            f"{path!r}, got {got}: choose the same leaves by where="
        )
    return priors[path].to(leaf.device)


def check_strength(name: str, strength: object) -> None:
    """Raise ValueError for what is no finite number.

    >>> check_strength("maskllm", 3.0)
    """
    if not is_number(strength) or not math.isfinite(strength):
        raise ValueError(f"{name}: expected a finite strength, got {strength!r}")


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from float64 draws of [0, 1).

    >>> gumbel(torch.tensor([0.5], dtype=torch.float64))
    tensor([0.3665], dtype=torch.float64)
    """
    return -torch.log(-torch.log(uniform * (1 - 2 * _EDGE) + _EDGE))


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, which becomes the first one.

    >>> softmax(torch.zeros(1, 2)).shape
    torch.Size([2, 1])

    Its sums have one order for every layout of memory, so that bits are the same.
    """
    x = logits.movedim(-1, 0)
    exp = torch.exp(x - x.detach().amax(0))
    return exp / folded(exp)
