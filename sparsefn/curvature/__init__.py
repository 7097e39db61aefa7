"""Scores from derivatives of a loss: per-example gradients, Hessian-vector products, SynFlow."""

from sparsefn.curvature.derivatives import example_gradients as example_gradients
from sparsefn.curvature.derivatives import hessian_vector as hessian_vector
from sparsefn.curvature.scores import fisher as fisher
from sparsefn.curvature.scores import grasp as grasp
from sparsefn.curvature.scores import hessian_diagonal as hessian_diagonal
from sparsefn.curvature.scores import obd as obd
from sparsefn.curvature.scores import synflow as synflow
