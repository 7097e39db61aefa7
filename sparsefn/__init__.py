"""Sparse training and pruning as pure functions, on torch.func."""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from warnings import warn as _warn

# Parts of algorithms
from sparsefn import masks
from sparsefn import optim as optimizers

# Algorithms: init(params) -> state, update(state, grads, step) -> state
from sparsefn.algorithms import reparam

# Algorithms of algorithms
from sparsefn.algorithms.combine.captured import captured
from sparsefn.algorithms.combine.chain import chain
from sparsefn.algorithms.combine.donated import donated
from sparsefn.algorithms.combine.partition import partition
from sparsefn.algorithms.combine.phases import phases
from sparsefn.algorithms.combine.rewinding import rewinding
from sparsefn.algorithms.combine.sequence import sequence
from sparsefn.algorithms.combine.with_optimizer import (
    with_dense_gradients,
    with_optimizer,
)
from sparsefn.algorithms.combine.with_terms import with_terms
from sparsefn.algorithms.drop_grow import drop_grow, rigl, snfs
from sparsefn.algorithms.drop_grow import set as set
from sparsefn.algorithms.policy_masks import policy_masks
from sparsefn.algorithms.prune import gmp, iterative, one_shot, ste
from sparsefn.algorithms.reparametrised import reparametrised, settled
from sparsefn.algorithms.rewrite import rewrite
from sparsefn.algorithms.static import dense, from_masks, static
from sparsefn.algorithms.supermask import rescore, supermask

# The vocabulary; when masks change, and in which leaves
from sparsefn.core import random, schedules, tree, triggers
from sparsefn.core.state import (
    Accumulated,
    Algorithm,
    State,
    TrainView,
    apply_masks,
    effective,
    with_params,
)
from sparsefn.core.state import masked_view as masked_view
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import always, at, every, never
from sparsefn.masks import budgets, patterns, scores
from sparsefn.masks.budgets import counts, redistribute
from sparsefn.optim import terms

if _TYPE_CHECKING:
    from sparsefn import config, methods, report, shrinking, typing
    from sparsefn.config import shorthand
    from sparsefn.masks import activations, permutation
    from sparsefn.nn import checkpoint, distributed, ensemble, integrations, modules
    from sparsefn.nn.attach import attach
    from sparsefn.posttraining import calibration, curvature, recovery, solve
    from sparsefn.shrinking import shrink

__version__ = "0.2.0"

# What is loaded on first use: a functional training loop needs none of it, and
# `sf.testing` needs Hypothesis, which users who only train do not have.
_LATER = {
    "activations": "masks.activations",
    "attach": "nn.attach",
    "calibration": "posttraining.calibration",
    "checkpoint": "nn.checkpoint",
    "config": "config",
    "curvature": "posttraining.curvature",
    "distributed": "nn.distributed",
    "ensemble": "nn.ensemble",
    "integrations": "nn.integrations",
    "methods": "methods",
    "modules": "nn.modules",
    "permutation": "masks.permutation",
    "recovery": "posttraining.recovery",
    "report": "report",
    "shorthand": "config.shorthand",
    "shrink": "shrinking",
    "shrinking": "shrinking",
    "solve": "posttraining.solve",
    "testing": "testing",
    "typing": "typing",
}

# Names of 0.2, and the packages that have them now: they go with 0.4.
_MOVED = {
    **dict.fromkeys(["bernoulli_mask", "drop_lowest", "gate", "grow_highest"], "masks"),
    **dict.fromkeys(["linear_pair", "sparsify", "straight_through"], "masks"),
    **dict.fromkeys(["threshold_mask", "topk_mask", "topk_masks"], "masks"),
    **dict.fromkeys(["from_config", "from_shorthand", "to_shorthand"], "config"),
    **dict.fromkeys(["clip_norm", "ema"], "optimizers"),
    "tied": "patterns",
}

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
    "budgets",
    "calibration",
    "captured",
    "chain",
    "checkpoint",
    "config",
    "counts",
    "curvature",
    "default_where",
    "dense",
    "distributed",
    "donated",
    "drop_grow",
    "effective",
    "ensemble",
    "every",
    "from_masks",
    "gmp",
    "integrations",
    "iterative",
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
    "policy_masks",
    "random",
    "recovery",
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
    "static",
    "ste",
    "supermask",
    "terms",
    "tree",
    "triggers",
    "typing",
    "with_dense_gradients",
    "with_optimizer",
    "with_params",
    "with_terms",
]


def __getattr__(name: str) -> object:
    if name in _MOVED:
        place = _MOVED[name]
        text = f"sf.{name} has moved: write sf.{place}.{name}"
        _warn(text, DeprecationWarning, stacklevel=2)
        package = globals().get(place) or __getattr__(place)
        return getattr(package, name)
    if name not in _LATER:
        raise AttributeError(f"module 'sparsefn' has no attribute {name!r}")
    module = _import_module(f"sparsefn.{_LATER[name]}")
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Modules that cannot be loaded are not listed, so that help and inspect work
    # without Hypothesis.
    testing = ["testing"] if _find_spec("hypothesis") else []
    return sorted({*__all__, *testing, "__version__", "set"})
