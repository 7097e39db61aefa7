"""What models cost, counted in other ways than by labels: from tensors, and by torch's
counter of FLOPs.
"""

import random

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sparsefn as sf  # noqa: F401  (before its parts)
from sparsefn.shrinking.groups import Groups


def flops_of(model, example):
    """What torch counts; with attention as the products that it is made of."""
    args, kwargs = (
        example if isinstance(example, tuple) else (),
        example if isinstance(example, dict) else {},
    )
    for x in model.parameters():
        x.requires_grad_(True)
    with (
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(*args, **kwargs)
    return counter.get_total_flops()


def params_of_cut(cut):
    """The entries of the parameters that are left, from the tensors."""
    named = {id(x): (name, x) for name, x in cut.analysis.graph.named_parameters()}
    return sum(cut.take(name, x).numel() for name, x in named.values())


def some_units(groups: Groups, seed: int, only=None):
    """Units that go, of each of some groups a number of its own, never all."""
    drawn = random.Random(seed)
    chosen = range(len(groups)) if only is None else only
    return {
        i: drawn.sample(range(groups[i].size), drawn.randint(0, groups[i].size - 1))
        for i in chosen
    }
