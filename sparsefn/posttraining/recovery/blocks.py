"""Blocks that learn to answer as they did before they were pruned."""

from __future__ import annotations

from sparsefn.algorithms.combine.with_optimizer import with_optimizer
from sparsefn.algorithms.static import from_masks
from sparsefn.core.checks import check_call, check_int, described
from sparsefn.core.state import State, effective
from sparsefn.optim.base import Optimizer
from sparsefn.posttraining.calibration.targets import Compare, Errors, Recover
from sparsefn.posttraining.curvature.derivatives import gradient_at
from sparsefn.posttraining.recovery.losses import mean_square


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
        ValueError: `epochs` is negative.

    All leaves of the layer are trained, norms and biases too. Masks stay, and so do the
    zeros, exactly. The teacher is the layer with the weights that it had at first, and
    what both get are the inputs that calibration carries: from layers before it that
    are pruned and trained, or from "dense" ones.

    The authors' code trains on the same inputs and outputs, with AdamW and a mean
    squared error. Guo et al. 2024, arXiv 2402.12419.
    """
    check_call("loss", loss, "student", "teacher", "tokens")
    check_int("blockwise", "epochs", epochs, 0)
    with_optimizer(from_masks({}), optimizer)  # which checks it

    def recovered(state: State, errors: Errors) -> State:
        algorithm = with_optimizer(from_masks(state.masks), optimizer)
        trained = algorithm.init(state.params)
        step = 0
        for _ in range(epochs):
            for error in errors(loss):
                grads = gradient_at(error, effective(trained), ())
                trained = algorithm.update(trained, grads, step)
                step += 1
        return state._replace(params=trained.params)

    return recovered
