"""Patterns: how elements form units, and how units form competing groups."""

from sparsefn.patterns.bands import nearly_diagonal
from sparsefn.patterns.kinds import (
    Pattern,
    block,
    channel,
    in_groups,
    kernel,
    nm,
    out_groups,
    row_balanced,
    unstructured,
)
from sparsefn.patterns.tied import tied
from sparsefn.patterns.tiled import transposable

__all__ = [
    "Pattern",
    "block",
    "channel",
    "in_groups",
    "kernel",
    "nearly_diagonal",
    "nm",
    "out_groups",
    "row_balanced",
    "tied",
    "transposable",
    "unstructured",
]
__dir__ = __all__.copy
