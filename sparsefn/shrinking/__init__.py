"""Physically smaller modules: channels that hold a constant are removed, and the constant is folded into biases."""

from sparsefn.shrinking.smaller import prune_biases, shrink

__all__ = ["prune_biases", "shrink"]
__dir__ = __all__.copy
