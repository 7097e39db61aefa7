"""The end of a script of many processes."""

from __future__ import annotations

import gc
import time

from torch import distributed

_MOMENT = 0.2  # seconds; the threads need the interpreter for microseconds


def leave() -> None:
    """Wait for the other processes, and leave all process groups: the last line of a script.

    >>> sf.distributed.leave()  # one process without a process group: nothing to leave

    In place of `torch.distributed.destroy_process_group()`. Threads of gloo may still hold the tensors of the last
    messages when that returns: where a mesh keeps a group alive, it does not wait for them. A thread that drops a tensor
    while the interpreter ends aborts the process, after its last line and with exit code -6. This waits for all
    processes, frees what nobody holds, leaves the groups, and gives the threads a fifth of a second to finish. Every
    process must call it.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    distributed.barrier()
    gc.collect()
    distributed.destroy_process_group()
    time.sleep(_MOMENT)
