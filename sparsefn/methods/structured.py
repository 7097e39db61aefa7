"""Structured pruning: whole filters, or other units, which `sf.shrink` then removes; n of every m weights."""

from __future__ import annotations

import math

import optree
import torch
from torch import Tensor

from sparsefn import patterns, scores
from sparsefn.algorithms.prune import gmp, iterative, one_shot, ste
from sparsefn.algorithms.rewrite import rewrite
from sparsefn.budgets.distributions import global_
from sparsefn.compose.sequence import sequence
from sparsefn.compose.with_terms import with_terms
from sparsefn.engine.checks import check_int, described
from sparsefn.engine.sums import Pooling
from sparsefn.optimizers import terms
from sparsefn.patterns.kinds import Pattern, unstructured
from sparsefn.patterns.units import from_rows, to_rows, units_of
from sparsefn.state import Algorithm, Level, State, Step, Trigger, Where
from sparsefn.timing.schedules import as_schedule
from sparsefn.timing.triggers import always, at, every
from sparsefn.tree import Tree, wide
from sparsefn.tree.chosen import default_where

_LENGTH, _SUM = Pooling("norm", 2), Pooling("sum")


@described
def taylor(
    count: int | Tensor = 100,
    *,
    when: Trigger = every(30, start=29),
    axis: int = 0,
    where: Where = default_where,
) -> Algorithm:
    """Taylor-FO: prunes the filters whose removal changes the loss least to first order, some at a time.

    >>> algorithm = sf.methods.taylor(1, when=sf.at([1]))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, -1.0], [2.0, 1.0]])})
    >>> for step in range(2):
    ...     state = algorithm.update(state, {"w": torch.tensor([[0.5, 0.5], [0.2, 0.1]])}, step)
    >>> state.params
    {'w': tensor([[0., 0.],
            [2., 1.]])}

    The score of a filter is (sum of weight * gradient)^2, averaged over the steps since filters were pruned
    last. Where `when` fires, the `count` lowest filters of all leaves together are pruned; the others train on. 100
    filters every 30 batches are those of the authors. `every(30, start=29, stop=1000)` ends it, and a `count` that is a
    0-d tensor is clamped to what is left. `axis` is that of the outputs: `sf.modules.channel_axis` knows it. Choose the
    leaves by `where`: the outputs of the last layer are classes.

    ValueError for an int count above what is left.

    Differs from the authors' code: it adds up a filter before it squares, as the paper says, where theirs adds up
    squares, which is the same for gates of one number; inside `with_optimizer` the weights of a score are those after
    the optimizer's step.

    Verified by a worked example in which the sum of squares prunes the other filter, brute force over batches, the
    shrunk model that has the outputs of the masked one, and the laws.

    Molchanov, Mallya, Tyree, Frosio and Kautz 2019, arXiv 1906.10771.
    """
    unit = scores.by_unit(scores.movement, patterns.channel(axis), _squared_sum)
    return iterative(
        count=count,
        when=when,
        score=scores.mean(unit, reset=when),
        where=where,
        pattern=patterns.channel(axis, norm=math.inf),
        distribution=global_(),
    )


def _squared_sum(rows: Tensor) -> Tensor:
    return _SUM(rows).square()


@described
def slimming(sparsity: Level, where: Where, *, steps: int, strength: float = 1e-4) -> Algorithm:
    """Network slimming: trains the scales of batch norms with an l1 term, then prunes the smallest of all layers.

    >>> algorithm = sf.with_optimizer(sf.methods.slimming(0.5, "*.weight", steps=2), sf.optimizers.sgd(0.1))
    >>> params = {"1.weight": torch.tensor([0.5, -0.1]), "4.weight": torch.tensor([0.3, 0.05])}
    >>> state = algorithm.init(params)
    >>> for step in range(2):
    ...     state = algorithm.update(state, {path: torch.zeros(2) for path in params}, step)
    >>> state.params
    {'1.weight': tensor([0.5000, 0.0000]), '4.weight': tensor([0.3000, 0.0000])}

    `where` chooses the scales: a glob such as "*.bn*.weight". Their gradient gets strength * sign(scale) (eq. 1). The
    last of `steps` steps prunes them by |scale|, with one threshold for the whole network; from then on the rest is
    fine-tuned, without the l1 term. `sf.shrink(model, state, example)` removes the channels.

    ValueError for a glob that matches no path; TypeError or ValueError for what is no number of steps.

    Differs from the authors' code: exactly as many scales are kept as the sparsity says; and the shifts of pruned
    scales stay, where theirs sets them to 0. `shrink` adds what they give to the next layer.

    Verified by a worked example, the shrunk model that has the outputs of the masked one, and the laws.

    Liu, Li, Shen, Huang, Yan and Zhang 2017, arXiv 1708.06519.
    """
    check_int("slimming", "steps", steps, 1)
    l1 = terms.on(where, terms.l1(strength))

    def before(state: State, step: Step) -> Tree:
        return optree.tree_map(lambda x: x * (step < steps), l1(state, step))

    return with_terms(one_shot(sparsity, when=at([steps - 1]), where=where, distribution=global_()), before)


@described
def fpgm(sparsity: Level, *, epoch: int, steps: int, axis: int = 0, where: Where = default_where) -> Algorithm:
    """FPGM: sets the filters nearest to the geometric median of their layer to zero after each epoch, and trains on.

    >>> algorithm = sf.methods.fpgm(1 / 5, epoch=10, steps=20)
    >>> state = algorithm.init({"w": torch.tensor([[0.0], [2.0], [3.0], [10.0], [11.0]])})
    >>> state = algorithm.update(state, state.params, 9)
    >>> state.params["w"].T, state.masks["w"].all()
    (tensor([[ 0.,  2.,  0., 10., 11.]]), tensor(True))
    >>> algorithm.update(state, state.params, 19).masks["w"].T
    tensor([[ True, False,  True,  True,  True]])

    In each leaf these are the filters with the smallest sum of distances to the others (eq. 4 and 5). After the last
    step of each epoch they are chosen anew, set to 0 and trained further, so that they may recover: masks stay open.
    The last choice, at the end of the last whole epoch of `steps`, is for good, and `sf.shrink` removes its filters.
    `epoch=1, steps=1` prunes a trained network once. `axis` is that of the outputs. Choose the leaves by `where`: the
    outputs of the last layer are classes.

    TypeError or ValueError for what is no number of steps, ValueError for an epoch longer than all steps.

    Differs from the authors' code: exactly as many filters are pruned as the sparsity says, where theirs truncates, and
    all compete, where theirs may leave out some of small norm first.

    Verified by recordings of the filters that the authors' code prunes (1 case), a worked example, the shrunk model
    that has the outputs of the masked one, and the laws.

    He, Liu, Wang, Hu and Yang 2019, arXiv 1811.00250.
    """
    check_int("fpgm", "epoch", epoch, 1)
    check_int("fpgm", "steps", steps, epoch)
    last = steps // epoch * epoch - 1
    prune = gmp(
        sparsity,
        score=scores.distance(axis=axis),
        when=every(epoch, start=epoch - 1, stop=last + 1),
        where=where,
        pattern=patterns.channel(axis, norm=math.inf),
        init="dense",
        regrow=True,
    )
    if last < epoch:
        return prune
    reopen = gmp(0.0, when=every(epoch, start=epoch - 1, stop=last), where=where, init="dense", regrow=True)
    return sequence(prune, reopen)


@described
def proximal(
    strength: float,
    *,
    rate: Level,
    pattern: Pattern = unstructured(),
    when: Trigger = always(),
    where: Where = default_where,
) -> Algorithm:
    """Proximal gradient: after each step shrinks weights, or whole units, towards zero, and those that reach it are 0.

    >>> algorithm = sf.with_optimizer(sf.methods.proximal(1.0, rate=0.5), sf.optimizers.sgd(0.5))
    >>> state = algorithm.init({"w": torch.tensor([[2.0, -0.25, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[1.0, 0.0, 1.0]])}, 0).params
    {'w': tensor([[1., 0., 0.]])}
    >>> algorithm = sf.methods.proximal(1.0, rate=2.5, pattern=sf.patterns.channel(0))
    >>> state = algorithm.init({"w": torch.tensor([[3.0, 4.0], [1.0, 2.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[1.5000, 2.0000],
            [0.0000, 0.0000]])}

    This is gradient descent on the loss plus strength * sum |w|: w becomes sign(w) * max(|w| - rate * strength, 0),
    where `rate` is the learning rate, a number or a schedule. With a pattern such as `channel(0)` it is group lasso,
    strength * the sum of the lengths of all units: a unit u becomes u * max(1 - rate * strength / |u|, 0). Pruned
    weights have their gradient, too, and come back where it is larger than the strength. Nothing says how sparse the
    result is.

    TypeError or ValueError for what is no rate.

    Differs from the authors' code: this is the proximal step of sgd; theirs also weighs it for adaptive optimizers.

    Verified by the conditions of the optimum at the fixed point, for lasso and group lasso, a worked example, and the
    laws.

    Deleu and Bengio 2021, arXiv 2102.03869.
    """
    size_of_step = as_schedule(rate)

    def step_towards_zero(path: str, weight: Tensor, mask: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        units, limit, w = units_of(pattern, tuple(weight.shape)), size_of_step(step) * strength, wide(weight)
        length = w.abs() if units.single else from_rows(units, to_rows(units, w, _LENGTH))
        kept = length > limit
        return torch.where(kept, w - limit * (w / length), 0.0).to(weight.dtype), kept

    return rewrite(step_towards_zero, when=when, where=where, pruned="train")


@described
def sr_ste(n: int = 2, m: int = 4, *, decay: float = 2e-4, axis: int = 1, where: Where = default_where) -> Algorithm:
    """SR-STE: trains N:M weights from scratch; pruned weights get the gradient too, and a decay that keeps them pruned.

    >>> algorithm = sf.with_optimizer(sf.methods.sr_ste(decay=0.1), sf.optimizers.sgd(0.1))
    >>> state = algorithm.init({"w": torch.tensor([[3.0, -1.0, 0.5, 2.0]])})
    >>> algorithm.update(state, {"w": torch.ones(1, 4)}, 0).params
    {'w': tensor([[ 2.9000, -1.0900,  0.3950,  1.9000]])}

    The forward pass sees the n largest of every m weights along `axis`, chosen anew after every step. All weights get
    the dense gradient, and pruned ones decay * weight besides (eq. 8). This is a part of the gradient, so it goes
    through the optimizer's momentum; weight decay of the optimizer comes on top. Axis 1 is that of the inputs in a
    linear layer and in a convolution, whose groups of m then lie along its channels. It is 0 in the Conv1D of
    transformers.

    ValueError for n > m, and at `init` for a leaf whose axis is not divisible by m, such as a first convolution of 3
    channels: leave it out by `where`.

    The authors' code does the same.

    Verified by recordings of the authors' weights and gradients (3 cases), a worked example, and the laws.

    Zhou, Ma, Zhu, Liu, Zhang, Yuan, Sun and Li 2021, arXiv 2102.04010.
    """
    return with_terms(ste(None, pattern=patterns.nm(n, m, axis), where=where), terms.pruned_decay(decay))


@described
def asp(n: int = 2, m: int = 4, *, axis: int = 1, when: Trigger = at([0]), where: Where = default_where) -> Algorithm:
    """ASP: prunes a trained network to N:M by magnitude, once, to be trained again under these masks.

    >>> algorithm = sf.methods.asp()
    >>> state = algorithm.init({"w": torch.tensor([[4.0, -1.0, 2.0, -3.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[ 4.,  0.,  0., -3.]])}

    Where `when` fires, the n largest of every m weights along `axis` stay, which keep the largest sum of magnitudes of
    all N:M masks; pruned weights stay 0. The paper then repeats the training, with the same learning rates and an
    optimizer that starts anew: `with_optimizer(asp(), optimizer)`. Axis 1 is that of the inputs in a linear layer and
    in a convolution; it is 0 in the Conv1D of transformers. `sf.permutation.channels` finds an order of the inputs in
    which more magnitude is kept.

    ValueError for n > m, and at `init` for a leaf whose axis is not divisible by m.

    Differs from the authors' code: where m does not divide an axis theirs pads it with zeros; leave such leaves out by
    `where`.

    Verified by the best of all masks by exhaustion, a worked example, and the laws.

    Mishra, Albericio Latorre, Pool, Stosic, Stosic, Venkatesh, Yu and Micikevicius 2021, arXiv 2104.08378.
    """
    return one_shot(None, pattern=patterns.nm(n, m, axis), when=when, where=where)
