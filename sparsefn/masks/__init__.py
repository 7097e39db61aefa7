"""Masks: selection of the best, gates, and trees of them: counts, sets, packing."""

from sparsefn.masks.apply import gate, sparsify
from sparsefn.masks.constructors import checkerboard, from_dict, from_zeros, shuffle
from sparsefn.masks.packing import pack, unpack
from sparsefn.masks.select import (
    bernoulli_mask,
    drop_lowest,
    grow_highest,
    straight_through,
    threshold_mask,
    topk_mask,
    topk_masks,
)
from sparsefn.masks.sets import (
    difference,
    explored,
    hamming,
    intersect,
    n_kept,
    n_total,
    sparsity,
    union,
)
from sparsefn.masks.two_weights import linear_pair

__all__ = [
    "bernoulli_mask",
    "checkerboard",
    "difference",
    "drop_lowest",
    "explored",
    "from_dict",
    "from_zeros",
    "gate",
    "grow_highest",
    "hamming",
    "intersect",
    "linear_pair",
    "n_kept",
    "n_total",
    "pack",
    "shuffle",
    "sparsify",
    "sparsity",
    "straight_through",
    "threshold_mask",
    "topk_mask",
    "topk_masks",
    "union",
    "unpack",
]
__dir__ = __all__.copy
