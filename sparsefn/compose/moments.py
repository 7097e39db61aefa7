"""Where the moments of an optimizer are kept after an update of masks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def live_entries(
    support: Tensor,
    before: Tensor,
    weight: Tensor,
    stepped: Tensor,
    *,
    mask_moments: bool = True,
    reset_grown: bool = True,
) -> Tensor | None:
    """The entries of a leaf at which moments are kept; None for all.

    >>> before, after = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    >>> weight = torch.tensor([1.0, 0.0, 0.0])
    >>> live_entries(after, before, weight, weight)
    tensor([ True, False, False])

    `support` and `weight` are read after the update, `before` and `stepped` between optimizer and update. Moments
    are kept on the support (`mask_moments`), but not where it has just turned on or where the update itself set the
    weight (`reset_grown`).
    """
    parts = [support] if mask_moments else []
    if reset_grown and before is not support:
        parts.append(before | ~support)
    if reset_grown and weight is not stepped:
        # Weights that the update itself set start with zero moments, such as weights pruned and regrown.
        parts.append(~support | (weight == stepped) | (weight.isnan() & stepped.isnan()))
    return functools.reduce(torch.logical_and, parts) if parts else None
