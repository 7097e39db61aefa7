"""Pruning to n of every m weights, which some hardware multiplies faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn.algorithms.combine.with_terms import with_terms
from sparsefn.algorithms.policy_masks import policy_masks
from sparsefn.algorithms.prune import one_shot, ste
from sparsefn.algorithms.reparam import mask_choices, nm_prox
from sparsefn.algorithms.reparametrised import reparametrised
from sparsefn.core import random
from sparsefn.core.checks import (
    check_int,
    check_positive,
    described,
    number,
    positive_pair,
)
from sparsefn.core.schedules import linear_decay
from sparsefn.core.state import Algorithm, Level, State, Step, Trigger, Where
from sparsefn.core.tree import Tree, wide
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import at
from sparsefn.masks import patterns
from sparsefn.optim import terms


@described
def sr_ste(
    n: int = 2,
    m: int = 4,
    *,
    decay: float = 2e-4,
    axis: int = 1,
    where: Where = default_where,
) -> Algorithm:
    """SR-STE: trains N:M weights from scratch, with a decay that keeps weights pruned.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.sr_ste(decay=0.1), sf.optimizers.sgd(0.1)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[3.0, -1.0, 0.5, 2.0]])})
    >>> algorithm.update(state, {"w": torch.ones(1, 4)}, 0).params
    {'w': tensor([[ 2.9000, -1.0900,  0.3950,  1.9000]])}

    Args:
        n: How many of every m weights the forward pass sees, the largest.
        m: How many consecutive weights compete.
        decay: The gradient of pruned weights has decay * weight more (eq. 8).
        axis: The axis of the inputs: 1 in a linear layer and in a convolution, whose
            groups of m then lie along its channels, 0 in the Conv1D of transformers.
        where: Which leaves are sparsified. Leave out a first convolution of 3 channels.

    Returns:
        An algorithm that chooses masks again after every step. All weights get the
        dense gradient.

    Raises:
        TypeError: `n`, `m` or `axis` is not an int.
        ValueError: n > m, or at `init` the axis of a leaf is not divisible by m.

    The decay is a part of the gradient, so it goes through the optimizer's momentum;
    weight decay of the optimizer comes on top.

    The authors' code does the same.

    Verified by recordings of the authors' weights and gradients (3 cases), a worked
    example, and the laws.

    Zhou, Ma, Zhu, Liu, Zhang, Yuan, Sun and Li 2021, arXiv 2102.04010.
    """
    return with_terms(
        ste(None, pattern=patterns.nm(n, m, axis), where=where),
        terms.pruned_decay(decay),
    )


@described
def asp(
    n: int = 2,
    m: int = 4,
    *,
    axis: int = 1,
    when: Trigger = at([0]),
    where: Where = default_where,
) -> Algorithm:
    """ASP: prunes a trained network to N:M by magnitude, once.

    >>> algorithm = sf.methods.asp()
    >>> state = algorithm.init({"w": torch.tensor([[4.0, -1.0, 2.0, -3.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[ 4.,  0.,  0., -3.]])}

    Args:
        n: How many of every m weights stay, the largest. They keep the largest sum of
            magnitudes of all N:M masks.
        m: How many consecutive weights compete.
        axis: The axis of the inputs: 1 in a linear layer and in a convolution, 0 in the
            Conv1D of transformers.
        when: The trigger that prunes.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense. Pruned weights stay 0.

    Raises:
        TypeError: `n`, `m` or `axis` is not an int.
        ValueError: n > m, or at `init` the axis of a leaf is not divisible by m.

    The paper then repeats the training, with the same learning rates and a fresh
    optimizer: `with_optimizer(asp(), optimizer)`. `sf.permutation.channels` finds an
    order of the inputs in which more magnitude is kept.

    Differs from the authors' code: where m does not divide an axis theirs pads it with
    zeros; leave such leaves out by `where`.

    Verified by the best of all masks by exhaustion, a worked example, and the laws.

    Mishra, Albericio Latorre, Pool, Stosic, Stosic, Venkatesh, Yu and Micikevicius
    2021, arXiv 2104.08378.
    """
    return one_shot(None, pattern=patterns.nm(n, m, axis), when=when, where=where)


@described
def maskllm(
    n: int = 2,
    m: int = 4,
    *,
    steps: int,
    prior: Tree | None = None,
    strength: float = 3.0,
    scale: tuple[float, float] = (100.0, 500.0),
    temperature: tuple[float, float] = (4.0, 0.05),
    norm: float = 1e-5,
    axis: int = 1,
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """MaskLLM: learns N:M masks of frozen weights, a Gumbel softmax over all of them.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.maskllm(1, 2, steps=50), sf.optimizers.adam(1e-2)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[2.0, 1.0]])})
    >>> for step in range(50):  # the second weight is the one that matters
    ...     grads = {"w": torch.tensor([[0.0, -5.0]])}
    ...     state = algorithm.update(state, grads, step)
    >>> sf.effective(sf.settled(algorithm, state))
    {'w': tensor([[0., 1.]])}

    Args:
        n: How many of every m weights are kept.
        m: How many consecutive weights compete. A group has C(m, n) masks, a logit
            each: 6 for 2 of 4, 70 for 4 of 8.
        steps: The length of the run, at least 1.
        prior: A masks tree to start near, as of `wanda` or `sparsegpt`. None: none.
        strength: Deviations of the first logits by which masks near `prior` lead.
        scale: What logits are multiplied with at the first step and at the last.
        temperature: Temperature of the softmax at the first step and at the last.
        norm: The loss gets -norm * (1 - step / steps) * sum of squares of the masked
            weights, so that large weights are kept and gradients do not vanish.
        axis: The axis of the inputs: 1 in a linear layer and in a convolution, 0 in the
            Conv1D of transformers.
        where: Which leaves get masks. Other leaves train: give them the rate 0 with
            `sf.optimizers.by_path` where they should not.
        key: The PRNG key of the draws. None: `sf.random.key(0)`.

    Returns:
        An algorithm whose weights are masked by a mean of masks in training, and in
        `sf.settled` by exactly n of m.

    Raises:
        TypeError: `steps` is not an int, `scale` or `temperature` is no pair of
            numbers, `norm` is no number, or `prior` no tree of bool masks.
        ValueError: `steps` is below 1, n > m, `strength` or `norm` is not finite,
            `scale` or `temperature` is not above 0, or, in `init`, m does not divide
            the axis of a leaf, or `prior` does not fit or prunes nothing.

    `sf.reparam.mask_choices` has the draws. Evaluate, report and save
    `sf.settled(algorithm, state)`.

    Differs from the authors' code: the deviation of the first logits is taken as 0.01,
    where theirs measures it, and one draw of a step serves all of its batches.

    Verified by recordings of the authors' masks and gradients (2 cases), a worked
    example, the gradient of its loss by autograd, the mask that exhaustion finds for a
    small layer, and the laws.

    Fang, Yin, Muralidharan, Heinrich, Pool, Kautz, Molchanov and Wang 2024,
    arXiv 2409.17481.
    """
    check_int("maskllm", "steps", steps, 1)
    first_scale, last_scale = positive_pair("scale of maskllm", scale)
    hot, cold = positive_pair("temperature of maskllm", temperature)
    number("norm of maskllm", norm)
    choices = mask_choices(
        patterns.nm(n, m, axis),
        scale=linear_decay(first_scale, steps, last_scale),
        temperature=linear_decay(hot, steps, cold),
        prior=prior,
        strength=strength,
    )
    seed = random.key(0) if key is None else key
    share = linear_decay(norm, steps)

    def larger_weights(state: State, step: Step) -> Tree:
        latents = state.scores["latent"]
        drawn_at = state.scores["step"]

        def lost(trained: Tree, step: Step) -> Tensor:
            squares = torch.zeros((), device="cpu")
            if norm == 0:  # no second draw of the masks
                return squares
            made = {**latents, **trained["latent"]}
            for weight in choices.apply(made, drawn_at, seed)[0].values():
                squares = squares + weight.square().sum()
            return -share(step) * squares

        return terms.penalty(lost)(state, step)

    return with_terms(reparametrised(choices, where=where, key=key), larger_weights)


@described
def prox_sparse(
    strength: Level,
    n: int = 2,
    m: int = 4,
    *,
    frozen: float = 0.0,
    epsilon: float = 0.5,
    axis: int = 1,
    where: Where = default_where,
) -> Algorithm:
    """ProxSparse: learns N:M masks by proximal steps of weights that are put back.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.prox_sparse(0.3, 1, 2), sf.optimizers.sgd(0.1)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[2.0, 1.5]])})
    >>> for step in range(5):  # the second weight is the one that matters
    ...     grads = {"w": torch.tensor([[0.0, -2.0]])}
    ...     state = algorithm.update(state, grads, step)
    >>> sf.effective(sf.settled(algorithm, state))
    {'w': tensor([[0.0000, 1.5000]])}

    Args:
        strength: Factor of the penalty in each step, a float or a schedule. The
            authors' models have 0.2 to 25.
        n: How many of every m weights are kept, 1 or 2.
        m: How many consecutive weights compete. The time of a step grows as m^4.
        frozen: Factor of the frozen weight regulariser, which keeps trained weights
            near the first ones. 0: without it.
        epsilon: Added to the size of the first weights in that regulariser, above 0.
        axis: The axis of the inputs: 1 in a linear layer and in a convolution, 0 in the
            Conv1D of transformers.
        where: Which leaves get masks. Other leaves train: give them the rate 0 with
            `sf.optimizers.by_path` where they should not.

    Returns:
        An algorithm whose weights train, drawn towards n of m, and are in `sf.settled`
        the first weights under the mask of the n largest trained ones.

    Raises:
        TypeError: `strength` is neither a float nor a schedule, or `frozen` or
            `epsilon` no number.
        ValueError: n is not 1 or 2, n > m, `strength` is below 0, `frozen` is not
            finite, `epsilon` is not above 0, or, in `init`, m does not divide the axis
            of a leaf.

    After the optimizer's step each group of trained weights v becomes the x with the
    smallest |x - v|^2 / 2 + strength * (|x1 x2 x3| + |x2 x3 x4| + |x3 x4 x1| + |x4 x1
    x2|), for 2 of 4: `sf.reparam.nm_prox`. With the first weights W the loss gets
    frozen * the sum of squares of v / (W + epsilon * sign(W)) * (v - W), which is 0
    where v is 0 or W; sign(0) is 1. Evaluate, report and save `sf.settled(algorithm,
    state)`.

    Differs from the authors' code: the smallest x is exact, where theirs alternates
    over the weights from 0 and may end elsewhere (in about 4 of 1000 random groups),
    and n and m may be other than 2 and 4. As in theirs, `strength` is not multiplied
    with the learning rate.

    Verified by recordings of the authors' proximal operator and regulariser (5 cases),
    brute force, a worked example, and the laws.

    Liu, Saha, Jia, Park, Huang, Sabach, Wang and Karypis 2025, arXiv 2502.00258.
    """
    number("frozen of prox_sparse", frozen)
    check_positive("epsilon", number("epsilon of prox_sparse", epsilon))

    def frozen_weights(state: State, step: Step) -> Tree:
        first = state.scores["latent"]["base"]

        def distance(trained: Tree, step: Step) -> Tensor:
            total = torch.zeros((), device="cpu")
            for path, weight in trained["latent"].get("latent", {}).items():
                w = wide(first[path])
                v = wide(weight)
                ratio = v / (w + epsilon * torch.where(w < 0, -1.0, 1.0))
                total = total + (ratio * (v - w)).square().sum()
            return frozen * total

        return terms.penalty(distance)(state, step)

    proximal = nm_prox(strength, patterns.nm(n, m, axis))
    return with_terms(reparametrised(proximal, where=where), frozen_weights)


@described
def maskpro(
    n: int = 2,
    m: int = 4,
    *,
    loss: Callable[[Tree], Tensor] | None = None,
    prior: Tree | None = None,
    scale: float = 10.0,
    decay: float = 0.99,
    axis: int = 1,
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """MaskPro: learns N:M masks of frozen weights from losses, without a backward pass.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.maskpro(1, 2, scale=1.0), sf.optimizers.sgd(1.0)
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
        n: How many of every m weights are kept.
        m: How many consecutive weights compete. A group has m logits.
        loss: Function of the tree that `update` gets as gradients, which gives the loss
            of the step, a 0-d tensor: in the paper, the loss under the masks minus the
            loss of the same batch under `prior`. None: the leaf at the path "loss".
        prior: A masks tree with n of m to start from, as of `wanda` or `sparsegpt`.
            None: the largest weights.
        scale: First logit of the weights that `prior` keeps. The others start at 0.
        decay: Factor of the old baseline in the new one.
        axis: The axis of the inputs: 1 in a linear layer and in a convolution, 0 in the
            Conv1D of transformers.
        where: Which leaves get masks.
        key: The PRNG key of the draws. None: `sf.random.key(0)`.

    Returns:
        An algorithm whose weights never change, and whose masks are drawn at each step;
        in `sf.settled` they are the n largest logits of each group.

    Raises:
        TypeError: `loss` is no function of one argument, `prior` no tree of bool masks,
            or `scale` or `decay` no number.
        ValueError: n > m, `scale` is not finite, `decay` is outside [0, 1], or, in
            `init`, m does not divide the axis of a leaf, or `prior` does not fit or
            does not keep n of m, or, in an update, there is no loss.

    Only the loss of the gradients is read, so a forward pass is enough: the other
    gradients may be zeros. The authors' runs have sgd with the rate 50 and 10,000
    steps. `sf.policy_masks` has the equations. Evaluate, report and save
    `sf.settled(algorithm, state)`.

    Differs from the authors' code: n and m may be other than 2 and 4, chances are
    divided by their sum where some are below 1e-8, and leaves without a mask do not
    change either.

    Verified by recordings of the authors' updates (2 cases), all masks of small groups,
    whose expected gradient is the gradient of the expected loss, a worked example, and
    the laws.

    Sun, Zhang, Yu, Zhang, Shen and Tao 2025, arXiv 2506.12876.
    """
    return policy_masks(
        patterns.nm(n, m, axis),
        loss=loss,
        prior=prior,
        scale=scale,
        decay=decay,
        where=where,
        key=key,
    )
