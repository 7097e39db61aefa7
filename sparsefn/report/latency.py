"""Measured time of a model, whole and by module."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsefn.core.checks import aligned, check_int
from sparsefn.nn.modules.calls import as_call, left_as_it_was


class Latency(NamedTuple):
    """The result of `latency`, in milliseconds; `str()` of it is a table.

    >>> sf.report.Latency(1.5, {"0": 1.25}).total
    1.5

    Attributes:
        total: Time of a call of the model.
        rows: For each module that is called and has none of its own inside, by path,
            the time of all of its calls in one call of the model.
    """

    total: float
    rows: Mapping[str, float]

    def __str__(self) -> str:
        """Align the rows, with the total below."""
        lines = [
            ("module", "ms"),
            *((path, f"{ms:.4f}") for path, ms in self.rows.items()),
        ]
        return aligned([*lines, ("total", f"{self.total:.4f}")], left=1)


def latency(
    module: nn.Module,
    example: Tensor | tuple[object, ...] | Mapping[str, object],
    *,
    repeats: int = 30,
    warmup: int = 3,
) -> Latency:
    """Measure how long a call of a module takes, in milliseconds.

    >>> measured = sf.report.latency(
    ...     torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.ones(1, 8), repeats=3
    ... )
    >>> list(measured.rows), measured.total > 0
    (['0'], True)

    Args:
        module: The module, in the mode that it is in. It runs without gradients, and
            what calls change of its buffers is put back.
        example: A tensor, a tuple of arguments or a dict of keyword arguments.
        repeats: How many calls are measured. Each time is their median.
        warmup: How many calls run before them.

    Returns:
        The time of the module and of the modules in it, in milliseconds. The total is
        of calls without hooks, so that it may be less than the sum of the rows.

    Raises:
        TypeError: `example` is of another kind, or `repeats` or `warmup` is not an int.
        ValueError: `repeats` is below 1, or `warmup` below 0.

    On CUDA each module is waited for. Times of smaller models of each layer are what
    `sf.budgets.within` takes as a table:

    >>> def time_of(width):
    ...     return sf.report.latency(
    ...         torch.nn.Linear(8, width), torch.ones(1, 8), repeats=3
    ...     ).total
    >>> table = {"0.weight": {width: time_of(width) for width in (4, 8, 16)}}
    """
    check_int("latency", "repeats", repeats, 1)
    check_int("latency", "warmup", warmup, 0)
    args, kwargs = as_call(example)
    starts: dict[str, float] = {}
    spent: dict[str, float] = defaultdict(float)

    def timed() -> float:
        start = _now(module)
        module(*args, **kwargs)
        return 1e3 * (_now(module) - start)

    def before(path: str, *_: Any) -> None:
        starts[path] = _now(module)

    def after(path: str, *_: Any) -> None:
        spent[path] += 1e3 * (_now(module) - starts[path])

    with torch.no_grad(), left_as_it_was(module):
        for _ in range(warmup):
            timed()
        total = statistics.median([timed() for _ in range(repeats)])
        innermost = {
            path: part
            for path, part in module.named_modules()
            if not any(part.children())
        }
        handles = [
            part.register_forward_pre_hook(partial(before, path))
            for path, part in innermost.items()
        ]
        handles += [
            part.register_forward_hook(partial(after, path))
            for path, part in innermost.items()
        ]
        runs: dict[str, list[float]] = defaultdict(list)
        try:
            for _ in range(repeats):
                spent.clear()
                timed()
                for path, ms in spent.items():
                    runs[path].append(ms)
        finally:
            for handle in handles:
                handle.remove()
    rows = {path: statistics.median(runs[path]) for path in innermost if path in runs}
    return Latency(total, rows)


def _now(module: nn.Module) -> float:
    # After what was started on the device of the module.
    first: Tensor | None = next(iter(module.parameters()), None)
    if first is not None and first.device.type == "cuda":
        torch.cuda.synchronize(first.device)
    return time.perf_counter()
