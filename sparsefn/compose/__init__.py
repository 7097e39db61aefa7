"""Algorithms made of other algorithms, or of an algorithm and an optimizer."""

from sparsefn.compose.captured import captured
from sparsefn.compose.chain import chain
from sparsefn.compose.donated import donated
from sparsefn.compose.partition import partition
from sparsefn.compose.phases import phases
from sparsefn.compose.rewinding import rewinding
from sparsefn.compose.sequence import sequence
from sparsefn.compose.with_optimizer import with_dense_gradients, with_optimizer
from sparsefn.compose.with_terms import with_terms

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
