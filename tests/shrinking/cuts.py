"""Random cuts of a model: its smaller program, and the masked model whose outputs that
has to give.
"""

import copy

import numpy as np
import torch

from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.plan import PruningPlan, free
from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.trace import traced
from sparsefn.shrinking.values import values_in


def random_cut(graph, share=0.5, seed=0, counted=True):
    """A share of the channels goes, but not all indices of a dimension."""
    analysis = analyse(graph, counted=counted)
    channels, own = analysis.log.channels, np.zeros(analysis.log.channels.count, bool)
    for name, _ in graph.named_parameters():
        for label in analysis.leaves[name].labels if name in analysis.leaves else ():
            if label is not None:
                own[channels.resolve(label)] = True
    drawn = np.random.default_rng(seed).random(channels.count) < share
    cut = PruningPlan(analysis, ~(drawn & own & ~free(analysis).alive))
    for value in values_in([analysis.leaves, list(analysis.values.values())]):
        for label in value.labels:
            if label is not None and len(label) and not cut.kept(label).any():
                cut.alive[channels.resolve(label[-1:])] = True
    return cut


def masked(model, cut):
    """A copy of the model in which what goes is 0."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in made.named_parameters():
            value = cut.analysis.leaves[name]
            for d, label in enumerate(value.labels):
                kept = torch.from_numpy(cut.kept(label, value.shape[d])).to(p)
                p.mul_(kept.reshape([-1 if e == d else 1 for e in range(p.ndim)]))
    return made


def both(model, example, share=0.5, seed=0, counted=True, train=False):
    """The masked model, and the smaller program."""
    cut = random_cut(traced(model, example, train=train), share, seed, counted)
    return masked(model, cut), program(cut)


def size(model):
    return sum(p.numel() for p in model.parameters())
