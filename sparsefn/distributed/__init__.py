"""The edge to `torch.distributed`: loops, checkpoints and checks for sharded and replicated states."""

from sparsefn.distributed.ends import leave as leave
from sparsefn.distributed.files import load as load
from sparsefn.distributed.files import save as save
from sparsefn.distributed.replicas import check_replicas as check_replicas
from sparsefn.distributed.weights import commit as commit
from sparsefn.distributed.weights import grads_of as grads_of
