"""Sparse training algorithms: one family a file, each a pure pair of `init` and `update`."""

from sparsefn.algorithms.drop_grow import drop_grow as drop_grow
from sparsefn.algorithms.drop_grow import rigl as rigl
from sparsefn.algorithms.drop_grow import set as set
from sparsefn.algorithms.drop_grow import snfs as snfs
from sparsefn.algorithms.prune import gmp as gmp
from sparsefn.algorithms.prune import iterative as iterative
from sparsefn.algorithms.prune import one_shot as one_shot
from sparsefn.algorithms.prune import ste as ste
from sparsefn.algorithms.reparametrised import reparametrised as reparametrised
from sparsefn.algorithms.reparametrised import settled as settled
from sparsefn.algorithms.rewrite import rewrite as rewrite
from sparsefn.algorithms.static import dense as dense
from sparsefn.algorithms.static import from_masks as from_masks
from sparsefn.algorithms.static import static as static
from sparsefn.algorithms.supermask import rescore as rescore
from sparsefn.algorithms.supermask import supermask as supermask
from sparsefn.reparam import Reparametrisation as Reparametrisation
