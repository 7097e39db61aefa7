"""The edge to `torch.nn`: a module is read, and never written."""

from sparsefn.modules.calls import call as call
from sparsefn.modules.calls import call_with_buffers as call_with_buffers
from sparsefn.modules.gradients import value_and_grad as value_and_grad
from sparsefn.modules.params import bake as bake
from sparsefn.modules.params import buffers_of as buffers_of
from sparsefn.modules.params import params_of as params_of
from sparsefn.modules.params import to_sparse as to_sparse
from sparsefn.modules.pattern_axis import channel_axis as channel_axis
from sparsefn.modules.pattern_axis import check_pattern_axis as check_pattern_axis
from sparsefn.modules.pattern_axis import pattern_axis as pattern_axis
from sparsefn.modules.pruned import from_pruned as from_pruned
from sparsefn.modules.scaled import scaled_init as scaled_init
from sparsefn.modules.weights import weights_of as weights_of
