"""A weight as the matrix of outputs by inputs that its statistics belong to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor


def as_matrix(
    weight: Tensor, stats: Mapping[str, Tensor]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A weight as a matrix of (outputs, inputs), and a function to restore its shape.

    >>> stats = sf.calibration.inputs(
    ...     torch.nn.Conv2d(2, 5, 3), None, torch.ones(1, 2, 4, 4)
    ... )["weight"]
    >>> matrix, restore = sf.calibration.as_matrix(torch.ones(5, 2, 3, 3), stats)
    >>> matrix.shape, stats["gram"].shape, restore(matrix).shape
    (torch.Size([5, 18]), torch.Size([18, 18]), torch.Size([5, 2, 3, 3]))

    Args:
        weight: A leaf, of two dimensions or more.
        stats: The statistics of this leaf from `sf.calibration.inputs`.

    Returns:
        The matrix, with columns in the order of "square" and "gram", and the function.
        Where parts of the outputs read other inputs, as in a convolution with groups,
        the matrix is (groups, outputs of one, inputs).

    Raises:
        ValueError: The statistics do not fit the weight, or lack "count" or "square".
    """
    missing = {"count", "square"} - {*stats}
    if missing:
        raise ValueError(
            f"expected {min(missing)!r} in the statistics, got {', '.join(stats)}: "
            "make them with sf.calibration.inputs"
        )
    count = stats["count"]
    square = stats["square"]
    shape = tuple(weight.shape)
    # (inputs, 1): the weight is stored as (inputs, outputs)
    transposed = square.ndim == count.ndim + 2
    if square.ndim > count.ndim:
        width = square.shape[count.ndim]
    else:
        width = 0
    fits = (
        weight.ndim >= 2
        and count.ndim <= 1
        and square.shape[: count.ndim] == count.shape
    )
    turned = weight.mT if transposed and fits else weight
    wide = fits and width in (turned.shape[-1], math.prod(turned.shape[1:]))
    if not wide or (width and weight.numel() // width % math.prod(count.shape)):
        got = f"got statistics of {width} inputs" + (
            f" in {len(count)} groups" if count.ndim == 1 else ""
        )
        raise ValueError(f"expected the statistics of a weight of shape {shape}, {got}")
    outputs = math.prod(turned.shape) // max(width, 1) // math.prod(count.shape)

    def restore(matrix: Tensor) -> Tensor:
        whole = matrix.reshape(turned.shape)
        return whole.mT if transposed else whole

    return turned.reshape(*count.shape, outputs, width), restore
