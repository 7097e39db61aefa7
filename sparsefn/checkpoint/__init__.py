"""States as flat dicts of tensors, for `torch.save` and safetensors."""

from sparsefn.checkpoint.compressed import compress as compress
from sparsefn.checkpoint.compressed import decompress as decompress
from sparsefn.checkpoint.states import load_state_dict as load_state_dict
from sparsefn.checkpoint.states import state_dict as state_dict
from sparsefn.checkpoint.states import tree_equal as tree_equal
