"""The sweep of SparseGPT over some columns on a GPU, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.transforms import transformed
from sparsefn_kernels.device_tables import on
from sparsefn_kernels.source import sweep as source

_BLOCK = 32  # rows of a program, one a thread


def sweep(
    due: Tensor,
    changes: Tensor,
    mask: Tensor,
    factor: Tensor,
    scale: Tensor,
    span: int,
    best: int | None,
) -> bool:
    """Write what `sweep_by_sums` of `posttraining/solve/sweep.py` writes; whether this
    kernel takes the tensors.

    Every tensor but `scale` (columns,) and `factor` (columns, columns) is (columns,
    rows). `best` of each `span` columns are kept, None where the mask is given.
    """
    if transformed() or due.dtype not in (torch.float32, torch.float64):
        return False
    whole = (due, changes, mask, scale)
    if not all(map(Tensor.is_contiguous, whole)) or factor.stride(1) != 1:
        return False
    _sweep(due, changes, mask, factor, scale, span, best or 0, best is not None)
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
            columns,
            rows,
            SPAN=span if choose else 1,
            BEST=best,
            CHOOSE=choose,
            B=_BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )


@_sweep.register_fake
def _(*args: object) -> None:
    pass
