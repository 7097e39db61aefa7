"""Sums of numbers in [0, 1], such as gates and chances, and norms made of them."""

from __future__ import annotations

import torch
from torch import Tensor


def total_of_shares(x: Tensor) -> Tensor:
    """The sum of all numbers, as a 0-d float64 tensor.

    >>> total_of_shares(torch.tensor([0.25, 1.0]))
    tensor(1.2500, dtype=torch.float64)

    They are rounded to whole parts of a power of two: so the order of the sum does not
    matter.
    """
    parts = 2.0 ** min(52, 62 - x.numel().bit_length())
    whole = (x * parts).round().to(torch.int64)
    return whole.sum().double() / parts


def smooth_total_of_shares(x: Tensor) -> Tensor:
    """The same with the derivatives of a sum.

    >>> torch.func.grad(smooth_total_of_shares)(torch.tensor([0.25, 1.0]))
    tensor([1., 1.])
    """
    plain = x.sum()
    return total_of_shares(x.detach()) + (plain - plain.detach())


def smooth_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of all numbers, in float64, whose slope at zeros is 0.

    >>> smooth_norm(torch.tensor([3.0, -4.0]))
    tensor(5., dtype=torch.float64)
    """
    if not x.numel():
        return x.sum().double()
    x = x.double()
    largest = x.detach().abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    square = smooth_total_of_shares((x / largest).square())
    size = torch.sqrt(torch.where(square > 0, square, 1.0))
    return largest * torch.where(square > 0, size, 0.0)
