"""Arithmetic with the same bits for floats and tensors, eager and compiled."""

from sparsefn._engine.numbers import elementary
from sparsefn._engine.numbers.elementary import raised, real_power, root, sqrt
from sparsefn._engine.numbers.floats import FLOATS, check_float
from sparsefn._engine.numbers.matrices import as_matrix
from sparsefn._engine.numbers.numbers import (
    Real,
    batch_first,
    between,
    divide,
    flags_of,
    floor,
    folded,
    held,
    like,
    real_where,
    whole_power,
)
from sparsefn._engine.numbers.ranks import back, falling, ranks_within, running_sums
