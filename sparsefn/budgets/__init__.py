"""Distributions: (shapes, sparsity) -> how many units each leaf keeps."""

from sparsefn.budgets.distributions import Distribution as Distribution
from sparsefn.budgets.distributions import (
    apportion,
    at_least,
    by_path,
    compensated,
    erdos_renyi,
    erk,
    global_,
    n_kept,
    owl,
    rounded,
    rounded_down,
    rounded_up,
    uniform,
)
from sparsefn.budgets.within import Within as Within
from sparsefn.budgets.within import within

__all__ = [
    "apportion",
    "at_least",
    "by_path",
    "compensated",
    "erdos_renyi",
    "erk",
    "global_",
    "n_kept",
    "owl",
    "rounded",
    "rounded_down",
    "rounded_up",
    "uniform",
    "within",
]
__dir__ = __all__.copy
