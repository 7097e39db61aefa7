"""Blocks that learn to answer as they did before they were pruned."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch
from torch import Tensor

from sparsefn._engine.numbers import flags_of
from sparsefn.algorithms.combine.with_optimizer import with_optimizer
from sparsefn.algorithms.static import from_masks
from sparsefn.core.checks import check_call, check_int, described
from sparsefn.core.state import State, effective
from sparsefn.core.tree import Tree, all_finite, flatten
from sparsefn.nn.checkpoint.folders import some
from sparsefn.optim.base import Optimizer
from sparsefn.posttraining.calibration.targets import (
    Compare,
    Errors,
    Recover,
    in_float32,
)
from sparsefn.posttraining.curvature.derivatives import gradient_and_value_at
from sparsefn.posttraining.recovery.losses import mean_square

_MEND = (
    "lower the rate of the optimizer, or give a model of a wider dtype, such as "
    "model.float()"
)


@described
def blockwise(
    optimizer: Optimizer, *, epochs: int = 1, loss: Compare = mean_square
) -> Recover:
    """What `sf.calibration.in_order` takes as `recover`: train each pruned layer.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ... )
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(64, 2, generator=generator)[:, [0, 1, 0, 1]]
    >>> def pruned(recover):
    ...     return sf.calibration.by_block(
    ...         model,
    ...         None,
    ...         ["0.*", "2.*"],
    ...         lambda stats: sf.one_shot(0.5, sf.scores.wanda(stats)),
    ...         x,
    ...         of="square",
    ...         chunk_size=8,
    ...         recover=recover,
    ...     )
    >>> recover = sf.recovery.blockwise(sf.optimizers.adam(1e-2), epochs=10)
    >>> [
    ...     after.error < before.error
    ...     for before, after in zip(pruned(None), pruned(recover))
    ... ]
    [True, True]

    Args:
        optimizer: From `sf.optimizers`, or one from elsewhere as `sf.with_optimizer`
            takes it. It starts at each layer, at step 0.
        epochs: How often a layer sees all batches. A batch is a chunk of `in_order`, or
            a batch of `stream`; each is one step.
        loss: A loss of (student, teacher, tokens), of what the layer returns and what
            it returned before it was pruned.

    Returns:
        A function of a layer's state and its errors, for `recover` of
        `sf.calibration.in_order`, `by_block` and `stream`.

    Raises:
        TypeError: `loss` is no such function, `epochs` no int, or `optimizer` none.
        ValueError: `epochs` is negative, or, in the function, the loss or a trained
            weight is not finite.

    All leaves of the layer are trained, norms and biases too. A layer of 16 bits runs
    and trains in float32, and its leaves are rounded once, at the end. Masks stay, and
    so do the zeros, exactly. The teacher is the layer with the weights that it had at
    first, and what both get are the inputs that calibration carries: from layers before
    it that are pruned and trained, or from "dense" ones.

    The authors' code trains on the same inputs and outputs, with AdamW and a mean
    squared error. Guo et al. 2024, arXiv 2402.12419.
    """
    check_call("loss", loss, "student", "teacher", "tokens")
    check_int("blockwise", "epochs", epochs, 0)
    with_optimizer(from_masks({}), optimizer)  # which checks it

    def recovered(state: State, errors: Errors) -> State:
        algorithm = with_optimizer(from_masks(state.masks), optimizer)
        # 16 bits would lose small steps, and the squares of gradients in Adam
        trained = algorithm.init(in_float32(state.params))
        seen = list[Tensor]()
        step = 0
        for _ in range(epochs):
            for error in errors(loss):
                grads, value = gradient_and_value_at(error, effective(trained))
                trained = algorithm.update(trained, grads, step)
                seen.append(value)
                step += 1
        params = optree.tree_map(_as_before, trained.params, state.params)
        _check_finite(params, trained.params, seen)
        return state._replace(params=params)

    return recovered


def _as_before(leaf: Tensor, old: Tensor) -> Tensor:
    return leaf.to(old.dtype)


def _check_finite(params: Tree, wide_params: Tree, seen: Sequence[Tensor]) -> None:
    # A device is waited for once, at the end.
    leaves = flatten(params)[0]
    flags = [leaf.isfinite().all() for leaf in leaves.values()]
    values = torch.stack(list(seen)).isfinite().all() if seen else None
    if values is not None:
        flags.append(values)
    if not flags:
        return
    good = flags_of(flags)
    odd = [path for path, is_good in zip(leaves, good, strict=False) if not is_good]
    if odd:
        dtype = leaves[odd[0]].dtype
        fits = bool(all_finite(flatten(wide_params)[0][odd[0]]))
        cause = f", as they do not fit {dtype}" if fits else ""
        raise ValueError(
            f"blockwise: expected finite weights after training, got NaN or infinity "
            f"at {some(odd)}{cause}: {_MEND}"
        )
    if not good[-1]:
        raise ValueError(
            "blockwise: expected a finite loss at every step, got NaN or infinity for "
            f"the layer of {some(leaves)}: {_MEND}"
        )
