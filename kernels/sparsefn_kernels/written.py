"""Tables on a device: numbers that go along with launches; and which device launches go
to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn_kernels.source.whole import write_table

_BIAS = 1 << 62  # as `source/whole.py` has it
# numbers that one launch takes along, a kernel each: 4096 bytes of arguments are the
# most
_AT_ONCE = (
    32,
    128,
    448,
)


def write(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """The numbers of some rows end to end on a device, and behind them memory that
    nothing reads.

    The numbers go along with launches: memory of the host would have to outlive them,
    and a graph that replays them.
    """
    numbers = [int(x) for row in rows for x in row]
    most = _AT_ONCE[-1]
    table = torch.empty(len(numbers) + most, dtype=torch.int64, device=device)
    for start in range(0, len(numbers), most):
        some = [x + _BIAS for x in numbers[start : start + most]]
        some += [_BIAS] * (min(n for n in _AT_ONCE if n >= len(some)) - len(some))
        write_table[(1,)](table[start:], tuple(some), N=len(some), num_warps=1)
    return table


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on a device: Triton launches on the
    current one.
    """
    return (
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    )
