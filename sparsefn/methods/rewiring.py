"""Rewiring: a rule drops connections, and new connections are drawn instead."""

from __future__ import annotations

from typing import Literal

import optree
import torch
from torch import Tensor

from sparsefn.algorithms import drop_grow, iterative, static
from sparsefn.algorithms import set as plain_set
from sparsefn.algorithms.combine import sequence, with_terms
from sparsefn.core import random
from sparsefn.core.checks import check_int, described, number
from sparsefn.core.schedules import linear
from sparsefn.core.state import Algorithm, Level, State, Step, Trigger, Where
from sparsefn.core.tree import Tree
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import always, every
from sparsefn.masks.budgets.counts import below
from sparsefn.masks.budgets.distributions import Distribution, uniform
from sparsefn.masks.budgets.redistribute import survivors
from sparsefn.masks.scores import first_sign, magnitude, sampled, steered, topology
from sparsefn.optim.terms import l1, noise, on


@described
def deep_rewiring(
    sparsity: Level,
    *,
    alpha: float = 1e-5,
    std: float = 1e-5,
    where: Where = default_where,
    key: Tensor | None = None,
    distribution: Distribution = uniform(),
) -> Algorithm:
    """Deep rewiring: a connection whose sign would change goes, and another is drawn.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.deep_rewiring(0.5, std=0.0), sf.optimizers.sgd(1.0)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[0.5, -0.2, 0.3, -0.3]])})
    >>> state = algorithm.update(
    ...     state, {"w": torch.tensor([[0.7, -0.7, 0.7, -0.7]])}, 0
    ... )
    >>> int(state.masks["w"].sum()), bool((state.params["w"].abs() < 1e-5).all())
    (2, True)

    Args:
        sparsity: The sparsity over all leaves, a float, a 0-d tensor or a Schedule. It
            is exact at every step.
        alpha: The strength of an l1 term of the gradient, on the leaves that are
            sparsified.
        std: The standard deviation of Gaussian noise that the gradient has more there.
            In the paper the noise is sqrt(2 * lr * T) for a temperature T: with SGD,
            `std = sqrt(2 * T / lr)`.
        where: Which leaves are sparsified.
        key: The PRNG key of the draws. None: `sf.random.key(0)`.
        distribution: The share that each leaf keeps. Default: the same. With
            `sf.budgets.erk()` small leaves keep more, and survive at few weights.

    Returns:
        An algorithm whose masks change at every step. Use it with SGD without momentum.

    Raises:
        TypeError: `sparsity` is neither a float nor a schedule.
        ValueError: `sparsity` is outside [0, 1], or `std` is negative.

    The signs are taken from all weights at the start, pruned weights included. At every
    step the kept weights whose sign has changed are dropped, and as many weights that
    are not kept are drawn at random, just-dropped weights among them. Drawn weights
    start at 1e-12 with their sign, or at the smallest normal number of their dtype.

    Differs from the authors' code: 0 counts as a positive sign, and signs come from the
    weights, not from a draw of their own; dormant connections do not drift (soft
    DeepR).

    Verified by a worked example, identities (kept weights have the sign of the start;
    without noise, l1 and flips it has the bits of SGD), and laws.

    Bellec, Kappel, Maass and Legenstein 2018, arXiv 1711.05136.
    """
    number("alpha of deep_rewiring", alpha)
    draws = random.fold_in(random.key(0) if key is None else key, "noise")

    def tiny(state: State, grown: Tree, step: Step) -> Tree:
        return optree.tree_map(
            lambda sign: sign * max(1e-12, torch.finfo(sign.dtype).tiny),
            state.scores["drop"],
        )

    rewired = plain_set(
        sparsity,
        drop=first_sign(),
        drop_fraction=below(0.0),
        grown=tiny,
        restart_dropped=True,
        when=always(),
        where=where,
        key=key,
        distribution=distribution,
    )
    return with_terms(rewired, on(where, l1(alpha)), on(where, noise(std, draws)))


@described
def dsr(
    sparsity: Level,
    *,
    when: Trigger,
    target: int = 600,
    tau: float = 1e-3,
    where: Where = default_where,
    key: Tensor | None = None,
    distribution: Distribution = uniform(),
) -> Algorithm:
    """DSR: one threshold prunes all leaves, and weights grow where most survived.

    >>> algorithm = sf.methods.dsr(
    ...     0.5, when=sf.always(), target=2, tau=0.5, key=sf.random.key(0)
    ... )
    >>> state = algorithm.init({"a": torch.randn(6, 6), "b": torch.randn(6, 6)})
    >>> new = algorithm.update(state, state.params, 0)
    >>> int(new.masks["a"].sum() + new.masks["b"].sum()), new.scores["drop"]["next"]
    (36, tensor(0.2500, dtype=torch.float64))

    Args:
        sparsity: The sparsity over all leaves, a float, a 0-d tensor or a Schedule.
        when: The trigger at which masks change.
        target: How many weights are dropped: tau halves if there were more than 1.1 *
            target, and doubles if fewer than 0.9 * target.
        tau: The first threshold, above 0.
        where: Which leaves are sparsified.
        key: The PRNG key of the draws. None: `sf.random.key(0)`.
        distribution: The share that each leaf starts with. Default: the same; a small
            leaf that starts with few weights gets few. With `sf.budgets.erk()` it
            starts with more.

    Returns:
        The algorithm. The total over all leaves stays.

    Raises:
        TypeError: `sparsity` is neither a float nor a schedule, `target` not an int, or
            `when` not a trigger.
        ValueError: `sparsity` is outside [0, 1], `target` negative, `tau` not positive,
            or a sparsified leaf is a DTensor.

    Where `when` fires, kept weights with |w| <= tau are dropped, but for one of each
    leaf, and as many grow at random from zero, just-dropped ones not among them. Each
    leaf's share of the regrowth is the number of its weights that survived.

    Differs from the authors' code: shares of the regrowth are rounded by largest
    remainders, and their overflow goes to the other leaves at once; moments of dropped
    weights are cleared by `sf.with_optimizer`.

    Verified by worked examples (survivors 30 and 10 grow 6 and 2 of 8; tau after 700,
    500 and 600 of 600), identities (the total is constant, tau is halved, doubled or
    stays), and laws.

    Mostafa and Wang 2019, arXiv 1902.05967.
    """
    return plain_set(
        sparsity,
        drop=steered(when, target, tau=tau),
        drop_fraction=below(1.0, spare=1),
        exclude_dropped=True,
        redistribute=survivors,
        when=when,
        where=where,
        key=key,
        distribution=distribution,
    )


@described
def chts(
    sparsity: float | Tensor,
    *,
    steps: int,
    fraction: Level = 0.3,
    soft: bool = True,
    rule: Literal["CH2", "CH3"] = "CH2",
    when: Trigger = every(100),
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """CHTs: connections go and come by draws, new connections close short paths.

    >>> algorithm = sf.methods.chts(
    ...     0.5, steps=100, when=sf.always(), key=sf.random.key(0)
    ... )
    >>> state = algorithm.init({"w": torch.randn(8, 8)})
    >>> int(algorithm.update(state, state.params, 0).masks["w"].sum())
    32

    Args:
        sparsity: The sparsity of each leaf, a float or a 0-d tensor.
        steps: The length of the run: draws are by |w|^T with T = 1 + 2 * step / steps.
        fraction: The share of a leaf's weights that is replaced.
        soft: Whether weights are drawn. False keeps the largest weights and grows the
            best scores instead, as CHT does.
        rule: The rule of `sf.scores.topology`.
        when: The trigger at which masks change.
        where: Which leaves are sparsified.
        key: The PRNG key of the draws. None: `sf.random.key(0)`.

    Returns:
        An algorithm that reads no gradients.

    Raises:
        TypeError: `sparsity` or `fraction` is not a float, or `steps` not an int.
        ValueError: `sparsity` or `fraction` is outside [0, 1], `steps` is below 1, or
            `rule` is another.

    Where `when` fires, each leaf keeps a share 1 - fraction of its weights, drawn
    without replacement; then as many grow as there were, drawn by the Cannistraci-Hebb
    score of the masks that are left. An entry whose score is 0 has 1e-5. Grown weights
    start at zero.

    Differs from the authors' code: units that lost all inputs or all outputs keep the
    connections of their other side (no chain removal), a leaf never stops to change,
    masks start at random, and an entry that scores 0 has 1e-5 in every draw, not only
    where too few other entries are left.

    Verified by recordings (the scores of 6 cases), a worked example, identities (kept
    entries score 0, permuted units have permuted scores), and laws.

    Zhang et al. 2025, arXiv 2501.19107; CHT: Zhang et al. 2024 (ICLR).
    """
    check_int("chts", "steps", steps, 1)
    hard = topology(rule, 1e-5 if soft else 0.0)
    drop = sampled(magnitude, linear(1.0, 2.0 / steps)) if soft else magnitude
    start = static(sparsity, where=where, key=key)
    prune = iterative(fraction, score=drop, when=when, where=where, key=key, init=start)
    grow = sampled(hard) if soft else hard
    regrow = drop_grow(
        sparsity,
        drop=magnitude,
        grow=grow,
        drop_fraction=0.0,
        when=when,
        where=where,
        key=key,
        init=start,
    )
    return sequence(prune, regrow)
