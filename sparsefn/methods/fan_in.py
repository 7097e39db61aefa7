"""Dynamic sparse training in which every neuron has as many weights as any other."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparsefn._engine.leaves import as_tensor_on
from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import CountsByName
from sparsefn.algorithms import gmp, rigl, static
from sparsefn.algorithms.combine import chain, sequence
from sparsefn.algorithms.start import Init
from sparsefn.core.checks import check_sparsity, described
from sparsefn.core.rounding import as_fraction, fraction_at
from sparsefn.core.schedules import cosine_decay
from sparsefn.core.state import Algorithm, Level, State, Step, Trigger, Where
from sparsefn.core.timetable import pace
from sparsefn.core.tree import Tree
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import every
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.budgets.distributions import n_kept, rounded, rounded_down
from sparsefn.masks.patterns import channel, row_balanced
from sparsefn.masks.scores import by_unit
from sparsefn.masks.scores.per_leaf import of_sparsified
from sparsefn.masks.select import topk_mask


@described
def srigl(
    sparsity: float | Tensor,
    *,
    steps: int,
    ablation: float = 0.3,
    ablate: Where = default_where,
    drop_fraction: Level | None = None,
    when: Trigger | None = None,
    where: Where = default_where,
    key: Tensor | None = None,
    init: Init = "random",
) -> Algorithm:
    """SRigL: RigL in which every neuron keeps equally many weights, or none.

    >>> weights = torch.tensor(
    ...     [
    ...         [5.0, 4.0, 0.0, 0.0],
    ...         [1.0, 0.9, 0.0, 0.0],
    ...         [0.1, 0.2, 0.0, 0.0],
    ...         [6.0, 0.0, 2.5, 0.0],
    ...     ]
    ... )
    >>> grads = torch.tensor(
    ...     [[0.0, 0, 9, 8], [0, 0, 0.7, 0.2], [0, 0, 0.05, 0.04], [0, 0.3, 0, 0.6]]
    ... )
    >>> algorithm = sf.methods.srigl(
    ...     0.5, steps=1000, drop_fraction=0.5, init={"w": weights != 0}
    ... )
    >>> algorithm.update(algorithm.init({"w": weights}), {"w": grads}, 0).masks[
    ...     "w"
    ... ].int()
    tensor([[1, 1, 0, 0],
            [0, 0, 1, 1],
            [0, 0, 0, 0],
            [1, 0, 1, 0]], dtype=torch.int32)

    Args:
        sparsity: The sparsity of each leaf, a float or a 0-d tensor.
        steps: The length of the run.
        ablation: A neuron, which is a row of the leaf, with fewer than max(1, ablation
            * fan-in) salient entries is ablated. 0.0 ablates none.
        ablate: Which leaves lose neurons; leave the last layer out.
        drop_fraction: The fraction of weights that a leaf drops. None: it falls from
            0.3 to 0 as half a cosine wave, in the first three quarters of `steps`.
        when: The trigger at which masks change. None: every 100 steps (in a run below
            10,000, every hundredth part of it) in the first three quarters of `steps`.
        where: Which leaves are sparsified.
        key: The PRNG key of the first masks. None: `sf.random.key(0)`.
        init: The first masks, as for `sf.static`.

    Returns:
        The algorithm. Biases of ablated neurons stay, so that such a neuron is a
        constant.

    Raises:
        TypeError: `sparsity`, `ablation` or `drop_fraction` is not a float, or `steps`
            is not an int.
        ValueError: `sparsity`, `ablation` or `drop_fraction` is outside [0, 1], or
            `steps` is not positive.

    Where `when` fires, a leaf of n weights that are not zero drops d = drop_fraction *
    n of them. Salient are its n - d largest weights and the d entries of the largest
    gradients. Neurons are ablated as long as the others have places for all weights;
    they may come back at a later update. Of the rows that are left the n - d largest
    weights stay, and each row is cut or grown, where the gradient is largest, to the
    same number: the weights that the sparsity asks for, divided by the number of these
    rows and rounded down. Regrown weights start at zero, weights only just dropped have
    their values.

    Differs from the authors' code: shares are rounded, not truncated, and kept weights
    that are exactly zero do not count in n; rows with too many weights lose the
    smallest.

    Verified by recordings (masks, weights and ablated neurons of 3 updates, with and
    without ablation), a worked example, and laws.

    Lasby et al. 2024, arXiv 2305.02299.
    """
    check_sparsity(sparsity)
    check_sparsity(ablation, "ablation")
    n, stop = pace("srigl", steps)
    if when is None:
        when = every(n, stop=stop)
    share = as_fraction(
        cosine_decay(0.3, stop) if drop_fraction is None else drop_fraction,
        "drop_fraction",
    )

    # as many in every row that has places
    def even(scores: Tensor, open_: Tensor, step: Step) -> Tensor:
        rows = open_.any(-1)
        return rows * (
            n_kept(scores.numel(), sparsity) // rows.sum().clamp(min=1)
        ).clamp(max=scores.shape[-1])

    # all but a part of the leaf's weights
    def stay(scores: Tensor, active: Tensor, step: Step) -> Tensor:
        return _staying((scores > 0).sum(-1), fraction_at(share, step))

    def as_it_was(state: State, grown: Tree, step: Step) -> Tree:
        return state.params

    rows = row_balanced()
    start = static(
        sparsity, pattern=rows, distribution=_even_rows, where=where, key=key, init=init
    )
    prune = gmp(Counted(stay), when=when, where=where, init="dense", pruned="keep")
    refill = rigl(
        Counted(even),
        pattern=rows,
        drop_fraction=0.0,
        grown=as_it_was,
        when=when,
        where=where,
        init="dense",
    )
    # the first part makes the first masks, and does nothing later
    dynamic = sequence(start, prune, refill)
    if ablation == 0.0:
        return dynamic

    def salient(state: State, grads: Tree, step: Step) -> Tree:
        def of_leaf(path: str, weight: Tensor, mask: Tensor, grad: Tensor) -> Tensor:
            n = (weight.abs() > 0).sum()
            largest = _staying(n, fraction_at(share, step))
            return (
                topk_mask(weight.abs(), largest) | topk_mask(grad.abs(), n - largest)
            ).float()

        return of_sparsified(
            of_leaf,
            state,
            grads,
            reader="srigl",
            instead="; the entries of a whole leaf are ranked",
        )

    # the salient entries of a row, in units of what it needs
    def worth(flags: Tensor) -> Tensor:
        needed = rounded_down(ablation, n_kept(flags.shape[-1], sparsity))
        return flags.sum(-1) / as_tensor_on(needed, flags.device).clamp(min=1)

    def alive(scores: Tensor, active: Tensor, step: Step) -> Tensor:
        rows = scores.shape[-1]
        enough = as_tensor_on(
            rounded_down(1 - sparsity, rows) + 1, scores.device
        ).clamp(max=rows)
        return torch.maximum((scores >= 1).sum(-1), enough)

    per_row = by_unit(salient, channel(0), worth)
    neurons = gmp(
        Counted(alive),
        score=per_row,
        pattern=channel(0, norm=torch.inf),
        when=when,
        where=ablate,
        pruned="keep",
        regrow=True,
    )  # what it prunes is still counted, and becomes zero in the end
    return chain(neurons, dynamic)


def _staying(n: Tensor, fraction: Real) -> Tensor:
    return n - rounded(fraction, n)


def _even_rows(shapes: Mapping[str, tuple[int, ...]], sparsity: Real) -> CountsByName:
    # The same number in every row, rounded down.
    made = {}
    for path, shape in shapes.items():
        if shape:
            made[path] = (
                n_kept(math.prod(shape), sparsity) // max(shape[0], 1) * shape[0]
            )
        else:
            made[path] = n_kept(1, sparsity)
    return made
