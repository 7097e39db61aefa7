"""Weights that a proximal operator moves towards n of m, and whose magnitudes choose a
mask of frozen weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn._engine.leaves import one_by_one
from sparsefn._engine.numbers import Real, back, falling, like
from sparsefn._engine.processes import check_plain
from sparsefn._engine.transforms import differentiated
from sparsefn.algorithms.reparam.weight_map import Reparametrisation
from sparsefn.core.checks import described, is_int, is_number, number
from sparsefn.core.schedules import as_schedule
from sparsefn.core.state import Level, Step, everywhere
from sparsefn.core.tree import Leaves, Tree
from sparsefn.masks.patterns.kinds import Pattern, nm
from sparsefn.masks.patterns.units import Units, from_rows, to_rows, units_of_leaves
from sparsefn.masks.select import topk_mask

# The share of z that each of Newton's steps solves for: z rises, then stays whole.
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@described
def nm_prox(strength: Level, pattern: Pattern = nm(2, 4)) -> Reparametrisation:
    """w = v, moved towards n of m at each step; the largest `abs(v)` are the mask of W.

    >>> map_ = sf.reparam.nm_prox(0.1)
    >>> latents = map_.init({"w": torch.tensor([[4.0, -3.0, 0.5, 0.1]])}, None)
    >>> latents["latent"]["w"] = torch.tensor([[0.9, -0.6, 0.5, 0.8]])
    >>> map_.project(latents, 0)["latent"]["w"]
    tensor([[ 0.8215, -0.4852,  0.3671,  0.7122]])
    >>> map_.settled(latents, 0)[0]
    {'w': tensor([[4.0000, 0.0000, 0.0000, 0.1000]])}

    Args:
        strength: Factor s of the penalty in the step, a float or a schedule: of sgd's
            proximal step the learning rate times the factor in the loss.
        pattern: `nm(n, m)` with an n of 1 or 2.

    Returns:
        Reparametrisation with the latents `{"base": {path: W}, "latent": {path: v}}`. v
        starts as W and trains, W is frozen. The masks of training keep everything. In
        `sf.settled` the weights are W where `abs(v)` is among the n largest of its
        group, the first among equal ones.

    Raises:
        TypeError: `pattern` is no pattern, or `strength` neither a float nor a
            schedule.
        ValueError: `pattern` is not `nm(n, m)` with an n of 1 or 2, `strength` is below
            0, or, in `init`, a leaf is a DTensor or m does not divide its axis.

    The penalty R of a group is the sum of `abs(v_i ... v_k)` over all sets of n + 1 of
    its m weights: 0 exactly where at most n are not 0. For 2 of 4 it is `abs(v1 v2 v3)
    + abs(v2 v3 v4) + abs(v3 v4 v1) + abs(v4 v1 v2)`. An update sets v to the x with the
    smallest `(x - v)^2 / 2 + s * R(x)`, of which the sparsest. It is computed in
    float64 and rounded.

    Liu et al. 2025, arXiv 2502.00258, and Kübler et al. 2025, arXiv 2501.18015.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"nm_prox: expected a pattern such as sf.patterns.nm(2, 4), got {pattern!r}"
        )
    n = pattern.fixed
    if not is_int(n) or not 1 <= n <= 2 or not pattern.elementwise:
        raise ValueError(
            "nm_prox: expected a pattern that keeps 1 or 2 single weights of a group, "
            f"such as nm(2, 4), got {pattern}"
        )
    if is_number(strength):
        number("strength of nm_prox", strength)
    if is_number(strength) and strength < 0:
        raise ValueError(f"nm_prox: expected strength >= 0, got {strength}")
    strength_at = as_schedule(strength)

    def start(leaves: Leaves, key: Tensor) -> Tree:
        for path, leaf in leaves.items():
            check_plain("nm_prox", path, leaf)
        units_of_leaves(pattern, leaves)  # raises for leaves that it does not fit
        trained = {path: leaf.clone() for path, leaf in leaves.items()}
        return {"base": dict(leaves), "latent": trained}

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = dict(latents["latent"])
        return weights, everywhere(weights)

    def project(latents: Tree, step: Step) -> Tree:
        moved = {}
        for path, units in units_of_leaves(pattern, latents["latent"]).items():
            moved[path] = _moved(
                units, latents["latent"][path], int(n), strength_at(step)
            )
        return {**latents, "latent": moved}

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, base in latents["base"].items():
            size = latents["latent"][path].detach().abs()
            masks[path] = topk_mask(size, None, pattern=pattern)
            weights[path] = torch.where(masks[path], base, 0.0)
        return weights, masks

    return Reparametrisation(start, apply, settled, project, held=("base",))


def _moved(units: Units, v: Tensor, n: int, strength: Real) -> Tensor:
    # The proximal operator of every group of a leaf.
    rows = to_rows(units, v).double()
    order = falling(rows.abs())
    z = rows.abs().gather(-1, order).movedim(-1, 0)
    factor = like(rows, strength)
    x = _proximal(z.detach(), n, factor.detach())
    if differentiated(z, factor):
        # One more step of Newton's method has the derivatives of the end of all steps.
        # Its value is not taken: x - 0 keeps the bits of x.
        positive = (x > 0).to(x.dtype)
        stepped = torch.stack(_newton_step(x, z, n, factor, positive))
        has_slope = (x > 0) & stepped.isfinite()
        x = torch.where(has_slope, x - (stepped.detach() - stepped), x)
    size = back(x.movedim(0, -1), order)
    moved = torch.where(size == 0, 0.0, torch.sign(rows) * size)
    return from_rows(units, moved).to(v.dtype)


def proximal_sizes(z: Tensor, n: int, strength: Tensor) -> Tensor:
    """The x >= 0 with the smallest |x - z|^2 / 2 + strength * (the sum over all n + 1
    entries of their product).

    >>> z = torch.tensor([[0.9], [0.8], [0.6], [0.5]], dtype=torch.float64)
    >>> proximal_sizes(z, 2, torch.tensor(0.1)).T
    tensor([[0.8215, 0.7122, 0.4852, 0.3671]], dtype=torch.float64)
    >>> proximal_sizes(z, 2, torch.tensor(2.0)).T
    tensor([[0.9000, 0.8000, 0.0000, 0.0000]], dtype=torch.float64)

    `z` is (m, groups), float64, the largest entries of a group first; n is 1 or 2.

    The largest entries of z are the ones that stay above 0 in x. For each number of
    them the Hessian of the objective is linear in x, so the x at which it is positive
    are a convex set, and a smallest value inside is the only one. Newton's steps follow
    it from x = 0 while z rises from 0 to its length. Of these candidates the best wins,
    the sparsest among equal ones: n entries of z itself cost half the squares of the
    others.
    """
    best = torch.cat([z[:n], torch.zeros_like(z[n:])])
    cost = _cost(best, z, n, strength)
    for k in range(n + 1, len(z) + 1):
        x = torch.zeros_like(z[:k])
        for share in _SHARES:
            stepped = _newton_step(x, share * z[:k], n, strength, torch.ones_like(x))
            x = torch.stack(stepped).clamp_min(0.0)
        every = torch.cat([x, torch.zeros_like(z[k:])])
        its_cost = _cost(every, z, n, strength)
        better = its_cost < cost  # never for NaN, as of infinite weights
        best = torch.where(better, every, best)
        cost = torch.where(better, its_cost, cost)
    return best


# Opaque to the compiler, for which this is a graph of thousands of nodes.
_proximal = torch.library.custom_op(
    "sparsefn::proximal_sizes", proximal_sizes, mutates_args=()
)
_proximal.register_fake(
    lambda z, *_: torch.empty_like(z, memory_format=torch.contiguous_format)
)
one_by_one(_proximal)


def _cost(x: Tensor, z: Tensor, n: int, strength: Tensor) -> Tensor:
    cost = strength * _products(list(x), n + 1, torch.ones_like(x[0]))
    for own, target in zip(x, z, strict=True):
        cost = cost + 0.5 * (own - target).square()
    return cost


def _newton_step(
    x: Tensor, z: Tensor, n: int, strength: Tensor, free: Tensor
) -> list[Tensor]:
    # `free` is 1 for entries that may move, and 0 for others.
    one = torch.ones_like(x[0])
    places = range(len(x))
    downhill = []
    hessian = [[one for _ in places] for _ in places]
    for i in places:
        others = [x[j] for j in places if j != i]
        slope = x[i] + strength * _products(others, n, one)
        downhill.append(free[i] * (z[i] - slope))
        for j in places[:i]:
            others = [x[k] for k in places if k not in (i, j)]
            curvature = strength * _products(others, n - 1, one)
            hessian[i][j] = free[i] * free[j] * curvature
            hessian[j][i] = hessian[i][j]
    move = _solved(hessian, downhill)
    return [own + by for own, by in zip(x, move, strict=True)]


def _products(x: Sequence[Tensor], degree: int, one: Tensor) -> Tensor:
    # The sum over all sets of `degree` entries of their product, which is 1 for none.
    sums = [one] + [torch.zeros_like(one)] * degree
    for own in x:
        for count in range(degree, 0, -1):
            sums[count] = sums[count] + sums[count - 1] * own
    return sums[degree]


def _solved(matrix: list[list[Tensor]], right: list[Tensor]) -> list[Tensor]:
    # Gaussian elimination, with the same bits on every device and for any batch.
    rows = [list(row) for row in matrix]
    right = list(right)
    places = range(len(right))
    for i in places:
        for j in places[i + 1 :]:
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
            right[j] = right[j] - factor * right[i]
    x = list(right)
    for i in reversed(places):
        for j in places[i + 1 :]:
            x[i] = x[i] - rows[i][j] * x[j]
        x[i] = x[i] / rows[i][i]
    return x
