"""Published methods by name: short compositions of the library's parts, with the
defaults of their papers.
"""

from sparsefn.algorithms import gmp, rigl, set, snfs
from sparsefn.methods.after_training import obd, obs, ria, sparsegpt, wanda, woodfisher
from sparsefn.methods.at_start import force, grasp, snip, synflow
from sparsefn.methods.dynamic import granet, mest, top_kast
from sparsefn.methods.fan_in import srigl
from sparsefn.methods.gradual import ac_dc, imp
from sparsefn.methods.learned_masks import (
    continuous_sparsification,
    edge_popup,
    hard_concrete,
    leap,
    movement,
    powerprop,
    soft_movement,
    str_,
)
from sparsefn.methods.n_of_m import asp, maskllm, maskpro, prox_sparse, sr_ste
from sparsefn.methods.rewiring import chts, deep_rewiring, dsr
from sparsefn.methods.structured import fpgm, proximal, slimming, taylor

__all__ = [
    "ac_dc",
    "asp",
    "chts",
    "continuous_sparsification",
    "deep_rewiring",
    "dsr",
    "edge_popup",
    "force",
    "fpgm",
    "gmp",
    "granet",
    "grasp",
    "hard_concrete",
    "imp",
    "leap",
    "maskllm",
    "maskpro",
    "mest",
    "movement",
    "obd",
    "obs",
    "powerprop",
    "prox_sparse",
    "proximal",
    "ria",
    "rigl",
    "set",
    "slimming",
    "snfs",
    "snip",
    "soft_movement",
    "sparsegpt",
    "sr_ste",
    "srigl",
    "str_",
    "synflow",
    "taylor",
    "top_kast",
    "wanda",
    "woodfisher",
]
__dir__ = __all__.copy
