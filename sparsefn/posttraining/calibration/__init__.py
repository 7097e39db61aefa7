"""Statistics of the inputs of a module's weights, over calibration data, for scores and
solvers that prune with data.

`inputs` runs the module on a batch, and sees the inputs of every product with a weight.
Its sums are trees of tensors by path: the sums of several batches are added leaf by
leaf, `optree.tree_map(torch.add, a, b)`. `in_order` prunes block after block, where the
inputs of a block come from the pruned blocks before it. `stream` does so from folder to
folder, where `drop_layers` leaves out whole layers.
"""

from sparsefn._engine.numbers import as_matrix
from sparsefn.posttraining.calibration.blocks import PrunedBlock
from sparsefn.posttraining.calibration.directions import angle_of, influence_of
from sparsefn.posttraining.calibration.experts import experts
from sparsefn.posttraining.calibration.folders import (
    LayerScores,
    drop_layers,
    layer_scores,
    stream,
)
from sparsefn.posttraining.calibration.in_order import (
    by_block,
    in_order,
    outlier_ratios,
)
from sparsefn.posttraining.calibration.inputs import inputs
from sparsefn.posttraining.calibration.sums import fill_unreached

__all__ = [
    "LayerScores",
    "PrunedBlock",
    "angle_of",
    "as_matrix",
    "by_block",
    "drop_layers",
    "experts",
    "fill_unreached",
    "in_order",
    "influence_of",
    "inputs",
    "layer_scores",
    "outlier_ratios",
    "stream",
]
__dir__ = __all__.copy
