"""Numbers that quantised weights may have, which `obs` rounds to while it prunes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.transforms import read_number
from sparsefn.core.checks import check_int
from sparsefn.core.tree import wide
from sparsefn.posttraining.solve.arguments import check_floating


class Grid(NamedTuple):
    """The numbers scale * (q - zero) with integers q from `low` to `high`.

    >>> grid = sf.solve.Grid(torch.tensor([[0.5]]), torch.tensor([[0.0]]), -2, 1)
    >>> grid.round(torch.tensor([[0.6, 0.8, -3.0, 0.0]]))
    tensor([[ 0.5000,  0.5000, -1.0000,  0.0000]])

    Attributes:
        scale: Positive tensor (out, groups): each of `groups` runs of columns has one
            number a row.
        zero: Integers as floats (out, groups): the q of the number 0, which every grid
            has.
        low: The least q.
        high: The largest q.
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def round(self, weight: Tensor) -> Tensor:
        """The nearest number of the grid for each weight, half to even.

        Args:
            weight: Floating-point tensor (out, in); `groups` divides its columns.

        Returns:
            Tensor like `weight`, computed in float32 at least.

        Raises:
            TypeError: `weight` is no floating-point tensor.
            ValueError: `weight` has other rows, or `groups` does not divide its
                columns.
        """
        check_floating("Grid.round", "weight", weight)
        rows, groups = self.scale.shape
        if weight.ndim != 2 or len(weight) != rows or weight.shape[1] % max(groups, 1):
            shape = f"({rows}, in)"
            if groups > 1:
                shape = f"{shape}, where {groups} groups divide the columns"
            raise ValueError(
                f"Grid.round: expected a weight of shape {shape}, got "
                f"{tuple(weight.shape)}: make a grid of this weight with sf.solve.grid"
            )
        each = weight.shape[1] // max(groups, 1)
        scale = self.scale.repeat_interleave(each, 1)
        zero = self.zero.repeat_interleave(each, 1)
        wide_weight = wide(weight)
        return nearest(wide_weight, scale, zero, self.low, self.high).to(weight.dtype)


def nearest(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """`Grid.round` where scales and zeros have the shape of the weights.

    >>> nearest(torch.tensor([0.6]), torch.tensor([0.5]), torch.tensor([0.0]), -2, 1)
    tensor([0.5000])
    """
    q = (torch.round(x / scale) + zero).clamp(low, high)
    return (q - zero) * scale


def grid(
    weight: Tensor, bits: int, *, group: int | None = None, symmetric: bool = True
) -> Grid:
    """The grid of integers of some bits that spans the weights of each row.

    >>> weight = torch.tensor([[7.0, -3.4, 0.6, 0.0]])
    >>> sf.solve.grid(weight, 4).round(weight)
    tensor([[ 7., -3.,  1.,  0.]])

    Args:
        weight: Floating-point tensor (out, in).
        bits: Bits of an integer, at least 2: 4 for int4, 8 for int8.
        group: Consecutive columns that share a scale. None: all columns of a row.
        symmetric: Whether 0 is the integer 0 and the scale spans the largest magnitude.
            Otherwise integers begin at 0, and the scale spans the least number to the
            largest.

    Returns:
        `Grid` of float32 at least. Groups of zeros have the scale 1.

    Raises:
        TypeError: `weight` is no floating-point tensor, or `bits` or `group` no int.
        ValueError: `weight` is not two-dimensional, has no columns or is not finite,
            `bits` is below 2, or `group` does not divide the columns.
    """
    check_floating("grid", "weight", weight)
    check_int("grid", "bits", bits, 2)
    if weight.ndim != 2 or not weight.shape[1]:
        raise ValueError(
            f"grid: expected a weight of shape (out, in), got {tuple(weight.shape)}"
        )
    rows, columns = weight.shape
    each = columns if group is None else group
    if group is not None:
        check_int("grid", "group", group, 1)
        if columns % group:
            raise ValueError(
                f"grid: expected a group that divides {columns} columns, got {group}"
            )
    is_finite = weight.detach().isfinite()
    if read_number(is_finite.all()) is False:
        row = int((~is_finite).any(1).nonzero()[0])
        raise ValueError(
            f"grid: expected a finite weight, got NaN or infinite entries in row {row}"
        )
    x = wide(weight.detach()).reshape(rows, columns // each, each)
    if symmetric:
        low = -(2 ** (bits - 1))
        high = -low - 1
        scale = x.abs().amax(-1) / high
        scale = torch.where(scale > 0, scale, 1.0)
        return Grid(scale, torch.zeros_like(scale), low, high)
    least = x.amin(-1).clamp(max=0.0)
    high = 2**bits - 1
    scale = (x.amax(-1).clamp(min=0.0) - least) / high
    scale = torch.where(scale > 0, scale, 1.0)
    return Grid(scale, torch.round(-least / scale), 0, high)
