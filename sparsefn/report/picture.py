"""Masks as pictures of braille dots: eight elements a character."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsefn.core.checks import check_int

# the bit of the dot at each place of a cell, 4 rows of 2
_DOTS = ((1, 8), (2, 16), (4, 32), (64, 128))
_CUT = "▒"


def braille(
    mask: Tensor, dims: tuple[int, int] = (0, 1), max_elems: int | None = None
) -> str:
    """A picture of a mask in a box, one dot for every element that is kept.

    >>> mask = torch.zeros(5, 3, dtype=torch.bool)
    >>> mask[0, 0] = mask[4, 2] = True
    >>> print(sf.report.braille(mask))
    ╭──╮
    │⠁⠀│
    │⠀⠁│
    ╰──╯

    Args:
        mask: Bool tensor, or one of zeros and ones. A 1-D mask is one row.
        dims: The dimensions that run down and across, in any order; of other dimensions
            index 0 is shown.
        max_elems: How many rows and columns are shown, the first, with ▒ where more are
            cut off. None: all.

    Returns:
        The lines of the picture, as one string.

    Raises:
        TypeError: `mask` is no tensor, or `max_elems` is not an int.
        ValueError: The mask has other values or is 0-d, `dims` are the same or do not
            exist, or `max_elems` is below 1.
    """
    if max_elems is not None:
        check_int("", "max_elems", max_elems, 1)
    plane = _plane(mask, dims)
    rows, columns = plane.shape
    shown = plane[:max_elems, :max_elems]
    right = _CUT if max_elems is not None and columns > max_elems else ""
    cells = _cells(shown.cpu()).tolist()
    lines = ["".join(map(chr, row)) + right for row in cells]
    width = -(-shown.shape[1] // 2) + len(right)
    if max_elems is not None and rows > max_elems:
        lines.append(_CUT * width)
    return "\n".join(
        [
            "╭" + "─" * width + "╮",
            *(f"│{line}│" for line in lines),
            "╰" + "─" * width + "╯",
        ]
    )


def _plane(mask: Tensor, dims: tuple[int, int]) -> Tensor:
    # The mask as a matrix of bools.
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"braille: expected mask to be a tensor, got {type(mask).__name__}"
        )
    if mask.ndim == 0:
        raise ValueError(
            "expected a mask of one dimension or more, got a 0-d mask: nothing is "
            "sparsified"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("expected a mask of zeros and ones")
    if mask.ndim == 1:
        return (mask != 0).unsqueeze(0)
    down, across = dims
    if (
        not all(-mask.ndim <= dim < mask.ndim for dim in dims)
        or down % mask.ndim == across % mask.ndim
    ):
        raise ValueError(
            f"expected two different dims of a mask of shape {tuple(mask.shape)}, got "
            f"{tuple(dims)}"
        )
    plane = torch.movedim(mask, (down, across), (0, 1))
    return plane.unsqueeze(-1).flatten(2)[..., :1].any(-1)


def _cells(plane: Tensor) -> Tensor:
    # The characters of a plane; dots that its borders leave out are empty.
    rows, columns = plane.shape
    padded = pad(plane, (0, -columns % 2, 0, -rows % 4))
    places = padded.reshape(-(-rows // 4), 4, -(-columns // 2), 2)
    dots = torch.tensor(_DOTS, device="cpu")[:, None]
    return 0x2800 + (places * dots).sum((1, 3))
