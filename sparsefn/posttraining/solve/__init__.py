"""Weights of one linear layer under a mask: SparseGPT, exact OBS, least squares, and
the inverse Fisher matrix.

A weight is (out, in), and `hessian` is (in, in): the gram of the layer's inputs, x'x
summed over tokens, or any multiple of it. The error of other weights is then sum((new -
old) @ hessian * (new - old)), the squared change of the layer's outputs. Flatten the
weight of a convolution, `weight.flatten(1)`. Everything here is a function of plain
tensors; `sf.rewrite` makes an algorithm of it, at all leaves through `layerwise`.
"""

from sparsefn.posttraining.solve.by_leaf import layerwise
from sparsefn.posttraining.solve.fisher import fisher_inverse, obs_fisher
from sparsefn.posttraining.solve.greedy import obs_exact
from sparsefn.posttraining.solve.grid import Grid, grid
from sparsefn.posttraining.solve.least_squares import refit
from sparsefn.posttraining.solve.sparsegpt import obs
from sparsefn.posttraining.solve.swaps import swaps

__all__ = [
    "Grid",
    "fisher_inverse",
    "grid",
    "layerwise",
    "obs",
    "obs_exact",
    "obs_fisher",
    "refit",
    "swaps",
]
__dir__ = __all__.copy
