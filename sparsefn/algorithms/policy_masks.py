"""Frozen weights under masks of n of m that are drawn; the chances of masks train by
losses.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn._engine.transforms import read_number
from sparsefn.algorithms.frame import (
    framed,
    own_key,
    own_params,
    sparse_leaves,
    with_masks,
)
from sparsefn.algorithms.mask_draws import gumbel, prior_of, priors_of, softmax
from sparsefn.algorithms.processes import derived_view, refuse_shards
from sparsefn.core import random
from sparsefn.core.checks import check_call, described, is_int, number
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    Where,
    everywhere,
    masks_tree,
)
from sparsefn.core.tree import Tree, flatten, leaves_of
from sparsefn.core.tree.where import default_where
from sparsefn.masks.patterns.kinds import Pattern, nm
from sparsefn.masks.patterns.units import Units, from_rows, to_rows, units_of_leaves
from sparsefn.masks.select import topk_mask

_LEAST = 1e-8  # no chance is smaller, so that every weight may still be drawn
_MOST_SUMMED = 7  # above this n a sum over 2^n sets takes longer than an integral
# the integral's points: for logits from -10 to 10 its log errs by less than 1e-12
_FIRST = -3.4
_LAST = 5.6
_POINTS = 144


@described
def policy_masks(
    pattern: Pattern = nm(2, 4),
    *,
    loss: Callable[[Tree], Tensor] | None = None,
    prior: Tree | None = None,
    scale: Real = 10.0,
    decay: Real = 0.99,
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """Masks of n of m are drawn at each step, and draws of small loss get likelier.

    >>> algorithm = sf.with_optimizer(
    ...     sf.policy_masks(sf.patterns.nm(1, 2), scale=1.0), sf.optimizers.sgd(1.0)
    ... )
    >>> params = {"w": torch.tensor([[2.0, 1.0]]), "loss": torch.tensor(0.0)}
    >>> state = algorithm.init(params)
    >>> for step in range(50):  # the second weight is the one that matters
    ...     missing = 1.0 - sf.effective(state)["w"][0, 1]
    ...     grads = {"w": torch.zeros(1, 2), "loss": missing}
    ...     state = algorithm.update(state, grads, step)
    >>> sf.effective(sf.settled(algorithm, state))["w"]
    tensor([[0., 1.]])

    Args:
        pattern: `nm(n, m)`.
        loss: Function of the tree that `update` gets as gradients, which gives the loss
            of the step, a 0-d tensor. None: the leaf at the path "loss", beside the
            weights. Nothing else of the gradients is read.
        prior: Masks tree, of another method, with n of m in each group. None: the
            largest weights.
        scale: First logit of the weights that `prior` keeps. The others start at 0.
        decay: Factor of the old baseline in the new one.
        where: Which leaves get masks.
        key: PRNG key of the draws. None: `sf.random.key(0)`.

    Returns:
        Algorithm whose weights never change. An optimizer trains the logits alone,
        `state.scores["latent"]["logit"][path]`, of the shape of the leaf.
        `state.scores["baseline"]` is a 0-d float64 tensor. In `sf.settled` each group
        keeps its n largest logits, the first among equal ones.

    Raises:
        TypeError: `pattern` is no pattern, `loss` no function of one argument, `prior`
            no tree of bool masks, or `scale` or `decay` no number.
        ValueError: `pattern` keeps no fixed number of single weights of a group,
            `scale` is not finite, `decay` is outside [0, 1], or, in `init`, `prior` has
            no mask of a leaf, one of another shape, or one that keeps another number in
            a group, or a leaf is a DTensor, or, in an update, there is no loss.

    With p = softmax(logits of a group), and no p below 1e-8, a mask is n draws without
    replacement. Its chance P is the sum over all orders of its weights of the product
    of p_i / (1 - p of the earlier ones); for n above 7 it is an integral, whose time is
    linear in n. With r the loss and b the baseline, an update
    makes b = decay * b + (1 - decay) * r, gives the optimizer (r - b) * (the gradient
    of log P of the masks of the step), and draws masks for step + 1. The first masks
    are `prior`. Everything is computed in float64, with the device's own exp and log,
    and rounded: where two draws of a group are equal up to their last bits, devices may
    draw other masks.

    Sun et al. 2025, arXiv 2506.12876.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            "policy_masks: expected a pattern such as sf.patterns.nm(2, 4), got "
            f"{pattern!r}"
        )
    n = pattern.fixed
    if not is_int(n) or not pattern.elementwise:
        raise ValueError(
            "policy_masks: expected a pattern that keeps a fixed number of single "
            f"weights of a group, such as nm(2, 4), got {pattern}"
        )
    if loss is not None:
        check_call("policy_masks's loss", loss, "grads")
    first_logit = number("scale of policy_masks", scale)
    kept_share = number("decay of policy_masks", decay)
    if not isinstance(kept_share, Tensor) and not 0 <= kept_share <= 1:
        raise ValueError(f"policy_masks: expected decay in [0, 1], got {decay}")
    seed = random.key(0) if key is None else key
    priors = priors_of("policy_masks", prior)

    def init(params: Tree) -> State:
        params = own_params(params)
        leaves = pattern.leaves_in(params, where)
        refuse_shards("policy_masks", leaves, "")
        masks = {}
        # raises for leaves that it does not fit
        for path, units in units_of_leaves(pattern, leaves).items():
            leaf = leaves[path]
            if priors is None:
                masks[path] = topk_mask(leaf.abs(), None, pattern=pattern)
            else:
                masks[path] = prior_of("policy_masks", path, leaf, priors).clone()
                _check_counts(n, units, path, masks[path])
        logits = {
            path: (first_logit * mask.double()).to(leaves[path].dtype)
            for path, mask in masks.items()
        }
        device = next((leaf.device for leaf in leaves_of(params)), torch.device("cpu"))
        baseline = torch.zeros((), dtype=torch.float64, device=device)
        scores = {"latent": {"logit": logits}, "baseline": baseline}
        return State(params, masks_tree(params, masks), scores, own_key(seed, params))

    def loss_of(grads: Tree) -> Tensor:
        value = _loss_leaf(grads) if loss is None else loss(grads)
        if not isinstance(value, Tensor) or value.ndim:
            shape = getattr(value, "shape", None)
            got = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ValueError(
                f"policy_masks: expected a loss that is a 0-d tensor, got {got}"
            )
        return value.double()

    def next_baseline(state: State, value: Tensor) -> Tensor:
        old: Tensor = state.scores["baseline"]
        return decay * old + (1 - decay) * value

    def update(state: State, grads: Tree, step: Step) -> State:
        baseline = next_baseline(state, loss_of(grads))
        logits = state.scores["latent"]["logit"]
        masks = {}
        for path, units in units_of_leaves(pattern, logits).items():
            own = random.leaf_key(state.key, path, step + 1)
            masks[path] = _drawn(units, logits[path], own)
        state = state._replace(scores={**state.scores, "baseline": baseline})
        return with_masks(state, masks, "keep")

    def get(state: State) -> Tree:
        return state.scores["latent"]

    def put(state: State, tree: Tree) -> State:
        return state._replace(scores={**state.scores, "latent": tree})

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        value = loss_of(grads)
        advantage = value - next_baseline(state, value)
        masks = sparse_leaves(state)[1]
        logits = state.scores["latent"]["logit"]
        slopes = {}
        for path, units in units_of_leaves(pattern, logits).items():
            kept = to_rows(units, masks[path])

            def total(x: Tensor, kept: Tensor = kept) -> Tensor:
                return log_chance(x, kept, int(n)).sum()

            rows = to_rows(units, logits[path]).double()
            slope = from_rows(units, advantage * torch.func.grad(total)(rows))
            slopes[path] = slope.to(logits[path].dtype)
        return {"logit": slopes}

    def support(state: State) -> Tree:
        return everywhere(get(state))

    def settled(state: State) -> State:
        masks = {
            path: topk_mask(logit.detach(), None, pattern=pattern)
            for path, logit in state.scores["latent"]["logit"].items()
        }
        return with_masks(state, masks, "keep")

    view = derived_view(get, put, grads_of, support)
    return framed(init, update, view, settled=settled)


def _check_counts(n: int, units: Units, path: str, mask: Tensor) -> None:
    pattern = units.pattern
    counts = to_rows(units, mask).sum(-1)
    wrong = counts != n
    if counts.numel() and read_number(wrong.any()):
        raise ValueError(
            f"policy_masks: expected a prior mask of {pattern} at {path!r}, got "
            f"{int(counts[wrong][0])} kept in a group: make it with "
            f"pattern=sf.patterns.{pattern}, or prior=None"
        )


def _loss_leaf(grads: Tree) -> Tensor:
    leaves = flatten(grads)[0]
    if "loss" not in leaves:
        raise ValueError(
            "policy_masks: expected a loss in the gradients, got none at 'loss': give "
            "the params a 0-d leaf of that name, or pass loss=; in the loop of a "
            "module append each loss to a list and pass loss=lambda grads: losses[-1]"
        )
    return leaves["loss"]


def _drawn(units: Units, logit: Tensor, key: Tensor) -> Tensor:
    # The n largest of log p + Gumbel noise are n draws without replacement.
    rows = to_rows(units, logit).detach().double()
    u = random.uniform_like(key, rows)
    score = torch.log(_chances(rows).movedim(0, -1)) + gumbel(u)
    return topk_mask(from_rows(units, score), None, pattern=units.pattern)


def _chances(rows: Tensor) -> Tensor:
    # (m, groups)
    return softmax(rows).clamp_min(_LEAST)


def log_chance(logits: Tensor, kept: Tensor, n: int) -> Tensor:
    """The log of the chance that n draws without replacement are the kept ones.

    >>> kept = torch.tensor([[True, True, False]])
    >>> log_chance(torch.zeros(1, 3), kept, 2).exp()
    tensor([0.3333])

    `logits` and `kept` are (groups, m); each group keeps n.
    """
    p = _chances(logits)
    flags = kept.movedim(-1, 0)
    rank = torch.where(flags, flags.cumsum(0), 0)
    p_kept = [torch.where(rank == k + 1, p, 0.0).sum(0) for k in range(n)]
    p_others = torch.where(flags, 0.0, p).sum(0)
    if n == len(p):  # there is one mask
        return torch.zeros_like(p_others)
    if n > _MOST_SUMMED:
        return _integrated(p_kept, p_others)
    # by a set of kept weights: the chance that the first draws are this set, in any
    # order. The chance of a larger set is a sum over the weight that is drawn last.
    chance_of: dict[tuple[int, ...], Tensor] = {(): torch.ones_like(p_others)}
    for size in range(1, n + 1):
        for drawn in combinations(range(n), size):
            chance = torch.zeros_like(p_others)
            for last in drawn:
                before = tuple(k for k in drawn if k != last)
                # 1 - the p of those before, as a sum, which cancels no digits
                p_left = p_others
                for k in range(n):
                    if k not in before:
                        p_left = p_left + p_kept[k]
                chance = chance + chance_of[before] * p_kept[last] / p_left
            chance_of[drawn] = chance
    return torch.log(chance_of[tuple(range(n))])


def _integrated(p_kept: list[Tensor], p_others: Tensor) -> Tensor:
    # Draws without replacement are the order in which clocks of the rates p ring. The
    # kept ones are drawn if all of them have rung when the first of the others rings:
    # the integral over t > 0 of exp(-t) * product of 1 - exp(-t * p_kept / p_others).
    # Here it is over x, with t = exp(x - exp(-x)), by the trapezoidal rule.
    x = torch.linspace(
        _FIRST, _LAST, _POINTS, dtype=p_others.dtype, device=p_others.device
    )
    x = x[:, None]
    width = (_LAST - _FIRST) / (_POINTS - 1)
    log_t = x - torch.exp(-x)
    t = log_t.exp()
    total = log_t - t + torch.log(width * (1 + torch.exp(-x)))
    for p in p_kept:
        total = total + torch.log(-torch.expm1(-t * (p / p_others)))
    return torch.logsumexp(total, 0)
