"""Tables on a device: numbers that go along with launches; and which device launches go
to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn_kernels.source.whole import write_table
from sparsefn_kernels.tables import Column

_BIAS = 1 << 62  # as `source/whole.py` has it
# numbers that one launch takes along, a kernel each: 4096 bytes of arguments are the
# most
_AT_ONCE = (
    32,
    128,
    448,
)


def write(numbers: Column, device: torch.device) -> Tensor:
    """Numbers on a device, in one row, and behind them memory that nothing reads.

    They are copied from pinned memory, for which nothing waits. Where a graph is
    captured they go along with launches instead: a graph that replays a copy would read
    memory of the host that is long gone.
    """
    row = numbers.reshape(-1)
    room = len(row) + _AT_ONCE[-1]
    table = torch.empty(room, dtype=torch.int64, device=device)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        by_launches(row.tolist(), table)
    else:
        by_copy(row, table)
    return table


def by_copy(row: Column, table: Tensor) -> None:
    """Write numbers to the start of a table, by one copy."""
    host = torch.from_numpy(row)
    if table.device.type == "cuda":
        host = host.pin_memory()  # torch keeps it until the copy is done
    table[: len(row)].copy_(host, non_blocking=True)


def by_launches(numbers: Sequence[int], table: Tensor) -> None:
    """Write numbers to the start of a table, and something behind them, as arguments of
    launches, which takes the host several times as long.
    """
    most = _AT_ONCE[-1]
    for start in range(0, len(numbers), most):
        some = [x + _BIAS for x in numbers[start : start + most]]
        some += [_BIAS] * (min(n for n in _AT_ONCE if n >= len(some)) - len(some))
        write_table[(1,)](table[start:], tuple(some), N=len(some), num_warps=1)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on a device: Triton launches on the
    current one.
    """
    return (
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    )
