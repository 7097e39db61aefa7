"""Random numbers that depend on a key and an index alone."""

from sparsefn._engine.draws import draws
from sparsefn._engine.draws.draws import draws_of, flips
from sparsefn._engine.draws.leaf_draws import drawn_leaves, flipped_leaves
from sparsefn._engine.draws.threefry import draw, lifted
from sparsefn._engine.draws.words import MASK32, PARITY, ROTATIONS
