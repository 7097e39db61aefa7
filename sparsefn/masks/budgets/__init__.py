"""Distributions: (shapes, sparsity) -> how many units each leaf keeps."""

from sparsefn.masks.budgets.distributions import Distribution as Distribution
from sparsefn.masks.budgets.distributions import (
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
from sparsefn.masks.budgets.filling import UnitCosts
from sparsefn.masks.budgets.multiples import in_multiples
from sparsefn.masks.budgets.within import Within as Within
from sparsefn.masks.budgets.within import within

__all__ = [
    "UnitCosts",
    "apportion",
    "at_least",
    "by_path",
    "compensated",
    "erdos_renyi",
    "erk",
    "global_",
    "in_multiples",
    "n_kept",
    "owl",
    "rounded",
    "rounded_down",
    "rounded_up",
    "uniform",
    "within",
]
__dir__ = __all__.copy
