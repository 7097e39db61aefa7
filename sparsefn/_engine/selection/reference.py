"""The definition of every selection, by torch operations of fixed shapes: keys in the
order of units, and top-k.

Larger scores come first, then the lower row-major index. NaN ranks below -inf, and -0.0
equals 0.0. The other modules of this folder choose the same units faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.torch_limits import reinterpreted

# The key of a unit that does not compete.
BARRED = {
    torch.int32: torch.iinfo(torch.int32).min,
    torch.int64: torch.iinfo(torch.int64).min,
}


def rank_keys(
    scores: Tensor,
    eligible: Tensor | None = None,
    dtype: torch.dtype | None = None,
    absolute: bool = False,
) -> Tensor:
    """Integers in the order of the competition.

    A unit with the least integer does not compete.

    >>> from sparsefn._engine.selection.reference import rank_keys
    >>> keys = rank_keys(torch.tensor([0.0, -0.0, float("nan"), -float("inf"), 1.0]))
    >>> bool(keys[0] == keys[1]), (keys.argsort()).tolist()
    (True, [2, 3, 0, 1, 4])

    float32 and narrower give int32, float64 gives int64; `dtype` asks for the wider.
    With `absolute` the scores are absolute values, which are not stored.
    """
    if not scores.is_floating_point():
        raise TypeError(f"expected floating-point scores, got {scores.dtype}")
    wide = torch.promote_types(scores.dtype, dtype or torch.float32)
    x = scores.detach().to(wide)
    kind = torch.int64 if wide == torch.float64 else torch.int32
    least = BARRED[kind]
    raw = reinterpreted(x, kind)
    if absolute:
        keys = raw & ~least
    else:
        keys = torch.where(raw < 0, least - raw, raw)
    keys = torch.where(x != x, least + 1, keys)
    if eligible is None:
        return keys
    return torch.where(eligible, keys, least)


def top_of_rows(keys: Tensor, k: int | Tensor) -> Tensor:
    """Bool mask of the k largest keys of each row; units that do not compete never win,
    so k is an upper bound.

    >>> from sparsefn._engine.selection.reference import top_of_rows
    >>> top_of_rows(torch.tensor([[3, 1, 2]], dtype=torch.int32), 2)
    tensor([[ True, False,  True]])

    k is an int, or a tensor with one count for all rows or one a row; it may have any
    value.
    """
    size = keys.shape[-1]
    open_ = keys > BARRED[keys.dtype]
    if size == 0 or (isinstance(k, int) and k <= 0):
        return torch.zeros_like(open_)
    if isinstance(k, int):
        if k >= size:
            return open_
        # Of the smaller side, by `topk` and not by `kthvalue`, which on CUDA reads a
        # row by one block of threads.
        if 2 * k <= size:
            threshold = torch.topk(keys, k, sorted=False).values.amin(-1, keepdim=True)
        else:
            threshold = torch.topk(
                keys, size - k + 1, largest=False, sorted=False
            ).values.amax(-1, keepdim=True)
    else:
        k = k.reshape(-1, 1).clamp(0, size)
        order = torch.sort(keys, dim=-1, descending=True).values
        at = (k - 1).clamp(min=0).expand(keys.shape[0], 1)
        threshold = order.gather(-1, at)
    above = keys > threshold
    equal = keys == threshold
    missing = k - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))) & open_
