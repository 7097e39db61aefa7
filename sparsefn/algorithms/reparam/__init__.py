"""Maps from latents to weights, for `reparametrised`."""

from sparsefn.algorithms.reparam.gates import (
    chance_kept,
    gumbel_gate,
    hard_concrete,
    sigmoid_gate,
)
from sparsefn.algorithms.reparam.low_rank import low_rank
from sparsefn.algorithms.reparam.mask_choices import mask_choices
from sparsefn.algorithms.reparam.nm_prox import nm_prox
from sparsefn.algorithms.reparam.selections import faded, soft_nm, soft_topk
from sparsefn.algorithms.reparam.thresholds import power, soft_threshold
from sparsefn.algorithms.reparam.weight_map import Reparametrisation

__all__ = [
    "Reparametrisation",
    "chance_kept",
    "faded",
    "gumbel_gate",
    "hard_concrete",
    "low_rank",
    "mask_choices",
    "nm_prox",
    "power",
    "sigmoid_gate",
    "soft_nm",
    "soft_threshold",
    "soft_topk",
]
__dir__ = __all__.copy
