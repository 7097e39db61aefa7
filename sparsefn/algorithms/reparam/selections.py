"""The best weights of a leaf, chosen softly or with the other weights faded."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn._engine.processes import check_plain, outside_vjp
from sparsefn._engine.sums import smooth_total_of_shares, total_of_shares
from sparsefn.algorithms.reparam.gates import sigmoid
from sparsefn.algorithms.reparam.weight_map import Reparametrisation
from sparsefn.core.checks import described
from sparsefn.core.rounding import as_fraction, fraction_at, n_kept
from sparsefn.core.schedules import as_schedule
from sparsefn.core.state import Level, Schedule, Step, everywhere
from sparsefn.core.tree import Leaves, Tree, wide
from sparsefn.masks.budgets.distributions import spread
from sparsefn.masks.patterns.kinds import Pattern, nm
from sparsefn.masks.patterns.units import from_rows, to_rows, units_of, units_of_leaves
from sparsefn.masks.select import straight_through, topk_mask

_HALVINGS = 32
_NEWTON = 3
_REACH = 40.0  # sigmoid(-40) adds nothing to a count


@described
def faded(
    pattern: Pattern,
    factor: Level,
    *,
    sparsity: Level | None = None,
    slope: Level | None = None,
) -> Reparametrisation:
    """w = v on a mask of the largest |v|, and factor * v off it.

    >>> map_ = sf.reparam.faded(sf.patterns.nm(1, 2), 0.25)
    >>> latents = {"latent": {"w": torch.tensor([4.0, 2.0])}}
    >>> map_.apply(latents, 0, sf.random.key(0))[0], map_.settled(latents, 0)[0]
    ({'w': tensor([4.0000, 0.5000])}, {'w': tensor([4., 0.])})

    Args:
        pattern: Pattern of the mask, which follows the latents at each step.
        factor: A float or a schedule. Falling from 1 to 0 it is mask decay: Kao et al.
            2022, arXiv 2209.07617.
        sparsity: Fraction that the mask prunes: a float, a schedule or a 0-d tensor.
            None where the pattern fixes it.
        slope: What gradients off the mask are multiplied with: a float or a schedule.
            None: `factor`.

    Returns:
        Reparametrisation. Its masks keep everything until the factor is 0.

    Raises:
        TypeError: `pattern` is no pattern, or `sparsity` is given where the pattern
            fixes the count, or missing where it leaves the count open.
        ValueError: `sparsity` is outside [0, 1].

    With factor 0.0, slope 1.0 is `sf.ste`, slope 0.0 a hard mask, and a slope that
    falls from 1 to 0 gradient annealing: Kundu et al. 2023, arXiv 2304.06941.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"faded: expected a pattern such as sf.patterns.nm(2, 4), got {pattern!r}"
        )
    level = as_fraction(sparsity)
    rest = as_schedule(factor)
    back = None if slope is None else as_schedule(slope)
    if level is None and pattern.fixed is None:
        raise TypeError(
            f"faded: expected a sparsity, as {pattern} leaves the count open"
        )
    if level is not None and pattern.fixed is not None:
        raise TypeError(f"faded: expected no sparsity, as {pattern} fixes the count")

    def mask_of(v: Tensor, step: Step) -> Tensor:
        def best(x: Tensor) -> Tensor:
            count = _count(pattern, x, level, step)
            return topk_mask(x.detach().abs(), count, pattern=pattern)

        return outside_vjp(best, v)

    def dimmed(v: Tensor, mask: Tensor, part: Real) -> Tensor:
        return torch.where(mask, v, (part * wide(v)).to(v.dtype))

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        part = rest(step)
        for path, v in latents["latent"].items():
            mask = mask_of(v, step)
            weight = dimmed(v, mask, part)
            if back is not None:
                slope = dimmed(v, mask, back(step))
                weight = straight_through(weight, slope)
            weights[path] = weight
            masks[path] = mask | (part != 0)
        return weights, masks

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, v in latents["latent"].items():
            masks[path] = mask_of(v, step)
            weights[path] = torch.where(masks[path], v, 0.0)
        return weights, masks

    return Reparametrisation(_latent, apply, settled)


def _latent(leaves: Leaves, key: Tensor) -> Tree:
    return {"latent": dict(leaves)}


def _count(
    pattern: Pattern, v: Tensor, level: Schedule | None, step: Step
) -> int | Tensor | None:
    if level is None:
        return None
    groups, width = units_of(pattern, tuple(v.shape)).rows
    count = n_kept(groups * width, fraction_at(level, step))
    return spread(count, groups)


@described
def soft_topk(sparsity: Level, sharpness: Level) -> Reparametrisation:
    """w = v * sigmoid(sharpness * (|v| - c)), with one c for each leaf.

    >>> map_ = sf.reparam.soft_topk(0.5, 2.0)
    >>> latents = {"latent": {"w": torch.tensor([1.0, -2.0, 3.0, 4.0])}}
    >>> gates = (
    ...     map_.apply(latents, 0, sf.random.key(0))[0]["w"] / latents["latent"]["w"]
    ... )
    >>> gates, gates.sum()
    (tensor([0.0474, 0.2689, 0.7311, 0.9526]), tensor(2.))

    Args:
        sparsity: Fraction of each leaf that is pruned: a float, a schedule or a 0-d
            tensor. c makes the gates of a leaf add up to the count that is kept.
        sharpness: A float or a schedule; the sharper, the closer to the `topk_mask` of
            |v|.

    Returns:
        Reparametrisation. The masks of training keep everything. In `sf.settled` only
        the entries of the `topk_mask` are left, with the weights that they have: the
        projection of Spartan, whose soft mask comes from optimal transport.

    Raises:
        TypeError: An argument is neither a float nor a schedule.
        ValueError: `sparsity` is outside [0, 1], or a leaf is a DTensor: sums are over
            whole leaves.

    Gradients pass through c, too. Where |v| is NaN the gate is 0.

    Tai et al. 2022, arXiv 2205.14107; a sigmoid with a threshold a leaf is in PDP, Cho
    et al. 2023, arXiv 2305.11203.
    """
    level = as_fraction(sparsity)
    sharp = as_schedule(sharpness)

    def start(leaves: Leaves, key: Tensor) -> Tree:
        for path, leaf in leaves.items():
            check_plain("soft_topk", path, leaf)
        return _latent(leaves, key)

    def count(v: Tensor, step: Step) -> int | Tensor:
        return n_kept(v.numel(), fraction_at(level, step))

    def weighed(latents: Tree, step: Step) -> Leaves:
        weights = {}
        for path, v in latents["latent"].items():
            gates = soft_mask(v.abs(), count(v, step), sharp(step))
            weights[path] = (v * gates).to(v.dtype)
        return weights

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        return weighed(latents, step), everywhere(latents["latent"])

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        weights = weighed(latents, step)
        masks = {}
        for path, v in latents["latent"].items():
            masks[path] = topk_mask(v.detach().abs(), count(v, step))
            weights[path] = torch.where(masks[path], weights[path], 0.0)
        return weights, masks

    return Reparametrisation(start, apply, settled)


def soft_mask(
    scores: Tensor, n_keep: int | Tensor, sharpness: float | Tensor
) -> Tensor:
    """sigmoid(sharpness * (scores - c)), whose sum is `n_keep`.

    >>> from sparsefn.algorithms.reparam.selections import soft_mask
    >>> soft_mask(torch.tensor([0.0, 1.0]), 1, 2.0)
    tensor([0.2689, 0.7311])

    Derivatives up to the third are right, c included.
    """
    x = torch.where(scores.isnan(), -torch.inf, scores.double())
    if not x.numel():
        return scores
    finite = torch.where(x.isfinite(), x.detach(), 0.0)
    low = finite.amin() - _REACH / sharpness
    high = finite.amax() + _REACH / sharpness
    centre = (low + high) / 2
    for _ in range(_HALVINGS):
        gates = torch.reciprocal(1.0 + torch.exp(sharpness * (centre - x.detach())))
        more = total_of_shares(gates) > n_keep
        low = torch.where(more, centre, low)
        high = torch.where(more, high, centre)
        centre = (low + high) / 2
    # c as a function of x: each step makes one more of its derivatives right
    for _ in range(_NEWTON):
        gates = sigmoid(sharpness * (x - centre))
        slope = sharpness * smooth_total_of_shares(gates * (1 - gates))
        too_many = smooth_total_of_shares(gates) - n_keep
        flat = slope == 0
        change = torch.where(flat, 0.0, too_many) / torch.where(flat, 1.0, slope)
        aim = centre + change
        inside = (aim >= low) & (aim <= high)
        centre = torch.where(inside, aim, centre)
    return sigmoid(sharpness * (x - centre)).to(scores.dtype)


@described
def soft_nm(
    n: int,
    m: int,
    axis: int = -1,
    *,
    rescale: bool = True,
) -> Reparametrisation:
    """w = scale * sign(v) * relu(|v| - t), with one t for each m entries in a row.

    >>> map_ = sf.reparam.soft_nm(2, 4, rescale=False)
    >>> map_.apply(
    ...     {"latent": {"w": torch.tensor([4.0, 1.0, -3.0, 0.5])}}, 0, sf.random.key(0)
    ... )
    ({'w': tensor([ 3.,  0., -2.,  0.])}, {'w': tensor([ True, False,  True, False])})

    Args:
        n: Number of entries kept of each m.
        m: Number of entries in a row that compete.
        axis: Axis of these rows, which counts as in `sf.patterns.nm`.
        rescale: Whether scale is one number a leaf that never changes: the least
            squares of the first weights, kept in the latents as "scale", which does not
            train. Without it scale is 1.

    Returns:
        Reparametrisation with the latents
        `{"latent": {path: v}, "scale": {path: scale}}`. t is the largest of the m - n
        smallest |v| of each m. Gradients pass to v as they are, on the mask and off it
        (straight through).

    Raises:
        TypeError: `n` or `m` is not an int.
        ValueError: n > m, the pattern does not fit a leaf, or a leaf is a DTensor.

    Weights change continuously where the mask changes, because both entries are 0 then.

    S-STE: Hu et al. 2024, arXiv 2409.09099.
    """
    pattern = nm(n, m, axis)

    def shrunk(v: Tensor) -> tuple[Tensor, Tensor]:
        units = units_of(pattern, tuple(v.shape))
        size = v.detach().abs()
        mask = topk_mask(size, None, pattern=pattern)
        rows = to_rows(units, torch.where(mask, 0.0, size))
        past = size
        if rows.numel():
            largest = rows.amax(1, keepdim=True)
            past = from_rows(units, largest.expand(rows.shape))
        small = torch.sign(v.detach()) * torch.relu(size - past)
        return torch.where(mask, small, 0.0), mask

    def start(leaves: Leaves, key: Tensor) -> Tree:
        latents: Tree = _latent(leaves, key)
        for path, leaf in leaves.items():
            check_plain("soft_nm", path, leaf)
        units_of_leaves(pattern, leaves)
        if rescale:
            latents["scale"] = {}
            for path, v in leaves.items():
                small, _ = shrunk(v)
                latents["scale"][path] = _scale(v, small)
        return latents

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, v in latents["latent"].items():
            small, masks[path] = shrunk(v)
            scaled = small
            if rescale:
                scaled = (wide(small) * latents["scale"][path]).to(v.dtype)
            weights[path] = straight_through(scaled, v)
        return weights, masks

    return Reparametrisation(start, apply, held=("scale",) if rescale else ())


def _scale(v: Tensor, small: Tensor) -> Tensor:
    v = v.detach().double()
    small = small.double()
    square = (small * small).sum()
    least_squares = (v * small).sum() / square
    return torch.where(square > 0, least_squares, 1.0).float()
