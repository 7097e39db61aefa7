"""What several benchmarks do: the step of an attached loop, and methods that prune with
data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sparsefn as sf

# by name: the algorithm that statistics make, and what these are of
METHODS: dict[str, tuple[Callable[[Any], sf.Algorithm], str]] = {
    "Wanda": (
        lambda stats: sf.one_shot(
            0.5, sf.scores.wanda(stats), pattern=sf.patterns.row_balanced()
        ),
        "square",
    ),
    "SparseGPT": (lambda stats: sf.methods.sparsegpt(0.5, stats), "gram"),
}


def attached_step(
    algorithm: sf.Algorithm,
    leaves: dict[str, Tensor],
    grads: Sequence[Tensor],
    **options: bool,
) -> Callable[[], None]:
    """A step of torch's Adam on a module with an algorithm attached, gradients given;
    the first one, at which masks change, is done.
    """
    module = nn.ParameterDict(leaves)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3, **options)
    sparse = sf.attach(algorithm, module, optimizer)
    params = list(module.parameters())
    done = 0

    def step() -> None:
        nonlocal done
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        sparse.after_step(done)
        done += 1

    step()
    return step
