"""The edge to `torch.distributed`: loops, checkpoints and checks for DTensors."""

from sparsefn.nn.distributed.by_rows import by_rows
from sparsefn.nn.distributed.ends import leave
from sparsefn.nn.distributed.files import load, save
from sparsefn.nn.distributed.replicas import check_replicas
from sparsefn.nn.distributed.weights import commit, grads_of

__all__ = ["by_rows", "check_replicas", "commit", "grads_of", "leave", "load", "save"]
__dir__ = __all__.copy
