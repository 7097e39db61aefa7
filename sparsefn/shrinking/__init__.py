"""Physically smaller modules: groups of units that a model's code ties together, and models without pruned units."""

from sparsefn.shrinking.carry import carry, carry_optimizer
from sparsefn.shrinking.groups import Group, Groups, Member, groups
from sparsefn.shrinking.priced import Weights, weights
from sparsefn.shrinking.smaller import Kept, Smaller, shrink, smaller

__all__ = [
    "Group",
    "Groups",
    "Kept",
    "Member",
    "Smaller",
    "Weights",
    "carry",
    "carry_optimizer",
    "groups",
    "shrink",
    "smaller",
    "weights",
]
__dir__ = __all__.copy
