"""How far a layer turns the hidden states that pass through it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsefn.core.checks import check_int


def influence_of(before: Tensor, after: Tensor, *, dim: int = -1) -> Tensor:
    """Block influence of one batch: 1 - the mean cosine of vectors before and after.

    >>> before = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    >>> after = torch.tensor([[0.0, 1.0], [3.0, 4.0]])
    >>> sf.calibration.influence_of(before, after)
    tensor(0.5000, dtype=torch.float64)

    Args:
        before: Floating-point tensor, what enters a layer.
        after: Tensor of the same shape, what leaves it.
        dim: The dimension of the vectors.

    Returns:
        A 0-d float64 tensor on the CPU, from 0 for equal directions to 2 for opposite
        ones. A vector of zeros has cosine 1 with one of zeros, and 0 with others.

    Raises:
        TypeError: `dim` is no int.
        ValueError: The shapes differ, or `dim` is none of their dimensions.

    Men et al. 2024, "ShortGPT: Layers in Large Language Models are More Redundant Than
    You Expect", arXiv 2403.03853, eq. 1.
    """
    return 1 - _cosines("influence_of", before, after, dim).mean()


def angle_of(before: Tensor, after: Tensor) -> Tensor:
    """Angular distance of one batch: the mean angle of vectors before and after.

    >>> before = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    >>> after = torch.tensor([[0.0, 1.0], [3.0, 4.0]])
    >>> sf.calibration.angle_of(before, after)
    tensor(0.2500, dtype=torch.float64)

    Args:
        before: Floating-point tensor, what enters the first of some layers. Vectors lie
            along its last dimension.
        after: Tensor of the same shape, what leaves the last of them.

    Returns:
        A 0-d float64 tensor on the CPU in half turns, from 0 for equal directions to 1
        for opposite ones. Zeros are as in `influence_of`.

    Raises:
        ValueError: The shapes differ.

    Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv
    2403.17887, which take the last token of each sequence.
    """
    cosines = _cosines("angle_of", before, after, -1).clamp(-1, 1)
    return cosines.arccos().mean() / math.pi


def _cosines(caller: str, a: Tensor, b: Tensor, dim: int) -> Tensor:
    if a.shape != b.shape:
        raise ValueError(
            f"{caller}: expected before and after of one shape, got {tuple(a.shape)} "
            f"and {tuple(b.shape)}"
        )
    check_int(caller, "dim", dim)
    if not -a.ndim <= dim < a.ndim:
        raise ValueError(
            f"{caller}: expected dim from {-a.ndim} to {a.ndim - 1}, a dimension of "
            f"hidden states of shape {tuple(a.shape)}, got {dim}"
        )
    a = a.cpu().double()
    b = b.cpu().double()
    sizes = a.norm(dim=dim) * b.norm(dim=dim)
    both_zero = (a == 0).all(dim) & (b == 0).all(dim)
    made = (a * b).sum(dim) / torch.where(sizes == 0, 1, sizes)
    return torch.where(both_zero, 1.0, made)
