"""The edge to `torch.distributed`: loops, checkpoints and checks for DTensors."""

from sparsefn.distributed.ends import leave
from sparsefn.distributed.files import load, save
from sparsefn.distributed.replicas import check_replicas
from sparsefn.distributed.rows import by_rows
from sparsefn.distributed.weights import commit, grads_of

__all__ = ["by_rows", "check_replicas", "commit", "grads_of", "leave", "load", "save"]
__dir__ = __all__.copy
