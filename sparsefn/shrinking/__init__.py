"""Physically smaller modules: groups of units that a model's code ties together, and
models without pruned units.
"""

from sparsefn.shrinking.experts import without_experts
from sparsefn.shrinking.groups import Groups, groups
from sparsefn.shrinking.plan import weights
from sparsefn.shrinking.shrink import Smaller, carry, carry_optimizer, shrink, smaller

__all__ = [
    "Groups",
    "Smaller",
    "carry",
    "carry_optimizer",
    "groups",
    "shrink",
    "smaller",
    "weights",
    "without_experts",
]
__dir__ = __all__.copy
