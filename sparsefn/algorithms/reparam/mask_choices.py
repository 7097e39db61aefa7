"""Frozen weights under masks of n of m, which are chosen from all of them by draws that
train.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from sparsefn._engine.leaves import plain_product
from sparsefn._engine.numbers import folded
from sparsefn._engine.processes import check_plain
from sparsefn.algorithms.mask_draws import (
    check_prunes,
    check_strength,
    gumbel,
    prior_of,
    priors_of,
    softmax,
)
from sparsefn.algorithms.reparam.gates import uniform_at
from sparsefn.algorithms.reparam.weight_map import Reparametrisation
from sparsefn.core import random
from sparsefn.core.checks import described, is_int
from sparsefn.core.schedules import as_schedule
from sparsefn.core.state import Level, Step, everywhere
from sparsefn.core.tree import Leaves, Tree, wide
from sparsefn.masks.patterns.kinds import Pattern, nm
from sparsefn.masks.patterns.units import Units, from_rows, to_rows, units_of_leaves

_MOST = 10_000  # masks of a group, each with a logit
_SPREAD = 0.01  # the standard deviation of the first logits


@described
def mask_choices(
    pattern: Pattern = nm(2, 4),
    *,
    scale: Level = 100.0,
    temperature: Level = 1.0,
    prior: Tree | None = None,
    strength: float = 3.0,
) -> Reparametrisation:
    """w = W * mean of all masks of n of m, weighted by a Gumbel softmax of logits.

    >>> map_ = sf.reparam.mask_choices(sf.patterns.nm(1, 2))
    >>> latents = map_.init({"w": torch.tensor([[2.0, 3.0]])}, sf.random.key(0))
    >>> latents["logit"]["w"] = torch.tensor([[0.1, -0.1]])
    >>> map_.settled(latents, 0)
    ({'w': tensor([[2., 0.]])}, {'w': tensor([[ True, False]])})

    Args:
        pattern: `nm(n, m)`. A group of m weights has C(m, n) masks, 6 for 2 of 4.
        scale: What logits are multiplied with, a float or a schedule.
        temperature: Temperature of the softmax, above 0, a float or a schedule. The
            lower, the closer to one mask.
        prior: Masks tree, of another method, that the choice starts near. None: none.
        strength: Standard deviations that a first logit is raised by for each weight
            that its mask shares with `prior` beyond n^2 / m, their mean.

    Returns:
        Reparametrisation with the latents `{"base": {path: W}, "logit": {path: x}}`.
        W is frozen. The logits x, (groups, C(m, n)), start normal with deviation 0.01.
        They belong to the masks in lexicographic order, 1100 first. The masks of
        training keep everything. In `sf.settled` each group has the mask of its largest
        logit, the first among equal ones.

    Raises:
        TypeError: `pattern` is no pattern, `scale` or `temperature` neither a float nor
            a schedule, or `prior` no tree of bool masks.
        ValueError: `pattern` keeps no fixed number of single weights of a group,
            `strength` is not finite, or, in `init`, `prior` has no mask of a leaf or
            one of another shape, or prunes nothing, or a leaf is a DTensor.

    With u uniform in (0, 1), drawn from (key, path, step), and g = -log(-log u), the
    weights of the masks are softmax((scale * logit + g) / temperature). They are
    computed in float64 and rounded, as in `hard_concrete`. In a module W has to
    require a gradient, from which the logits get theirs.

    Fang et al. 2024, arXiv 2409.17481, eqs. 5 to 9.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"mask_choices: expected a pattern such as sf.patterns.nm(2, 4), got "
            f"{pattern!r}"
        )
    check_strength("mask_choices", strength)
    times = as_schedule(scale)
    warmth = as_schedule(temperature)
    priors = priors_of("mask_choices", prior)

    def start(leaves: Leaves, key: Tensor) -> Tree:
        logits = {}
        known = {}
        draws = random.fold_in(key, "init")
        for path, units in units_of_leaves(pattern, leaves).items():
            leaf = leaves[path]
            check_plain("mask_choices", path, leaf)
            choices = _choices(pattern, units)
            own = random.leaf_key(draws, path)
            like = wide(leaf.new_empty(units.rows[0], len(choices)))
            logit = _SPREAD * random.normal_like(own, like)
            if priors is not None:
                known[path] = prior_of("mask_choices", path, leaf, priors)
                rows = to_rows(units, known[path]).to(logit.dtype)
                masks = torch.tensor(choices, dtype=logit.dtype, device=leaf.device)
                mean = sum(choices[0]) ** 2 / len(choices[0])
                near = plain_product(rows, masks.T) - mean
                logit = logit + strength * _SPREAD * near
            logits[path] = logit.to(like.dtype)
        check_prunes("mask_choices", known)
        return {"base": dict(leaves), "logit": logits}

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = {}
        base = latents["base"]
        for path, units in units_of_leaves(pattern, base).items():
            logit = latents["logit"][path]
            u = uniform_at(step, key, path, logit).double()
            drawn = (times(step) * logit.double() + gumbel(u)) / warmth(step)
            soft = _mean_of(_choices(pattern, units), softmax(drawn))
            w = wide(base[path])
            weight = w * from_rows(units, soft).to(w.dtype)
            weights[path] = weight.to(base[path].dtype)
        return weights, everywhere(base)

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        base = latents["base"]
        for path, units in units_of_leaves(pattern, base).items():
            best = _first_largest(latents["logit"][path].detach())
            choices = torch.tensor(_choices(pattern, units), device=best.device)
            masks[path] = from_rows(units, choices[best])
            weights[path] = torch.where(masks[path], base[path], 0.0)
        return weights, masks

    return Reparametrisation(start, apply, settled, held=("base",))


def _choices(pattern: Pattern, units: Units) -> list[list[bool]]:
    # All masks of a group of m weights, the mask that keeps the first ones first.
    n = units.fixed
    m = units.rows[1]
    if not is_int(n) or not units.single:
        raise ValueError(
            "mask_choices: expected a pattern that keeps a fixed number of single "
            f"weights of a group, such as nm(2, 4), got {pattern}"
        )
    count = math.comb(m, n)
    if count > _MOST:
        raise ValueError(
            f"mask_choices: expected a group of at most {_MOST} masks, got {count} of "
            f"{n} in {m}: choose a smaller m, or sf.methods.maskpro, which has one "
            "logit for each weight"
        )
    return [[i in kept for i in range(m)] for kept in combinations(range(m), n)]


def _mean_of(choices: list[list[bool]], shares: Tensor) -> Tensor:
    # (groups, m): the shares, (masks, groups), of the masks that keep a place
    places = []
    for keeps in zip(*choices, strict=True):
        own = [share for share, kept in zip(shares, keeps, strict=True) if kept]
        places.append(folded(torch.stack(own)) if own else 0.0 * shares[0])
    return torch.stack(places, -1)


def _first_largest(x: Tensor) -> Tensor:
    # NaN never wins
    x = torch.where(x.isnan(), -torch.inf, x)
    places = torch.arange(x.shape[-1], device=x.device)
    is_best = x == x.amax(-1, keepdim=True)
    return torch.where(is_best, places, x.shape[-1]).amin(-1)
