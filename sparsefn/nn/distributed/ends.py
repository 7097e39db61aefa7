"""All processes of a script: who they are, and how they end."""

from __future__ import annotations

import gc
import time

from torch import distributed

_MOMENT = 0.2  # seconds; the threads need the interpreter for microseconds


def everyone() -> tuple[str, ...]:
    """The name of the default process group; none where there is none.

    >>> everyone()
    ()
    """
    group = distributed.group.WORLD if distributed.is_available() else None
    return () if group is None else (group.group_name,)


def leave() -> None:
    """Wait for the other processes, and leave all process groups.

    >>> sf.distributed.leave()  # one process without a process group: nothing to leave

    Call it in the last line of a script, in place of
    `torch.distributed.destroy_process_group()`. When that returns, threads of gloo may
    still hold tensors of the last messages, as it does not wait for the threads of a
    group that a mesh keeps alive. A thread that drops a tensor while the interpreter
    ends aborts the process, after its last line, with exit code -6. So this waits for
    all processes, leaves the groups, and gives the threads a fifth of a second to
    finish. Every process must call it.
    """
    if not everyone():
        return
    distributed.barrier()
    gc.collect()
    distributed.destroy_process_group()
    time.sleep(_MOMENT)
