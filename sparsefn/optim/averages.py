"""Averages of weights that stay sparse."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real, like
from sparsefn.core.checks import number
from sparsefn.core.state import State, effective, inside
from sparsefn.core.tree import Tree, check_like, copied, wide, zipped
from sparsefn.optim.base import scalar_like

__all__ = ["ema"]
__dir__ = __all__.copy


def ema(state: State, decay: Real, average: Tree = None) -> Tree:
    """The exponential moving average of the effective weights, as sparse as they are.

    >>> state = sf.State(
    ...     {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> average = sf.optimizers.ema(state, 0.75)
    >>> sf.optimizers.ema(
    ...     state._replace(params={"w": torch.tensor([3.0, 5.0])}), 0.75, average
    ... )
    {'w': tensor([1.5000, 0.0000])}

    Args:
        state: The state, or the `state` of what `attach` returns.
        decay: The factor of the old average: a number in [0, 1], or a 0-d
            floating-point tensor, which may be batched.
        average: The old average, a tree like the params. None starts one: a copy of the
            effective weights.

    Returns:
        `decay * average + (1 - decay) * weights` in the dtypes of `average`, and +0.0
        where the masks prune: a weight that grows back starts from zero.

    Raises:
        TypeError: `state` is not a State, `decay` no number, or a leaf of `average` no
            tensor.
        ValueError: `decay` is out of range, or `average` does not fit the params, with
            the path.

    Half-precision weights hardly move a half-precision average, so start theirs as
    `optree.tree_map(torch.Tensor.float, sf.effective(state))`. To run the model with
    the average, put it in place of `sf.effective(state)`.
    """
    share = number("decay", decay)
    if not isinstance(share, Tensor) and not 0.0 <= share <= 1.0:
        raise ValueError(f"expected decay in [0, 1], got {decay}")
    weights = effective(state)
    if average is None:
        return copied(weights)
    check_like("average", average, state.params, dtype=False)
    rows, rebuild = zipped(average, weights)
    return inside(state.masks, rebuild([_mixed(old, new, share) for old, new in rows]))


def _mixed(old: Tensor, new: Tensor, share: Real) -> Tensor:
    old_part = like(old, share)
    kind = torch.promote_types(wide(old).dtype, wide(new).dtype)
    a = old.to(kind)
    b = new.to(kind)
    return (scalar_like(old_part, a) * a + scalar_like(1 - old_part, b) * b).to(
        old.dtype
    )
