"""Scores from second derivatives: Fisher information, the Hessian's diagonal, OBD."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch
from torch import Tensor

from sparsefn._engine.torch_limits import differentiating
from sparsefn.core import random
from sparsefn.core.checks import check_int, described
from sparsefn.core.state import Accumulated, PlainScore, State, Step
from sparsefn.core.tree import Tree, check_like, map_with_path, wide
from sparsefn.posttraining.curvature import derivatives
from sparsefn.posttraining.curvature.derivatives import Batch, Loss


@described
def fisher(loss: Loss, batch: Batch, chunk_size: int | None = None) -> PlainScore:
    """The mean squared per-example gradient: the diagonal of the Fisher information.

    >>> def loss(params, g):
    ...     return (g @ params["w"]).mean()
    >>> score = sf.curvature.fisher(loss, (torch.tensor([[1.0, 2.0], [3.0, 1.0]]),))
    >>> score(
    ...     sf.State(
    ...         {"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([True, True])}
    ...     ),
    ...     (),
    ...     0,
    ... )
    {'w': tensor([5.0000, 2.5000])}

    Args:
        loss: A function `loss(params, *batch)` that returns a 0-d tensor.
        batch: Tuple of the loss's arguments after params, or a function of the step
            that returns one. Examples lie along the leading axis of its leaves, on the
            device of params, unless the loss moves them.
        chunk_size: Number of examples that are taken at a time, which bounds memory to
            that many gradients. Default: all.

    Returns:
        A score, summed in float32 or wider. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `loss` is no function, `batch` neither a tuple of tensors nor a
            function, or `chunk_size` no int.
        ValueError: `chunk_size` is below 1, leaves of the batch have no example or not
            equally many, or on a call they lie on another device than params.

    The squared gradient of the whole batch differs: [4, 2.25]. With the labels of the
    data it is the empirical Fisher. `sf.curvature.obd(fisher(loss, batch))` is the
    saliency of Theis et al. 2018, arXiv 1801.05787.
    """
    derivatives.check_loss(loss, batch)
    if chunk_size is not None:
        check_int("", "chunk_size", chunk_size, 1)
    if not callable(batch):
        derivatives.batch_size(batch)

    def score(state: State, grads: Tree, step: Step) -> Tree:
        now = derivatives.arguments_at(batch, step)
        size = derivatives.batch_size(now)
        stride = size if chunk_size is None else chunk_size
        weights, of_weights, scored = derivatives.sparsified(state, loss)
        total = {path: torch.zeros_like(wide(w)) for path, w in weights.items()}
        for start in range(0, size, stride):
            piece = [
                optree.tree_map(lambda x, i=start: x[i : i + stride], tree)
                for tree in now
            ]
            gradients = derivatives.example_gradients(of_weights, weights, piece)
            total = {
                path: t + wide(gradients[path]).square().sum(0)
                for path, t in total.items()
            }
        return scored({path: t / size for path, t in total.items()})

    return score


@described
def hessian_diagonal(
    loss: Loss,
    batch: Batch,
    samples: int | None = None,
    chunk_size: int = 64,
) -> PlainScore:
    """The diagonal of the Hessian of the loss: exact, or estimated from random vectors.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> score = sf.curvature.hessian_diagonal(
    ...     lambda params: params["w"] @ matrix @ params["w"] / 2, ()
    ... )
    >>> score(sf.State({"w": torch.ones(2)}, {"w": torch.tensor([True, True])}), (), 0)
    {'w': tensor([2., 3.])}

    Args:
        loss: A function `loss(params, *batch)` that returns a 0-d tensor.
        batch: Tuple of the loss's arguments after params, or a function of the step
            that returns one.
        samples: Number of vectors v of random signs. The score is the mean of v * Hv:
            unbiased, and exact if the Hessian is diagonal. Default: the exact diagonal,
            which takes one Hessian-vector product per sparsified weight: use it for
            small networks.
        chunk_size: Number of products of the exact diagonal that are computed at a
            time.

    Returns:
        A score, which may be negative. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `loss` is no function, `batch` neither a tuple nor a function, or a
            count no int.
        ValueError: A count is below 1, or on a call with `samples` the state has no
            key.

    The signs depend on the state's key, the path, the step and the index of the vector.

    Bekas et al. 2007, doi 10.1016/j.apnum.2007.01.003.
    """
    derivatives.check_loss(loss, batch)
    for name, value in (("samples", samples), ("chunk_size", chunk_size)):
        if value is not None:
            check_int("", name, value, 1)

    def score(state: State, grads: Tree, step: Step) -> Tree:
        now = derivatives.arguments_at(batch, step)
        weights, of_weights, scored = derivatives.sparsified(state, loss)
        if samples is None:
            return scored(_exact_diagonal(of_weights, weights, now, chunk_size))
        return scored(
            _estimated_diagonal(of_weights, weights, state.key, now, step, samples)
        )

    return score


@described
def obd(diagonal: PlainScore) -> PlainScore:
    """weight^2 * diagonal / 2: the loss's rise without the weight, to second order.

    >>> def loss(params, g):
    ...     return (g @ params["w"]).mean()
    >>> score = sf.curvature.obd(
    ...     sf.curvature.fisher(loss, (torch.tensor([[1.0, 2.0], [3.0, 1.0]]),))
    ... )
    >>> score(
    ...     sf.State(
    ...         {"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([True, True])}
    ...     ),
    ...     (),
    ...     0,
    ... )
    {'w': tensor([2.5000, 1.2500])}

    Args:
        diagonal: `fisher(...)` or `hessian_diagonal(...)`, which are 0 for leaves that
            are not sparsified, or any score without memory.

    Returns:
        A score. The weights are `state.params`, as in `sf.scores.saliency`.

    Raises:
        TypeError: `diagonal` is no score function, or has a memory.
        ValueError: On a call, `diagonal` gives another structure or shape than params.

    LeCun et al. 1989, Optimal Brain Damage.
    """
    if isinstance(diagonal, Accumulated) or not callable(diagonal):
        raise TypeError(
            "expected diagonal to be a score function such as "
            f"sf.curvature.fisher(loss, batch), got {type(diagonal).__name__}"
        )

    def score(state: State, grads: Tree, step: Step) -> Tree:
        found = diagonal(state, grads, step)
        check_like("the diagonal", found, state.params, dtype=False)
        return optree.tree_map(
            lambda w, h: wide(w).square() * h / 2, state.params, found
        )

    return score


def _exact_diagonal(
    loss: Loss, weights: Tree, batch: Sequence[Tree], chunk_size: int
) -> Tree:
    leaves, rebuild = derivatives.unpacked(weights)

    def of_leaf(i: int, leaf: Tensor) -> Tensor:
        def moved(one: Sequence[Tensor]) -> Tensor:
            return loss(rebuild([*leaves[:i], one[0], *leaves[i + 1 :]]), *batch)

        @differentiating
        def product(vector: Tensor) -> Tensor:
            gradient = derivatives.gradient_of(moved)
            moves: tuple[Tensor, ...] = torch.func.jvp(
                gradient, ((leaf,),), ((vector,),)
            )[1]
            return moves[0]

        n = leaf.numel()
        parts = [leaf.new_zeros(0)]
        for start in range(0, n, chunk_size):
            rows = torch.arange(start, min(start + chunk_size, n), device=leaf.device)
            basis = (rows[:, None] == torch.arange(n, device=leaf.device)).to(
                leaf.dtype
            )
            products = torch.vmap(product)(basis.reshape(-1, *leaf.shape))
            parts.append(products.reshape(-1, n).diagonal(offset=start))
        return torch.cat(parts).reshape(leaf.shape)

    return rebuild([of_leaf(i, leaf) for i, leaf in enumerate(leaves)])


def _estimated_diagonal(
    loss: Loss,
    weights: Tree,
    key: Tree,
    batch: Sequence[Tree],
    step: Step,
    samples: int,
) -> Tree:
    if not isinstance(key, Tensor):
        raise ValueError(
            "expected a PRNG key in the state for an estimate, got none; pass "
            "key=sf.random.key(seed)"
        )
    own = random.fold_in(key, "hessian_diagonal")

    def signs(path: str, leaf: Tensor, sample: int) -> Tensor:
        drawn = random.leaf_key(random.fold_in(own, sample), path, step)
        return torch.where(random.uniform_like(drawn, leaf) < 0.5, -1.0, 1.0).to(
            leaf.dtype
        )

    total = optree.tree_map(lambda p: torch.zeros_like(wide(p)), weights)
    for sample in range(samples):
        vector = map_with_path(
            lambda path, leaf, i=sample: signs(path, leaf, i), weights
        )
        product = derivatives.hessian_vector(loss, weights, vector, batch)
        total = optree.tree_map(lambda t, v, p: t + v * p, total, vector, product)
    return optree.tree_map(lambda t: t / samples, total)
