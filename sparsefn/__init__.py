"""Sparse training and pruning as pure functions, on torch.func."""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING

from sparsefn import (
    budgets,
    checkpoint,
    masks,
    modules,
    optimizers,
    patterns,
    random,
    reparam,
    scores,
    solve,
    tree,
)

# Algorithms: init(params) -> state, update(state, grads, step) -> state
from sparsefn.algorithms.drop_grow import drop_grow, rigl, snfs
from sparsefn.algorithms.drop_grow import set as set
from sparsefn.algorithms.prune import gmp, iterative, one_shot, ste
from sparsefn.algorithms.reparametrised import reparametrised, settled
from sparsefn.algorithms.rewrite import rewrite
from sparsefn.algorithms.static import dense, from_masks, static
from sparsefn.algorithms.supermask import rescore, supermask

# In a loop of torch.nn and torch.optim
from sparsefn.attached import attach
from sparsefn.budgets import counts, redistribute

# Composition
from sparsefn.compose.chain import chain
from sparsefn.compose.donated import donated
from sparsefn.compose.partition import partition
from sparsefn.compose.phases import phases
from sparsefn.compose.rewinding import rewinding
from sparsefn.compose.sequence import sequence
from sparsefn.compose.with_optimizer import with_dense_gradients, with_optimizer
from sparsefn.compose.with_terms import with_terms

# Primitives
from sparsefn.masks import permutation
from sparsefn.masks.gates import gate, sparsify
from sparsefn.masks.products import linear_pair
from sparsefn.masks.select import (
    bernoulli_mask,
    drop_lowest,
    grow_highest,
    straight_through,
    threshold_mask,
    topk_mask,
    topk_masks,
)

# Around the step
from sparsefn.optimizers import terms
from sparsefn.optimizers.averages import ema
from sparsefn.optimizers.clipping import clip_norm

# Units that lie in several leaves
from sparsefn.patterns.tied import tied

# Vocabulary
from sparsefn.state import (
    Accumulated,
    Algorithm,
    State,
    TrainView,
    apply_masks,
    effective,
    with_params,
)
from sparsefn.state import masked_view as masked_view
from sparsefn.timing import schedules, triggers
from sparsefn.timing.triggers import always, at, every, never
from sparsefn.tree.chosen import default_where

__version__ = "0.2.0"

# The names of `from sparsefn import *`: all but `set`, which would hide the builtin,
# and `testing`.
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
    "integrations",
    "iterative",
    "linear_pair",
    "masks",
    "methods",
    "modules",
    "never",
    "one_shot",
    "optimizers",
    "partition",
    "patterns",
    "permutation",
    "phases",
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
    "shrinking",
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
    from sparsefn import (
        calibration,
        config,
        curvature,
        distributed,
        ensemble,
        integrations,
        methods,
        report,
        shrinking,
    )
    from sparsefn.config import from_config, shorthand
    from sparsefn.config.shorthand import from_shorthand, to_shorthand
    from sparsefn.masks import activations
    from sparsefn.shrinking import shrink

# Loaded on first use: these modules take as long to load as the ones for training, and
# `sf.testing` needs Hypothesis, which users who only train do not have.
_LATER = {
    "activations": "masks.activations",
    "calibration": "calibration",
    "config": "config",
    "curvature": "curvature",
    "distributed": "distributed",
    "ensemble": "ensemble",
    "from_config": "config",
    "from_shorthand": "config.shorthand",
    "integrations": "integrations",
    "methods": "methods",
    "report": "report",
    "shorthand": "config.shorthand",
    "shrink": "shrinking",
    "shrinking": "shrinking",
    "testing": "testing",
    "to_shorthand": "config.shorthand",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'sparsefn' has no attribute {name!r}")
    module = _import_module(f"sparsefn.{_LATER[name]}")
    value = module if name == _LATER[name].split(".")[-1] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Modules that cannot be loaded are not listed, so that help and inspect work
    # without Hypothesis.
    return sorted(
        {
            *__all__,
            "__version__",
            "set",
            *(["testing"] if _find_spec("hypothesis") else []),
        }
    )
