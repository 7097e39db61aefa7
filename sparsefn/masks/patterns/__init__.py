"""Patterns: how elements form units, and how units form competing groups."""

from sparsefn.masks.patterns.kinds import (
    block,
    channel,
    in_groups,
    kernel,
    nearly_diagonal,
    nm,
    out_groups,
    row_balanced,
    transposable,
    unstructured,
)
from sparsefn.masks.patterns.tied_sets import tied, tied_members
from sparsefn.masks.patterns.units import Pattern

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
    "tied_members",
    "transposable",
    "unstructured",
]
__dir__ = __all__.copy
