"""Scores: (state, grads, step) -> a tree of floats, larger = more important; some with memory."""

from sparsefn.scores.changed import by_unit as by_unit
from sparsefn.scores.changed import ranked as ranked
from sparsefn.scores.changed import sampled as sampled
from sparsefn.scores.data import ria as ria
from sparsefn.scores.data import wanda as wanda
from sparsefn.scores.distances import distance as distance
from sparsefn.scores.leaves import lamp as lamp
from sparsefn.scores.leaves import leafwise as leafwise
from sparsefn.scores.memory import ema as ema
from sparsefn.scores.memory import first_sign as first_sign
from sparsefn.scores.memory import mean as mean
from sparsefn.scores.memory import momentum as momentum
from sparsefn.scores.memory import steered as steered
from sparsefn.scores.memory import sum as sum
from sparsefn.scores.plain import absolute as absolute
from sparsefn.scores.plain import gradient as gradient
from sparsefn.scores.plain import magnitude as magnitude
from sparsefn.scores.plain import movement as movement
from sparsefn.scores.plain import random as random
from sparsefn.scores.plain import saliency as saliency
from sparsefn.scores.topology import topology as topology
