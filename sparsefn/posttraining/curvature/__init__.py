"""Scores from derivatives of a loss: sensitivity, Fisher, Hessian, GraSP, SynFlow.

Each function takes a loss and data, and returns a score like the scores in `sf.scores`.
The loss is the training loop's, `loss(params, *batch) -> 0-d`; `batch` is the tuple of
its arguments after params, or a function of the step that returns one. Derivatives are
taken at the effective weights with respect to the sparsified leaves only, as in the
papers. A leaf with a 0-d mask (a bias, a norm) is a constant and scores 0. The `grads`
of the update are not used.
"""

from sparsefn.posttraining.curvature.derivatives import (
    example_gradients,
    hessian_vector,
)
from sparsefn.posttraining.curvature.flow import grasp, sensitivity, synflow
from sparsefn.posttraining.curvature.second_order import fisher, hessian_diagonal, obd

__all__ = [
    "example_gradients",
    "fisher",
    "grasp",
    "hessian_diagonal",
    "hessian_vector",
    "obd",
    "sensitivity",
    "synflow",
]
__dir__ = __all__.copy
