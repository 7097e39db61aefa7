"""Low-rank updates of frozen weights, which leave their zeros."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsefn._engine.leaves import plain_product
from sparsefn._engine.processes import check_plain
from sparsefn.algorithms.reparam.gates import uniform_at
from sparsefn.algorithms.reparam.weight_map import Reparametrisation
from sparsefn.core import random
from sparsefn.core.checks import check_int, described, is_number
from sparsefn.core.state import Step
from sparsefn.core.tree import Leaves, Tree, wide


@described
def low_rank(
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    *,
    stacked: int = 0,
) -> Reparametrisation:
    """w = mask * (W + alpha / rank * B A): LoRA of a pruned model.

    >>> map_ = sf.reparam.low_rank(1)
    >>> latents = map_.init(
    ...     {"w": torch.tensor([[1.0, 0.0], [2.0, 3.0]])}, sf.random.key(0)
    ... )
    >>> latents["a"]["w"].shape, latents["b"]["w"]
    (torch.Size([1, 2]), tensor([[0.],
            [0.]]))
    >>> latents["a"]["w"], latents["b"]["w"] = (
    ...     torch.tensor([[1.0, 2.0]]),
    ...     torch.tensor([[10.0], [0.0]]),
    ... )
    >>> map_.settled(latents, 0)
    ({'w': tensor([[11.,  0.],
            [ 2.,  3.]])}, {'w': tensor([[ True, False],
            [ True,  True]])})

    Args:
        rank: Rows of A and columns of B, at least 1.
        alpha: Positive number that scales B A by alpha / rank. None: the factor is 1.
        dropout: Fraction in [0, 1) of the inputs of A that are left out; the others are
            divided by 1 - dropout. These are columns of A, drawn from (key, path,
            step), the same for all examples of a step: LoRA draws them for each
            example, which no weight can say. There is none in `sf.settled`.
        stacked: Number of first axes that stack matrices, as 1 for
            `[experts, outputs, inputs]`, with an A and a B for each entry. Of the other
            axes the first is outputs, and all others are inputs: a kernel is flattened.

    Returns:
        Reparametrisation with the latents
        `{"base": {path: W}, "a": {path: A}, "b": {path: B}}`. W is frozen, its zeros
        are the mask, and exactly these zeros stay. A is (rank, inputs), uniform in +-1
        / sqrt(inputs) by the key of `reparametrised` (Kaiming, as in the authors'
        code), and B, (outputs, rank), is zero: the first weights are W. A, B and the
        sum are float32 for leaves of half precision.

    Raises:
        TypeError: `rank` or `stacked` is not an int.
        ValueError: `rank` is below 1, `stacked` negative, `alpha` not positive and
            finite, or `dropout` outside [0, 1); a leaf has fewer axes than `stacked`
            and two more, or is a DTensor.

    The weights are merged at every step; an `inner` algorithm may prune more. In a
    module W has to require a gradient, from which A and B get their gradients: freeze
    only what has none. The last bits of B A are as the device's matrix product gives
    them.

    Hu et al. 2021, arXiv 2106.09685, eq. 3; the mask: Munoz et al. 2024,
    arXiv 2410.03750; columns left out: Lin et al. 2024, arXiv 2404.09610.
    """
    check_int("low_rank", "rank", rank, 1)
    check_int("low_rank", "stacked", stacked, 0)
    if alpha is not None and not (is_number(alpha) and 0 < alpha < math.inf):
        raise ValueError(
            f"low_rank: expected alpha to be positive and finite, got {alpha!r}"
        )
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise ValueError(f"low_rank: expected 0 <= dropout < 1, got {dropout!r}")
    scale = 1.0 if alpha is None else alpha / rank

    def start(leaves: Leaves, key: Tensor) -> Tree:
        a = {}
        b = {}
        draws = random.fold_in(key, "init")
        flat = [
            f"shape {tuple(x.shape)} at {path!r}"
            for path, x in leaves.items()
            if x.ndim < stacked + 2
        ]
        if flat:
            raise ValueError(
                f"low_rank: expected leaves of {stacked + 2} axes or more, got "
                f"{', '.join(flat)}: leave them out with where="
            )
        for path, leaf in leaves.items():
            check_plain("low_rank", path, leaf)
            stack = leaf.shape[:stacked]
            outputs = leaf.shape[stacked]
            inputs = math.prod(leaf.shape[stacked + 1 :])
            like = wide(leaf.new_empty(*stack, rank, inputs))
            uniform = random.uniform_like(
                random.leaf_key(draws, path), like, like.dtype
            )
            a[path] = (2 * uniform - 1) / math.sqrt(max(inputs, 1))
            b[path] = wide(leaf.new_zeros(*stack, outputs, rank))
        return {"base": dict(leaves), "a": a, "b": b}

    def merged(latents: Tree, a: Leaves) -> tuple[Leaves, Leaves]:
        weights = {}
        masks = {}
        for path, base in latents["base"].items():
            masks[path] = (base != 0).detach()
            change = plain_product(latents["b"][path], a[path]).reshape(base.shape)
            total = wide(base) + scale * change
            weights[path] = torch.where(masks[path], total, 0.0).to(base.dtype)
        return weights, masks

    def apply(latents: Tree, step: Step, key: Tensor) -> tuple[Leaves, Leaves]:
        if not dropout:
            return merged(latents, latents["a"])
        thinned = {}
        for path, a in latents["a"].items():
            # a number for each input, the same for every row
            drawn = uniform_at(step, key, path, a[..., :1, :])
            thinned[path] = torch.where(drawn >= dropout, a / (1 - dropout), 0.0)
        return merged(latents, thinned)

    def settled(latents: Tree, step: Step) -> tuple[Leaves, Leaves]:
        return merged(latents, latents["a"])

    return Reparametrisation(start, apply, settled, held=("base",))
