"""Algorithms made of other algorithms, or of an algorithm and an optimizer."""

from sparsefn.algorithms.combine.captured import captured
from sparsefn.algorithms.combine.chain import chain
from sparsefn.algorithms.combine.donated import donated
from sparsefn.algorithms.combine.partition import partition
from sparsefn.algorithms.combine.phases import phases
from sparsefn.algorithms.combine.rewinding import rewinding
from sparsefn.algorithms.combine.sequence import sequence
from sparsefn.algorithms.combine.with_optimizer import (
    with_dense_gradients,
    with_optimizer,
)
from sparsefn.algorithms.combine.with_terms import with_terms

__all__ = [
    "captured",
    "chain",
    "donated",
    "partition",
    "phases",
    "rewinding",
    "sequence",
    "with_dense_gradients",
    "with_optimizer",
    "with_terms",
]
__dir__ = __all__.copy
