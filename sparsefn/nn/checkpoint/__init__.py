"""States as flat dicts of tensors, for `torch.save` and safetensors."""

from sparsefn.nn.checkpoint.legacy import read_legacy
from sparsefn.nn.checkpoint.n_of_m import compress, decompress
from sparsefn.nn.checkpoint.states import load_state_dict, state_dict, tree_equal

__all__ = [
    "compress",
    "decompress",
    "load_state_dict",
    "read_legacy",
    "state_dict",
    "tree_equal",
]
__dir__ = __all__.copy
