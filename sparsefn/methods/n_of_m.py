"""Pruning to n of every m weights, which some hardware multiplies faster."""

from __future__ import annotations

from sparsefn.algorithms.combine.with_terms import with_terms
from sparsefn.algorithms.prune import one_shot, ste
from sparsefn.core.checks import described
from sparsefn.core.state import Algorithm, Trigger, Where
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
