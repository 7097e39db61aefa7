"""Recover accuracy by distillation: losses of a pruned student and its dense teacher,
and blocks that learn to answer as before.

The losses are functions of tensors that return a 0-d tensor, so they are added and
weighted as numbers are: `kl(...) + 0.1 * mean_square(...)`. Gradients flow to both
sides: compute the teacher's under `torch.no_grad()`. `outputs` gives what layers inside
of a model return, `over_layers` compares them, and `blockwise` is what
`sf.calibration.in_order` takes to train each block.
"""

from sparsefn.posttraining.recovery.blocks import blockwise
from sparsefn.posttraining.recovery.layers import layer_map, over_layers
from sparsefn.posttraining.recovery.losses import (
    cosine_distance,
    kl,
    mean_square,
    relations,
)
from sparsefn.posttraining.recovery.outputs import outputs

__all__ = [
    "blockwise",
    "cosine_distance",
    "kl",
    "layer_map",
    "mean_square",
    "outputs",
    "over_layers",
    "relations",
]
__dir__ = __all__.copy
