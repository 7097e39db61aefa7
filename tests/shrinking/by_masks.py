"""Masks that no groups made: of single parameters, slices and entries, so that units
are constant, or read by none.
"""

import torch

from sparsefn.shrinking import plan
from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.trace import traced
from tests.shrinking import compare


def random_masks(model, seed):
    """Of each parameter nothing, some slices along a dimension, or some entries."""
    draw, masks = torch.Generator().manual_seed(seed), {}
    for name, p in model.named_parameters():
        masks[name] = torch.ones(p.shape, dtype=torch.bool)
        how = int(torch.randint(0, 5, (), generator=draw))
        dim = {1: 0, 2: 0, 3: min(1, p.ndim - 1)}.get(how)
        if how == 4:
            masks[name] = torch.rand(p.shape, generator=draw) < 0.3
        elif dim is not None and p.ndim:
            masks[name].movedim(dim, 0)[
                torch.rand(p.shape[dim], generator=draw) < 0.5
            ] = False
    return masks


def check(model, example, seed, trace=None):
    """The program without all that may go under random masks gives the outputs of the
    masked model, whose trace may be given.
    """
    trace = trace or traced(model, example)
    masks = random_masks(model, seed)
    params = {name: p.detach() for name, p in model.named_parameters()}
    wanted = compare.outputs(
        model, example, {name: p * masks[name] for name, p in params.items()}
    )
    made = plan.free(analyse(trace, masks, counted=True, equal_parts=False))
    tensors = {name: p * masks[name] for name, p in params.items()}
    small = program(made, {**tensors, **plan.folded_biases(made, tensors)})
    compare.check_outputs(wanted, small, example, "the program")
    return sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in small.parameters()
    )
