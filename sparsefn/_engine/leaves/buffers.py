"""Memory for results, devices and threads: arrays in blocks that stay in a cache.

A torch operation makes a fresh tensor of the full size and may wake every thread; for a
pass over many millions of weights that costs more than the arithmetic. numpy writes
into small buffers that are reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.transforms import as_numpy, constants, foreach_add_

SomeCount = TypeVar("SomeCount", int, Tensor, int | Tensor)
Job = TypeVar("Job")
Out = TypeVar("Out")

# elements at a time: two float32 buffers of it fit the second cache of a core
BLOCK = 1 << 17
_MANY = 1 << 20  # fewer elements than this are not worth a second thread
# up to this many numbers go to a device as arguments of a launch, and more are copied
_FEW = 1 << 10


def check_device(what: str, device: torch.device, *others: Tensor | None) -> None:
    """Raise ValueError for a tensor on another device.

    >>> from sparsefn._engine.leaves import buffers
    >>> buffers.check_device(
    ...     "a key and its index", torch.device("meta"), torch.zeros(2)
    ... )
    Traceback (most recent call last):
        ...
    ValueError: expected a key and its index on one device, got meta and cpu
    """
    for x in others:
        if x is not None and x.device != device:
            raise ValueError(
                f"expected {what} on one device, got {device} and {x.device}"
            )


def placed(count: SomeCount, device: torch.device) -> SomeCount:
    """A count for scores on a device: a tensor is moved there from the CPU, and refused
    from elsewhere.

    >>> from sparsefn._engine.leaves import buffers
    >>> buffers.placed(torch.tensor(3), torch.device("meta")).device
    device(type='meta')
    """
    if not isinstance(count, Tensor) or count.device == device:
        return count
    if count.device.type != "cpu":
        check_device("scores and counts", device, count)
    return brought(count, device)


def brought(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device: int64 from CPU memory as numbers that are written there,
    for which nothing waits.

    >>> from sparsefn._engine.leaves import buffers
    >>> buffers.brought(sf.random.key(7), torch.device("meta")).shape
    torch.Size([2])

    So is one float. More than a thousand numbers are copied, more floats, and what a
    transform hides.
    """
    if x.device == device:
        return x
    if x.is_floating_point() and not x.ndim:
        known = constants([x])  # None where a derivative in the number may be asked for
        return (
            x.to(device)
            if known is None
            else torch.full((), x.item(), dtype=x.dtype, device=device)
        )
    seen = as_numpy([x]) if x.numel() <= _FEW and x.dtype == torch.int64 else None
    return (
        x.to(device)
        if seen is None
        else written(seen[0].reshape(-1).tolist(), device).reshape(x.shape)
    )


def as_tensor_on(count: int | Tensor, device: torch.device) -> Tensor:
    """A count as a tensor on a device.

    >>> from sparsefn._engine.leaves import buffers
    >>> buffers.as_tensor_on(3, torch.device("cpu"))
    tensor(3)
    """
    if isinstance(count, Tensor):
        return placed(count, device)
    return torch.full((), count, dtype=torch.int64, device=device)


def written(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Some int64 numbers as a tensor on a device, for which nothing waits.

    >>> from sparsefn._engine.leaves import buffers
    >>> buffers.written([3, -1], torch.device("cpu"))
    tensor([ 3, -1])

    A tensor of a list is made on the CPU and copied, which waits until the device has
    done all before. Here the numbers are arguments of one launch.
    """
    if device.type == "cpu" or torch.compiler.is_compiling() or not numbers:
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    made = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    foreach_add_(list(made.unbind()), list(numbers))
    return made


def run_jobs(run: Callable[[Job], Out], jobs: Iterable[Job], work: int) -> list[Out]:
    """The results of all jobs, on as many threads as torch may use if the work, counted
    in elements, is large enough.

    >>> from sparsefn._engine.leaves import buffers
    >>> buffers.run_jobs(lambda job: 2 * job, [1, 2], work=2)
    [2, 4]

    Results are in the order of the jobs. The first error is raised. numpy's warnings
    are off in a job: a signalling NaN would cause one, and torch treats it as any
    other.
    """
    listed = list(jobs)
    threads = min(torch.get_num_threads(), len(listed))

    def quiet(job: Job) -> Out:
        with np.errstate(all="ignore"):  # of the thread at hand
            return run(job)

    if threads < 2 or work < _MANY:
        return [quiet(job) for job in listed]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(quiet, listed))
