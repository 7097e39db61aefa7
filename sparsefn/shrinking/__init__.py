"""Physically smaller modules: channels that hold a constant are removed, and the constant is folded into biases."""

from sparsefn.shrinking.smaller import prune_biases as prune_biases
from sparsefn.shrinking.smaller import shrink as shrink
