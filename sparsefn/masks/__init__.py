"""Masks trees: counting, set operations, building and packing."""

from sparsefn.masks.counts import difference as difference
from sparsefn.masks.counts import explored as explored
from sparsefn.masks.counts import hamming as hamming
from sparsefn.masks.counts import intersect as intersect
from sparsefn.masks.counts import n_kept as n_kept
from sparsefn.masks.counts import n_total as n_total
from sparsefn.masks.counts import sparsity as sparsity
from sparsefn.masks.counts import union as union
from sparsefn.masks.making import checkerboard as checkerboard
from sparsefn.masks.making import from_dict as from_dict
from sparsefn.masks.making import from_zeros as from_zeros
from sparsefn.masks.making import shuffle as shuffle
from sparsefn.masks.packing import pack as pack
from sparsefn.masks.packing import unpack as unpack
