"""Lottery tickets: prune, go back to an early step, train again."""

from __future__ import annotations

from sparsefn.algorithms import iterative
from sparsefn.budgets import global_
from sparsefn.compose import rewinding
from sparsefn.engine.described import described
from sparsefn.state import Algorithm, Level, Trigger, Where
from sparsefn.triggers import never
from sparsefn.where import default_where


@described
def imp(fraction: Level = 0.2, *, when: Trigger, to: Trigger = never(), where: Where = default_where) -> Algorithm:
    """IMP: rounds that train, prune the smallest remaining weights, and go back to the weights of an early step.

    >>> rounds = sf.every(2, start=2)
    >>> ticket = sf.methods.imp(0.5, when=rounds)
    >>> algorithm = sf.with_optimizer(ticket, sf.optimizers.sgd(1.0), reset=rounds)
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0, 3.0, 4.0]])})
    >>> for step in range(5):
    ...     state = algorithm.update(state, {"w": torch.tensor([[-3.0, 0.0, 0.0, 3.0]])}, step)
    ...     print(state.params["w"])
    tensor([[4., 2., 3., 1.]])
    tensor([[ 7.,  2.,  3., -2.]])
    tensor([[1., 0., 0., 4.]])
    tensor([[4., 0., 0., 1.]])
    tensor([[1., 0., 0., 0.]])

    Where `when` fires, `fraction` of the weights that remain is pruned by magnitude, over all leaves together, and the
    rest gets the values back that it had where `to` last fired: after k + 1 steps of the optimizer for `sf.at([k])`, at
    the start for `sf.never()`. The optimizer must start again there, too: `reset=when`. A schedule of the learning rate
    follows `state.opt.count`, which restarts. Without `reset` and without rewinding it is `sf.iterative`, fine-tuning.

    Raises ValueError for a fraction outside [0, 1], and TypeError for a trigger that is no function.

    Differs from the authors' code: the count is rounded, theirs is rounded up and prunes one more where it drops
    everything up to a threshold.

    Verified by recordings (the masks of 2 runs of 3 to 6 levels of open_lth, with its counts), a worked example,
    identities (masks are nested; after a round params are the early weights under the mask, and moments are those of a
    fresh optimizer), and laws.

    Frankle and Carbin 2019, arXiv 1803.03635; rewinding to a later step: Frankle et al. 2020, arXiv 1912.05671.
    """
    return rewinding(iterative(fraction, when=when, where=where, distribution=global_()), to=to, when=when)
