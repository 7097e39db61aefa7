"""Scores: (state, grads, step) -> a tree of floats, larger = more important.

Some have memory.
"""

from sparsefn.masks.scores.accumulators import (
    ema,
    first_sign,
    mean,
    momentum,
    steered,
    sum,
)
from sparsefn.masks.scores.combinators import by_unit, ranked, sampled
from sparsefn.masks.scores.data import reap, ria, wanda
from sparsefn.masks.scores.per_leaf import distance, lamp, leafwise, topology
from sparsefn.masks.scores.pointwise import (
    absolute,
    gradient,
    magnitude,
    movement,
    random,
    saliency,
)
from sparsefn.masks.scores.unit_values import of_units

__all__ = [
    "absolute",
    "by_unit",
    "distance",
    "ema",
    "first_sign",
    "gradient",
    "lamp",
    "leafwise",
    "magnitude",
    "mean",
    "momentum",
    "movement",
    "of_units",
    "random",
    "ranked",
    "reap",
    "ria",
    "saliency",
    "sampled",
    "steered",
    "sum",
    "topology",
    "wanda",
]
__dir__ = __all__.copy
