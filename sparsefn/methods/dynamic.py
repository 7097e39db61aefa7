"""Dynamic sparse training: the masks move while the weights train."""

from __future__ import annotations

import optree
from torch import Tensor

from sparsefn.algorithms import gmp, rigl, set, static, ste
from sparsefn.algorithms.combine import chain, sequence, with_terms
from sparsefn.algorithms.start import Init
from sparsefn.core.checks import check_sparsity, described
from sparsefn.core.rounding import as_fraction, fraction_at
from sparsefn.core.schedules import cosine_decay, polynomial
from sparsefn.core.state import Algorithm, Level, State, Step, Trigger, Where
from sparsefn.core.tree import Tree
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import always, every
from sparsefn.masks.budgets.distributions import erk, global_
from sparsefn.masks.scores import magnitude
from sparsefn.optim.terms import l2, pruned_decay


@described
def granet(
    sparsity: float | Tensor,
    *,
    steps: int,
    initial: float = 0.5,
    drop_fraction: float = 0.5,
    when: Trigger = every(1000),
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """GraNet: gradual pruning, in which each leaf also replaces its smallest weights.

    >>> algorithm = sf.methods.granet(
    ...     0.9, steps=4, when=sf.every(2), key=sf.random.key(0)
    ... )
    >>> state = algorithm.init({"a": torch.randn(10, 20), "b": torch.randn(20, 15)})
    >>> for step in range(5):
    ...     state = algorithm.update(
    ...         state, {"a": torch.randn(10, 20), "b": torch.randn(20, 15)}, step
    ...     )
    ...     print(round(1 - float(sf.masks.sparsity(state.masks)), 3))
    0.5
    0.5
    0.15
    0.15
    0.1

    Args:
        sparsity: The sparsity at step `steps`, over all leaves together.
        steps: The step at which the sparsity has risen and the fraction has fallen.
        initial: The first sparsity. The first masks are random, with ERK shares; 0.0
            starts dense.
        drop_fraction: The first fraction of each leaf's weights that is replaced.
        when: The trigger at which masks change. The paper has every 1000 steps on CIFAR
            and every 4000 on ImageNet.
        where: Which leaves are sparsified.
        key: The PRNG key of the first masks. None: `sf.random.key(0)`.

    Returns:
        The algorithm.

    Raises:
        TypeError: `sparsity` or `drop_fraction` is not a float, or `steps` is no
            number.
        ValueError: `sparsity` or `drop_fraction` is outside [0, 1], or `steps` not
            positive.

    Where `when` fires, the largest weights of all leaves together are kept, with a
    sparsity that rises as 1 - (1 - t)^3; then every leaf drops a fraction of its
    smallest weights and grows as many where the gradient is largest, at zero. The
    fraction falls to 0 as half a cosine wave.

    Differs from the authors' code: counts are rounded half to even, theirs are
    truncated in the first stage and rounded up in the second; the fraction falls to 0,
    theirs to 0.005.

    Verified by recordings (masks and weights of 2 updates, by the two parts with their
    counts), an identity (each leaf keeps as many as after the first stage), and laws.

    Liu et al. 2021, arXiv 2106.10404.
    """
    check_sparsity(drop_fraction, "drop_fraction")
    start: Init = (
        static(initial, distribution=erk(), where=where, key=key)
        if initial
        else "dense"
    )
    rising = polynomial(initial, check_sparsity(sparsity), begin=0, end=steps)
    prune = gmp(
        rising, when=when, where=where, distribution=global_(), init=start, key=key
    )
    regrow = rigl(
        "current",
        drop_fraction=cosine_decay(drop_fraction, steps),
        when=when,
        where=where,
        key=key,
    )
    return sequence(prune, regrow)


@described
def mest(
    sparsity: Level,
    *,
    extra: Level,
    when: Trigger,
    soft: bool = False,
    gradient: float = 0.0,
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """MEST: prunes more weights than the sparsity asks for, and grows some at random.

    >>> algorithm = sf.methods.mest(
    ...     0.9, extra=0.02, when=sf.always(), key=sf.random.key(0)
    ... )
    >>> state = algorithm.init({"w": torch.randn(10, 10)})
    >>> new = algorithm.update(state, state.params, 0)
    >>> int(new.masks["w"].sum()), int((new.masks["w"] & (new.params["w"] == 0)).sum())
    (10, 2)

    Args:
        sparsity: The sparsity of each leaf, a float, a 0-d tensor or a Schedule.
        extra: How much more is pruned, as `sparsity`. It falls to 0 during training,
            and masks then stay as they are. A sum or difference outside of [0, 1] is
            clamped.
        when: The trigger at which masks change.
        soft: The soft memory bound (EM&S): weights are pruned to `sparsity` and grow to
            `sparsity - extra`, which is also where training starts.
        gradient: The weight of the gradient in the score |w| + gradient * |g|.
        where: Which leaves are sparsified.
        key: The PRNG key of the draws. None: `sf.random.key(0)`.

    Returns:
        The algorithm.

    Raises:
        TypeError: `sparsity` or `extra` is neither a float nor a schedule.
        ValueError: `sparsity` or `extra` is outside [0, 1].

    Elastic mutation (EM): where `when` fires, weights are pruned to `sparsity + extra`
    and grow at random, from zero, to `sparsity`. The authors' scripts for a sparsity of
    0.9 change masks every 5 epochs, with `extra=sf.schedules.piecewise({0: 0.02, 90 *
    E: 0.01, 120 * E: 0.0})` for epochs of E steps, and 0.05, 0.025 and 0 with `soft`.

    Differs from the authors' code: counts are exact where scores tie, and moments of
    pruned weights are cleared by `sf.with_optimizer`.

    Verified by worked examples (10 of 100 weights, then 8, then 10; |w| + |g| drops
    another weight than |w|), an identity (without `extra` an update changes nothing),
    and laws.

    Yuan et al. 2021, arXiv 2110.14032.
    """
    level = as_fraction(sparsity)
    more = as_fraction(extra, "extra")

    def upper(step: Step) -> float | Tensor:
        if soft:
            return level(step)
        return level(step) + more(step)

    def lower(step: Step) -> float | Tensor:
        if soft:
            return level(step) - more(step)
        return level(step)

    def importance(state: State, grads: Tree, step: Step) -> Tree:
        return optree.tree_map(
            lambda w, g: w.abs() + gradient * g.abs(), state.params, grads
        )

    start = static(fraction_at(lower, 0), where=where, key=key)
    prune = gmp(
        upper,
        score=importance if gradient else magnitude,
        when=when,
        where=where,
        init=start,
        key=key,
    )
    return sequence(
        prune, set(lower, drop_fraction=0.0, when=when, where=where, key=key)
    )


@described
def top_kast(
    sparsity: float | Tensor,
    *,
    backward: Level,
    decay: float = 1e-4,
    when: Trigger = always(),
    where: Where = default_where,
) -> Algorithm:
    """Top-KAST: the largest weights run, and a larger set of weights trains.

    >>> algorithm = sf.methods.top_kast(0.75, backward=0.25, decay=0.01)
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.view.support(state), sf.effective(state)
    ({'w': tensor([[ True,  True,  True, False]])}, {'w': tensor([[4., 0., 0., 0.]])})
    >>> algorithm.view.grads(state, {"w": torch.ones(1, 4)}, 0)
    {'w': tensor([[1.0400, 1.1200, 1.0800, 0.0000]])}

    Args:
        sparsity: The sparsity of A, the largest weights of each leaf, with which the
            model runs. D = 1 - sparsity of the weights are in A.
        backward: The sparsity of B, which holds A: its weights train, with the gradient
            at the effective weights. A Schedule that rises to `sparsity` ends
            exploration.
        decay: The coefficient of an L2 term of the loss on A and on leaves that are not
            sparsified. On the rest of B it is `decay / D`, so that weights must earn
            their place.
        when: The trigger at which A and B are chosen again, by the magnitudes of all
            weights.
        where: Which leaves are sparsified.

    Returns:
        The algorithm. In memory all weights are stored, with masks for A and B.

    Raises:
        TypeError: `sparsity` or `backward` is not a float.
        ValueError: `sparsity` is 1.0, or a sparsity is outside [0, 1].

    Weights outside B keep their values and their moments are zero.

    The paper published no code.

    Verified by a worked example, identities (A lies in B, what lies outside B keeps its
    bits, with D = 1 and B = A it is dense training), and laws, one of which is about B.

    Jayakumar et al. 2020, arXiv 2106.03517.
    """
    check_sparsity(sparsity)
    if isinstance(sparsity, float) and sparsity == 1.0:
        raise ValueError(
            "top_kast: expected a sparsity below 1.0, which keeps weights to train, "
            "got 1.0"
        )
    trained = gmp(backward, when=when, where=where, pruned="keep", regrow=True)
    explored = decay / (1 - sparsity) - decay
    return with_terms(
        chain(trained, ste(sparsity, when=when, where=where)),
        l2(decay),
        pruned_decay(explored),
    )
