"""Random numbers that depend on a key and an index alone."""

from sparsefn.engine.draws import draws
from sparsefn.engine.draws.draws import draws_of, flips
from sparsefn.engine.draws.leaf_draws import drawn_leaves, flipped_leaves
from sparsefn.engine.draws.threefry import draw, lifted
from sparsefn.engine.draws.words import MASK32
