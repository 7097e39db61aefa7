"""Operators whose members are worked on one by one under `vmap`, with known values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsefn._engine.transforms import in_mode, read_number, transformed


def hidden(*tensors: Tensor) -> bool:
    """Whether a transform, a mode or the compiler hides the values of some tensors.

    >>> from sparsefn._engine.leaves.member_operators import hidden
    >>> hidden(torch.ones(2))
    False
    """
    return (transformed() or in_mode()) and any(
        read_number(x.detach().sum()) is None for x in tensors
    )


def one_by_one(op: Any) -> None:
    """Let a `torch.library.custom_op` run under `vmap` by a loop over members, each
    with the bits that it has alone.

    >>> from sparsefn.posttraining.solve.least_squares import (
    ...     refit,
    ... )  # is such an operator
    >>> weights, eye, mask = torch.ones(3, 2, 2), torch.eye(2), torch.eye(2) > 0
    >>> torch.vmap(lambda weight: refit(weight, eye, mask))(weights).shape
    torch.Size([3, 2, 2])
    """

    def batched(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        members = []
        for i in range(info.batch_size):
            pairs = zip(args, in_dims, strict=True)
            members.append(
                op(
                    *(
                        x.select(dim, i) if isinstance(dim, int) else x
                        for x, dim in pairs
                    )
                )
            )
        if isinstance(members[0], Tensor):
            return torch.stack(members), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*members, strict=True))
        return stacked, (0,) * len(stacked)

    op.register_vmap(batched)
