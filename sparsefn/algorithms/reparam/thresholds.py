"""Weights that shrink: by a learned threshold, or by a power."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn._engine.numbers import root
from sparsefn._engine.processes import is_sharded, outside_vjp
from sparsefn.algorithms.reparam.weight_map import Reparametrisation
from sparsefn.core.checks import described, is_number, number
from sparsefn.core.schedules import as_schedule
from sparsefn.core.state import Level, Step, everywhere
from sparsefn.core.tree import Leaves, Tree, wide
from sparsefn.masks.select import straight_through


@described
def soft_threshold(
    f: Callable[[Tensor], Tensor] = torch.sigmoid,
    init: float = -3200.0,
    slope: Level = 0.0,
) -> Reparametrisation:
    """w = sign(v) * relu(|v| - f(s)), with one learned threshold s for each leaf.

    >>> map_ = sf.reparam.soft_threshold(torch.sigmoid, init=0.0)
    >>> latents = map_.init({"w": torch.tensor([0.75, -0.25, -1.5])}, sf.random.key(0))
    >>> map_.apply(latents, 0, sf.random.key(0))
    ({'w': tensor([ 0.2500, -0.0000, -1.0000])}, {'w': tensor([ True, False,  True])})

    Args:
        f: Differentiable function that turns s into the threshold.
        init: Number at which s starts. At -3200 sigmoid and its slope are exactly 0 in
            float32, so at first only weight decay moves s.
        slope: Derivative below the threshold in place of 0, a float or a schedule:
            pruned weights then train on, more slowly. It changes gradients alone.
            Falling from 1 to 0 it is AutoSparse: Kundu et al. 2023, arXiv 2304.06941.

    Returns:
        Reparametrisation with the latents
        `{"latent": {path: v}, "threshold": {path: s}}`. There is no target sparsity:
        weight decay in the optimizer moves s.

    Raises:
        TypeError: `slope` is neither a float nor a schedule, or `init` no number.
        ValueError: `init` is not finite.

    The gradient of s is a sum over the leaf, made by autograd: its last bits depend on
    the number of threads where the leaf has more than 32,768 rows, and of processes
    where it is a DTensor.

    Kusupati et al. 2020, arXiv 2002.03231, eq. 2.
    """
    number("init of soft_threshold", init)
    below = as_schedule(slope)
    hard = slope == 0.0 if isinstance(slope, float) else False

    def start(leaves: Leaves, key: Tensor) -> Tree:
        thresholds = {
            path: torch.full((), init, dtype=x.dtype, device=x.device)
            for path, x in leaves.items()
        }
        return {"latent": dict(leaves), "threshold": thresholds}

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, v in latents["latent"].items():
            threshold = f(latents["threshold"][path])
            if v.ndim > 1 and v.numel() >= 1 << 15 and not outside_vjp(is_sharded, v):
                # Its slope is a sum of rows: torch splits the sum of as many numbers
                # between threads.
                threshold = threshold.expand(len(v), *[1] * (v.ndim - 1))
            excess = v.abs() - threshold
            size = torch.relu(excess)
            if not hard:
                # wide: a batch of rates would be rounded first
                small = (below(step) * wide(excess)).to(excess.dtype)
                size = straight_through(size, torch.where(excess > 0, excess, small))
            weights[path] = torch.sign(v) * size
            masks[path] = (excess > 0).detach()
        return weights, masks

    return Reparametrisation(start, apply)


@described
def power(alpha: float) -> Reparametrisation:
    """w = v * |v|^(alpha - 1), with initial v that leave the weights as they were.

    >>> map_ = sf.reparam.power(2.0)
    >>> map_.apply(
    ...     {"latent": {"w": torch.tensor([0.5, -2.0, 0.0])}}, 0, sf.random.key(0)
    ... )[0]
    {'w': tensor([ 0.2500, -4.0000,  0.0000])}

    Args:
        alpha: Exponent, at least 1. 1 is the identity; above it the gradient at v = 0
            is 0.

    Returns:
        Reparametrisation with one tree of latents by path, "latent" (v).

    Raises:
        TypeError: `alpha` is no number.
        ValueError: `alpha` is below 1 or NaN.

    Schwarz et al. 2021, arXiv 2110.00296, eq. 1.
    """
    if not isinstance(alpha, Tensor) and not is_number(alpha):
        raise TypeError(
            f"power: expected alpha to be a number, got {type(alpha).__name__}"
        )
    if not alpha >= 1:
        raise ValueError(f"power: expected alpha >= 1, got {alpha}")

    def start(leaves: Leaves, key: Tensor) -> Tree:
        return {
            "latent": {
                path: torch.sign(u) * root(u.abs(), alpha) for path, u in leaves.items()
            }
        }

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        values = latents["latent"]
        return {
            path: _signed_power(v, alpha) for path, v in values.items()
        }, everywhere(values)

    return Reparametrisation(start, apply)


def _signed_power(v: Tensor, alpha: float) -> Tensor:
    if alpha == 1:
        return v
    # The slope of |v|^(alpha - 1) is infinite at 0 for alpha < 2; the product's is 0.
    nonzero = v != 0
    size = torch.where(nonzero, v.abs(), 1.0)
    return torch.where(nonzero, v * size ** (alpha - 1), v * 0.0)
