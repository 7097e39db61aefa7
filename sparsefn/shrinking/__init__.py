"""Physically smaller modules: groups of units that a model's code ties together, and models without what masks prune."""

from sparsefn.shrinking.groups import Group, Groups, Member, groups
from sparsefn.shrinking.smaller import Smaller, shrink, smaller

__all__ = ["Group", "Groups", "Member", "Smaller", "groups", "shrink", "smaller"]
__dir__ = __all__.copy
