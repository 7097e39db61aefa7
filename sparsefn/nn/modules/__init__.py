"""The edge to `torch.nn`: a module is read, and never written."""

from sparsefn.nn.modules.averages import mask_average
from sparsefn.nn.modules.calls import as_call, call, call_with_buffers
from sparsefn.nn.modules.first_weights import scaled_init
from sparsefn.nn.modules.gradients import value_and_grad
from sparsefn.nn.modules.originals import computed_from
from sparsefn.nn.modules.params import bake, buffers_of, params_of, to_sparse
from sparsefn.nn.modules.torch_prune import from_pruned
from sparsefn.nn.modules.weights import (
    channel_axis,
    check_pattern_axis,
    pattern_axis,
    weights_of,
)
from sparsefn.nn.modules.wrappers import inner_module

__all__ = [
    "as_call",
    "bake",
    "buffers_of",
    "call",
    "call_with_buffers",
    "channel_axis",
    "check_pattern_axis",
    "computed_from",
    "from_pruned",
    "inner_module",
    "mask_average",
    "params_of",
    "pattern_axis",
    "scaled_init",
    "to_sparse",
    "value_and_grad",
    "weights_of",
]
__dir__ = __all__.copy
