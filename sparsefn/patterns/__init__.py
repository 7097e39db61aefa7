"""Patterns: how elements form units, and how units form competing groups."""

from sparsefn.patterns.bands import nearly_diagonal as nearly_diagonal
from sparsefn.patterns.kinds import Pattern as Pattern
from sparsefn.patterns.kinds import block as block
from sparsefn.patterns.kinds import channel as channel
from sparsefn.patterns.kinds import in_groups as in_groups
from sparsefn.patterns.kinds import kernel as kernel
from sparsefn.patterns.kinds import nm as nm
from sparsefn.patterns.kinds import out_groups as out_groups
from sparsefn.patterns.kinds import row_balanced as row_balanced
from sparsefn.patterns.kinds import unstructured as unstructured
from sparsefn.patterns.tiled import transposable as transposable
