"""Sums with the same bits in any order, and sums over boxes."""

from sparsefn._engine.sums.exact_sums import means, sums
from sparsefn._engine.sums.folds import slabs
from sparsefn._engine.sums.pooling import (
    Box,
    Pooling,
    Reduction,
    in_boxes,
    pool,
    whole_boxes,
)
from sparsefn._engine.sums.unit_interval import (
    smooth_norm,
    smooth_total_of_shares,
    total_of_shares,
)
