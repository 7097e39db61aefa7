"""The memory of plain CPU tensors as numpy arrays, for work in blocks that stay in a core's cache.

A torch operation makes a fresh tensor of the full size and may wake every thread; for a pass over many
millions of weights that costs more than the arithmetic. numpy writes into small buffers that are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Array: TypeAlias = np.ndarray[Any, Any]
See: TypeAlias = Callable[[Tensor], Array | None]  # `array`, or `memory` inside an operator
Job = TypeVar("Job")
Out = TypeVar("Out")

BLOCK = 1 << 17  # elements at a time: two float32 buffers of it fit the second cache of a core
_MANY = 1 << 20  # fewer elements than this are not worth a second thread


def array(x: Tensor) -> Array | None:
    """The memory of a plain CPU tensor, shared; None where a transform, a trace or a device hides it.

    >>> from sparsefn import arrays
    >>> arrays.array(torch.tensor([1.0, 2.0]))
    array([1., 2.], dtype=float32)
    >>> _ = torch.vmap(lambda x: print(arrays.array(x)) or x)(torch.ones(1, 2))
    None

    bfloat16, which numpy lacks, comes as int16 words. Gradients do not flow through it, and it must not be
    written to unless the tensor was made for that.
    """
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or is_tracing()  # type: ignore[no-untyped-call]
    return None if traced else memory(x)


def memory(x: Tensor) -> Array | None:
    """`array` inside an operator of our own: what looks on from outside does not see in here.

    >>> from sparsefn import arrays
    >>> arrays.memory(torch.tensor([1.0, 2.0]))
    array([1., 2.], dtype=float32)
    """
    x = x.detach()
    try:
        return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    except (RuntimeError, TypeError):  # wrapped by vmap or grad, fake, a subclass; on another device
        return None


def each(run: Callable[[Job], Out], jobs: Iterable[Job], work: int) -> list[Out]:
    """What every job gives, on as many threads as torch may use where the work, counted in elements, is worth it.

    >>> from sparsefn import arrays
    >>> arrays.each(lambda job: 2 * job, [1, 2], work=2)
    [2, 4]

    Results stand in the order of the jobs. The first error is raised.
    """
    listed = list(jobs)
    threads = min(torch.get_num_threads(), len(listed))
    if threads < 2 or work < _MANY:
        return [run(job) for job in listed]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, listed))
