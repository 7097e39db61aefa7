"""Algorithms made of other algorithms, or of an algorithm and an optimizer."""

from sparsefn.compose.chain import chain as chain
from sparsefn.compose.donated import donated as donated
from sparsefn.compose.nonstrict import nonstrict as nonstrict
from sparsefn.compose.partition import partition as partition
from sparsefn.compose.phases import phases as phases
from sparsefn.compose.rewinding import rewinding as rewinding
from sparsefn.compose.sequence import sequence as sequence
from sparsefn.compose.with_optimizer import with_dense_gradients as with_dense_gradients
from sparsefn.compose.with_optimizer import with_optimizer as with_optimizer
from sparsefn.compose.with_terms import with_terms as with_terms
