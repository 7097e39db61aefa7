"""Masks trees: counting, set operations, building and packing."""

from sparsefn.masks.counts import (
    difference,
    explored,
    hamming,
    intersect,
    n_kept,
    n_total,
    sparsity,
    union,
)
from sparsefn.masks.making import checkerboard, from_dict, from_zeros, shuffle
from sparsefn.masks.packing import pack, unpack

__all__ = [
    "checkerboard",
    "difference",
    "explored",
    "from_dict",
    "from_zeros",
    "hamming",
    "intersect",
    "n_kept",
    "n_total",
    "pack",
    "shuffle",
    "sparsity",
    "union",
    "unpack",
]
__dir__ = __all__.copy
