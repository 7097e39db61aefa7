"""Kernels in Triton for tensors on a GPU, with the definitions' bits: winners, draws, steps. Off unless asked for."""

from sparsefn.engine.kernels import step as step
from sparsefn.engine.kernels.draw import coins as coins
from sparsefn.engine.kernels.draw import draws as draws
from sparsefn.engine.kernels.draw import draws_of_leaves as draws_of_leaves
from sparsefn.engine.kernels.select import winners as winners
from sparsefn.engine.kernels.serving import has_own_way as has_own_way
from sparsefn.engine.kernels.serving import serves as serves
