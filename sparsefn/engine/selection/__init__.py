"""Exact top-k of each row, and integers by share."""

from sparsefn.engine.selection.columns import best_of_columns
from sparsefn.engine.selection.dispatch import (
    Count,
    Entry,
    dealt_winners,
    totals,
    totals_of,
    winners,
)
from sparsefn.engine.selection.shares import Counts, apportion, spread, vector
from sparsefn.engine.selection.tiling import tiles
