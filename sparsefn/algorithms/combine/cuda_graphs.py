"""CUDA graphs of functions that read and write the same tensors at every call."""

from __future__ import annotations

import functools
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsefn.core.state import State

_TORCH = str(Path(torch.__file__).parent)
_one_at_a_time = threading.Lock()  # torch makes one capture at a time in a process


class Waits(RuntimeError):
    """A function waits for the device, which no graph can do; the text says where."""


class Graph(Protocol):
    """What a function does on a device, to be done again."""

    def capture(self, run: Callable[[], State]) -> State:
        """Record the function and return its result, whose tensors have their values
        after `replay`.

        Raises Waits if it cannot be recorded.
        """

    def replay(self) -> None:
        """Do again what was recorded, with the same tensors."""


class CudaGraph:
    """A graph on a CUDA device, which is captured on a stream of its own. Graphs that
    are captured on one stream may have one pool of memory.

    As https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs has it.
    """

    def __init__(self, device: torch.device, stream: Any, pool: Any) -> None:
        self._device = device
        self._stream = stream
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], State]) -> State:
        """Record the function, after two runs that are not recorded."""
        with (
            _one_at_a_time,
            torch.cuda.device(self._device),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # the first call compiles kernels, and may wait
                _never_waiting(run)
            torch.cuda.current_stream().wait_stream(self._stream)
            # "thread_local": other threads, such as one of a DataLoader, go on
            with torch.cuda.graph(
                self._graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                return _never_waiting(run)

    def replay(self) -> None:
        """Queue the recorded work on the current stream."""
        self._graph.replay()


def _never_waiting(run: Callable[[], State]) -> State:
    # Only around the function: torch's own begin and end of a capture wait.
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Waits(line_of(error)) from error
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # torch calls the mode a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def line_of(error: BaseException) -> str:
    """The line of an error, the last one that is no part of torch or of a dispatch
    mode, and its text.

    >>> try:
    ...     torch.ones(2).item()
    ... except RuntimeError as error:
    ...     print(line_of(error))
    line 2 of <...>: a Tensor with 2 elements cannot be converted to Scalar
    """
    lines = [
        line
        for line in traceback.extract_tb(error.__traceback__)
        if not line.filename.startswith(_TORCH) and line.name != "__torch_dispatch__"
    ]
    text = str(error).splitlines()[0]
    return f"line {lines[-1].lineno} of {lines[-1].filename}: {text}"


def _cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    # One pool for all: results are copied out before another graph runs.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return functools.partial(CudaGraph, device, stream, torch.cuda.graph_pool_handle())


# What makes a function that makes graphs on a device, by the type of the device
GRAPHS: dict[str, Callable[[torch.device], Callable[[], Graph]]] = {
    "cuda": _cuda_graphs
}


def stream_of(device: torch.device) -> int | None:
    """The stream on which work for a device is queued; None while code of a user
    captures it.

    >>> stream_of(torch.device("cpu"))
    0
    """
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream
