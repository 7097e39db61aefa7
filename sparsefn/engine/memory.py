"""Memory for results, devices, and threads: work on arrays in blocks that stay in a core's cache.

A torch operation makes a fresh tensor of the full size and may wake every thread; for a pass over many
millions of weights that costs more than the arithmetic. numpy writes into small buffers that are reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Count = TypeVar("Count", int, Tensor, int | Tensor)
Job = TypeVar("Job")
Out = TypeVar("Out")

BLOCK = 1 << 17  # elements at a time: two float32 buffers of it fit the second cache of a core
_MANY = 1 << 20  # fewer elements than this are not worth a second thread


def check_device(what: str, device: torch.device, *others: Tensor | None) -> None:
    """Raise ValueError for a tensor on another device.

    >>> from sparsefn.engine import memory
    >>> memory.check_device("a key and its index", torch.device("meta"), torch.zeros(2))
    Traceback (most recent call last):
        ...
    ValueError: expected a key and its index on one device, got meta and cpu
    """
    for x in others:
        if x is not None and x.device != device:
            raise ValueError(f"expected {what} on one device, got {device} and {x.device}")


def placed(count: Count, device: torch.device) -> Count:
    """A count for scores on a device: a tensor is moved there from the CPU, and refused from elsewhere.

    >>> from sparsefn.engine import memory
    >>> memory.placed(torch.tensor(3), torch.device("meta")).device
    device(type='meta')
    """
    if not isinstance(count, Tensor) or count.device == device:
        return count
    if count.device.type != "cpu":
        check_device("scores and counts", device, count)
    return count.to(device)


def each(run: Callable[[Job], Out], jobs: Iterable[Job], work: int) -> list[Out]:
    """The results of all jobs, on as many threads as torch may use if the work, counted in elements, is large enough.

    >>> from sparsefn.engine import memory
    >>> memory.each(lambda job: 2 * job, [1, 2], work=2)
    [2, 4]

    Results are in the order of the jobs. The first error is raised. numpy's warnings are off in a job: a signalling
    NaN would cause one, and torch treats it as any other.
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
