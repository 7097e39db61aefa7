"""Exact top-k of each row, and integers by share."""

from sparsefn._engine.selection.columns import best_of_columns
from sparsefn._engine.selection.dispatch import (
    dealt_winners,
    totals,
    totals_of,
    winners,
)
from sparsefn._engine.selection.entries import Count, Counts, Entry, counts_of_rows
from sparsefn._engine.selection.fixed_counts import grouped
from sparsefn._engine.selection.shares import CountsByName, apportion, spread, vector
from sparsefn._engine.selection.tiling import tiles
