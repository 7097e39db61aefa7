"""Runs of composed algorithms, with a part for every kind of memory."""

import optree
import torch

import sparsefn as sf

MAKE = torch.Generator().manual_seed(0)


RANDOM = {
    path: torch.randn(shape, generator=MAKE)
    for path, shape in (("a", (6, 8)), ("b", (8, 4)), ("c", (5,)))
}


def slopes(params):
    return optree.tree_map(lambda w: torch.sin(3 * w) + 0.1, params)


def run(algorithm, steps=6, params=RANDOM):
    state = algorithm.init(params)
    for step in range(steps):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
    return state


def kept(state, path="w"):
    return set(state.masks[path].flatten().nonzero().flatten().tolist())


# One for every kind of memory: keys, moving averages, latents off the mask.
PARTS = {
    "rigl": lambda: sf.rigl(0.5, when=sf.every(2), key=sf.random.key(3)),
    "set": lambda: sf.set(0.5, when=sf.every(2), key=sf.random.key(3)),
    "gmp": lambda: sf.gmp(sf.schedules.polynomial(0.0, 0.7, 0, 5)),
    "grow-ema": lambda: sf.rigl(0.5, grow=sf.scores.momentum(0.5), when=sf.every(2)),
    "ste": lambda: sf.ste(0.5),
}
