"""Measuring on an accelerator: a clock of the device, rows of a table, and kernels on
or off.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from sparsefn._engine.backends import BACKENDS, has_backend

OFF, ON = "torch alone", "kernels"


class Line(NamedTuple):
    """One number of a table: what was measured, which way, and why there is none."""

    what: str
    way: str
    value: float | None
    unit: str
    note: str = ""


class Bench:
    """A device, a deadline, and the tables so far."""

    def __init__(self, device: str, smoke: bool, seconds: float) -> None:
        self.device, self.smoke = torch.device(device), smoke
        self.end = time.monotonic() + seconds
        self.tables: dict[str, list[Line]] = {}
        self.table: list[Line] = []
        self.wrong = 0
        self.refused = (
            ""
            if has_backend("winners", device)
            else f"none are registered for {device}: see --kernels"
        )

    def ways(self) -> list[str]:
        """The ways that there are here: torch alone, and kernels where they serve."""
        return [OFF] if self.refused else [OFF, ON]

    def begin(self, title: str) -> None:
        """Start a table."""
        self.table = self.tables.setdefault(title, [])
        print(f"\n{title}", flush=True)

    def add(
        self, what: str, way: str, value: float | None, unit: str, note: str = ""
    ) -> None:
        """A row, printed at once: a run that is cut short has shown what it knows."""
        self.table.append(Line(what, way, value, unit, note))
        shown = "-" if value is None else f"{value:,.4g}"
        print(f"  {what:44} {way:24} {shown:>12} {unit:8} {note}".rstrip(), flush=True)

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Give memory back, so that a large input finds room."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def attempt(
        self, what: str, way: str, unit: str, measure: Callable[[], float]
    ) -> None:
        """A row of what is measured, or of why it was not: one failure must not cost
        the rest of the day.
        """
        if time.monotonic() > self.end:
            self.add(what, way, None, unit, "no time left")
            return
        try:
            with switched(way):
                value = measure()
        except Exception as error:
            self.add(
                what,
                way,
                None,
                unit,
                f"{type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
            )
        else:
            self.add(what, way, value, unit)

    def time(self, what: str, way: str, run: Callable[[], Any]) -> None:
        """A row of the milliseconds of a call."""
        self.attempt(what, way, "ms", lambda: self.milliseconds(run))

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """The median of some rounds, each of enough calls; of a slow call one is
        enough.
        """
        run()
        self.wait()
        one = self._of_round(run, 1)
        times = max(1, min(50, int(5.0 / max(one, 1e-3))))
        rounds = 1 if self.smoke or one > 200.0 else 7
        return statistics.median(self._of_round(run, times) for _ in range(rounds))

    def _of_round(self, run: Callable[[], Any], times: int) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(times):
                run()
            return (time.perf_counter() - start) * 1e3 / times
        first, last = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        first.record()
        for _ in range(times):
            run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / times

    def equal(self, what: str, way: str, cases: Iterator[tuple[Any, Any]]) -> None:
        """A row of how many cases differ in a bit from what they should be; any is an
        error of the whole run.
        """
        seen = different = 0

        def count() -> float:
            nonlocal seen, different
            for got, want in cases:
                seen += 1
                different += any(
                    a.dtype != b.dtype or not torch.equal(a.cpu(), b.cpu())
                    for a, b in zip(got, want, strict=True)
                )
            return float(different)

        before = len(self.table)
        self.attempt(what, way, "differ", count)
        line = self.table[before]
        if line.value != 0.0 and line.note != "no time left":
            self.wrong += 1
        self.table[before] = line._replace(note=f"{line.note} of {seen} cases".strip())


def switched(way: str) -> contextlib.AbstractContextManager[object]:
    """Kernels as they are registered, or off in any other way."""
    return (
        contextlib.nullcontext()
        if way.startswith(ON)
        else mock.patch.dict(BACKENDS, clear=True)
    )


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "90% zeros": lambda x: x.masked_fill_(x.abs() < 1.645, 0.0),
    "all equal": lambda x: x.fill_(1.0),
    "bfloat16 ties": lambda x: x.bfloat16().to(x.dtype),
}


def scores(
    n: int, dtype: torch.dtype, fill: str, seed: int, device: torch.device
) -> Tensor:
    """Numbers drawn on the device itself."""
    generator = torch.Generator(device).manual_seed(seed)
    return FILLS[fill](torch.randn(n, dtype=dtype, device=device, generator=generator))


def by_topk(x: Tensor, k: int) -> Tensor:
    """The mask as one writes it with torch; ties fall as they do."""
    flat = x.reshape(-1)
    best = torch.topk(flat, k, sorted=False).indices
    return (
        torch.zeros(flat.shape, dtype=torch.bool, device=x.device)
        .scatter_(0, best, True)
        .reshape(x.shape)
    )


def by_sort(x: Tensor, k: int) -> Tensor:
    """The mask by a stable sort: exact, and slow."""
    flat = x.reshape(-1)
    best = torch.sort(flat, descending=True, stable=True).indices[:k]
    return (
        torch.zeros(flat.shape, dtype=torch.bool, device=x.device)
        .scatter_(0, best, True)
        .reshape(x.shape)
    )
