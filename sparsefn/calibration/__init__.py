"""Statistics of the inputs of a module's weights, over calibration data, for scores and solvers that prune with data.

`inputs` runs the module on a batch, and sees the inputs of every product with a weight. Its sums are trees of tensors
by path: those of several batches are added leaf by leaf, `optree.tree_map(torch.add, a, b)`. `in_order` prunes block
after block, where the inputs of a block come from the pruned blocks before it.
"""

from sparsefn.calibration.blocks import in_order, outlier_ratios
from sparsefn.calibration.experts import experts
from sparsefn.calibration.inputs import inputs
from sparsefn.engine.numbers import as_matrix

__all__ = ["as_matrix", "experts", "in_order", "inputs", "outlier_ratios"]
__dir__ = __all__.copy
