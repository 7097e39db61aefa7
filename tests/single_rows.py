"""States of one row of weights, for drop and grow."""

import torch

import sparsefn as sf


def row(*values):
    return {"w": torch.tensor([values], dtype=torch.float32)}


def kept(state, path="w"):
    return frozenset(state.masks[path].flatten().nonzero().flatten().tolist())


def count(state):
    return int(sf.masks.n_kept(state.masks))
