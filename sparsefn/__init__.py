"""Sparse training and pruning as pure functions, on torch.func."""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING

from sparsefn import budgets as budgets
from sparsefn import checkpoint as checkpoint
from sparsefn import counts as counts
from sparsefn import masks as masks
from sparsefn import modules as modules
from sparsefn import optimizers as optimizers
from sparsefn import patterns as patterns
from sparsefn import permutation as permutation
from sparsefn import random as random
from sparsefn import redistribute as redistribute
from sparsefn import reparam as reparam
from sparsefn import schedules as schedules
from sparsefn import scores as scores
from sparsefn import solve as solve
from sparsefn import terms as terms
from sparsefn import tree as tree
from sparsefn import triggers as triggers

# Algorithms: init(params) -> state, update(state, grads, step) -> state
from sparsefn.algorithms import dense as dense
from sparsefn.algorithms import drop_grow as drop_grow
from sparsefn.algorithms import from_masks as from_masks
from sparsefn.algorithms import gmp as gmp
from sparsefn.algorithms import iterative as iterative
from sparsefn.algorithms import one_shot as one_shot
from sparsefn.algorithms import reparametrised as reparametrised
from sparsefn.algorithms import rescore as rescore
from sparsefn.algorithms import rewrite as rewrite
from sparsefn.algorithms import rigl as rigl
from sparsefn.algorithms import set as set
from sparsefn.algorithms import settled as settled
from sparsefn.algorithms import snfs as snfs
from sparsefn.algorithms import static as static
from sparsefn.algorithms import ste as ste
from sparsefn.algorithms import supermask as supermask

# In a loop of torch.nn and torch.optim
from sparsefn.attached import attach as attach

# Around the step
from sparsefn.averages import ema as ema
from sparsefn.clipping import clip_norm as clip_norm

# Composition
from sparsefn.compose import chain as chain
from sparsefn.compose import donated as donated
from sparsefn.compose import nonstrict as nonstrict
from sparsefn.compose import partition as partition
from sparsefn.compose import phases as phases
from sparsefn.compose import rewinding as rewinding
from sparsefn.compose import sequence as sequence
from sparsefn.compose import with_dense_gradients as with_dense_gradients
from sparsefn.compose import with_optimizer as with_optimizer
from sparsefn.compose import with_terms as with_terms

# Primitives
from sparsefn.gates import gate as gate
from sparsefn.gates import sparsify as sparsify

# Units that lie in several leaves
from sparsefn.patterns.tied import tied as tied
from sparsefn.products import linear_pair as linear_pair
from sparsefn.select import bernoulli_mask as bernoulli_mask
from sparsefn.select import drop_lowest as drop_lowest
from sparsefn.select import grow_highest as grow_highest
from sparsefn.select import straight_through as straight_through
from sparsefn.select import threshold_mask as threshold_mask
from sparsefn.select import topk_mask as topk_mask
from sparsefn.select import topk_masks as topk_masks

# Vocabulary
from sparsefn.state import Accumulated as Accumulated
from sparsefn.state import Algorithm as Algorithm
from sparsefn.state import State as State
from sparsefn.state import TrainView as TrainView
from sparsefn.state import apply_masks as apply_masks
from sparsefn.state import effective as effective
from sparsefn.state import masked_view as masked_view
from sparsefn.state import with_params as with_params
from sparsefn.triggers import always as always
from sparsefn.triggers import at as at
from sparsefn.triggers import every as every
from sparsefn.triggers import never as never
from sparsefn.where import default_where as default_where

__version__ = "0.1.0"

# The names of `from sparsefn import *`: all but `set`, which would hide the builtin, and `testing`.
__all__ = [
    "Accumulated",
    "Algorithm",
    "State",
    "TrainView",
    "activations",
    "always",
    "apply_masks",
    "at",
    "attach",
    "bernoulli_mask",
    "budgets",
    "calibration",
    "chain",
    "checkpoint",
    "clip_norm",
    "config",
    "counts",
    "curvature",
    "default_where",
    "dense",
    "distributed",
    "donated",
    "drop_grow",
    "drop_lowest",
    "effective",
    "ema",
    "ensemble",
    "every",
    "from_config",
    "from_masks",
    "from_shorthand",
    "gate",
    "gmp",
    "grow_highest",
    "iterative",
    "linear_pair",
    "masked_view",
    "masks",
    "methods",
    "modules",
    "never",
    "nonstrict",
    "one_shot",
    "optimizers",
    "partition",
    "patterns",
    "permutation",
    "phases",
    "prune_biases",
    "random",
    "redistribute",
    "reparam",
    "reparametrised",
    "report",
    "rescore",
    "rewinding",
    "rewrite",
    "rigl",
    "schedules",
    "scores",
    "sequence",
    "settled",
    "shorthand",
    "shrink",
    "snfs",
    "solve",
    "sparsify",
    "static",
    "ste",
    "straight_through",
    "supermask",
    "terms",
    "threshold_mask",
    "tied",
    "to_shorthand",
    "topk_mask",
    "topk_masks",
    "tree",
    "triggers",
    "with_dense_gradients",
    "with_optimizer",
    "with_params",
    "with_terms",
]

if _TYPE_CHECKING:
    from sparsefn import activations as activations
    from sparsefn import calibration as calibration
    from sparsefn import config as config
    from sparsefn import curvature as curvature
    from sparsefn import distributed as distributed
    from sparsefn import ensemble as ensemble
    from sparsefn import methods as methods
    from sparsefn import report as report
    from sparsefn import shorthand as shorthand
    from sparsefn.config import from_config as from_config
    from sparsefn.shorthand import from_shorthand as from_shorthand
    from sparsefn.shorthand import to_shorthand as to_shorthand
    from sparsefn.shrinking import prune_biases as prune_biases
    from sparsefn.shrinking import shrink as shrink

# Loaded on first use: these modules take as long to load as the ones for training, and `sf.testing` needs Hypothesis,
# which users who only train do not have.
_LATER = {
    name: name
    for name in (
        "activations",
        "calibration",
        "config",
        "curvature",
        "distributed",
        "ensemble",
        "methods",
        "report",
        "shorthand",
        "testing",
    )
} | {
    "from_config": "config",
    "from_shorthand": "shorthand",
    "to_shorthand": "shorthand",
    "prune_biases": "shrinking",
    "shrink": "shrinking",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'sparsefn' has no attribute {name!r}")
    module = _import_module(f"sparsefn.{_LATER[name]}")
    value = module if name == _LATER[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Modules that cannot be loaded are not listed, so that help and inspect work without Hypothesis.
    return sorted({*__all__, "__version__", "set", *(["testing"] if _find_spec("hypothesis") else [])})
