"""The sweep of SparseGPT over some columns on a GPU, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsefn._engine.transforms import transformed
from sparsefn_kernels.device_tables import on
from sparsefn_kernels.source import sweep as source

if TYPE_CHECKING:
    from sparsefn.posttraining.solve.sweep import Rounding

_BLOCK = 32  # rows of a program, one a thread
_LARGEST = 1 << 24  # float32 holds every integer up to here


def sweep(
    due: Tensor,
    changes: Tensor,
    mask: Tensor,
    factor: Tensor,
    scale: Tensor,
    rounding: Rounding | None,
    span: int,
    best: int | None,
) -> bool:
    """Write the changes and the mask that `sweep_by_sums` of
    `posttraining/solve/sweep.py` writes, and use up `due`; False for tensors that this
    kernel does not take.

    Every tensor but `scale` (columns,) and `factor` (columns, columns) is (columns,
    rows). `best` of each `span` columns are kept, None where the mask is given.
    """
    steps, zero, low, high = None, None, 0, 0
    if rounding is not None:
        steps, zero, low, high = rounding
    if transformed() or due.dtype not in (torch.float32, torch.float64):
        return False
    if max(-low, high) > _LARGEST or (best is not None and len(due) % span):
        return False
    given = (due, changes, mask, scale, steps, zero)
    if not all(x is None or x.is_contiguous() for x in given) or factor.stride(1) != 1:
        return False
    _sweep(
        due,
        changes,
        mask,
        factor,
        scale,
        steps,
        zero,
        low,
        high,
        span,
        best or 0,
        best is not None,
    )
    return True


@torch.library.custom_op(
    "sparsefn_kernels::sweep", mutates_args=("due", "changes", "mask")
)
def _sweep(
    due: Tensor,
    changes: Tensor,
    mask: Tensor,
    factor: Tensor,
    scale: Tensor,
    grid_scale: Tensor | None,
    grid_zero: Tensor | None,
    low: int,
    high: int,
    span: int,
    best: int,
    choose: bool,
) -> None:
    columns, rows = due.shape
    if not due.numel():
        return
    with on(due.device):
        source.sweep[(-(-rows // _BLOCK),)](
            due,
            changes,
            mask.view(torch.int8),
            factor,
            factor.stride(0),
            scale,
            torch.empty(
                span * rows if choose else 0, dtype=due.dtype, device=due.device
            ),
            grid_scale,
            grid_zero,
            columns,
            rows,
            SPAN=span if choose else 1,
            BEST=best,
            CHOOSE=choose,
            ROUND=grid_scale is not None,
            LOW=low,
            HIGH=high,
            B=_BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )


@_sweep.register_fake
def _(*args: object) -> None:
    pass
