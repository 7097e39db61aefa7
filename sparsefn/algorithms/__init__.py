"""Sparse training algorithms: one family a file, each a pure `init` and `update`."""

from sparsefn.algorithms.drop_grow import drop_grow, rigl, set, snfs
from sparsefn.algorithms.policy_masks import policy_masks
from sparsefn.algorithms.prune import gmp, iterative, one_shot, ste
from sparsefn.algorithms.reparam import Reparametrisation
from sparsefn.algorithms.reparametrised import reparametrised, settled
from sparsefn.algorithms.rewrite import rewrite
from sparsefn.algorithms.static import dense, from_masks, static
from sparsefn.algorithms.supermask import rescore, supermask

__all__ = [
    "Reparametrisation",
    "dense",
    "drop_grow",
    "from_masks",
    "gmp",
    "iterative",
    "one_shot",
    "policy_masks",
    "reparametrised",
    "rescore",
    "rewrite",
    "rigl",
    "set",
    "settled",
    "snfs",
    "static",
    "ste",
    "supermask",
]
__dir__ = __all__.copy
