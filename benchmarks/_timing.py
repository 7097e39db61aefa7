"""Timing that survives a busy machine: alternatives in turn, ratios within a round,
medians over rounds.
"""

import argparse
import ctypes
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import sparsefn as sf

SHORTEST = 2e-3  # seconds: faster calls are repeated within a round
# weights from which memory is measured: Linux counts pages to a quarter of a MiB or so
SOME = 10**6
INPUTS = 16  # that calls on few numbers take in turn


class Case(NamedTuple):
    """One alternative: for each call, `run` is timed on the result of `setup`, which is
    not.
    """

    name: str
    run: Callable[..., Any]
    setup: Callable[[], Any] | None = None


class Row(NamedTuple):
    """The times of one alternative: seconds a call, their ratio to the first's, and the
    middle half of the rounds.

    `rounds` are the seconds of each round. `peak_mib` is the memory that a call adds at
    most, `extra` how much of that is not there any more when it has returned, in bytes
    a weight.
    """

    name: str
    seconds: float
    ratio: float
    low: float
    high: float
    rounds: tuple[float, ...]
    peak_mib: float | None = None
    extra: float | None = None


def call(case: Case) -> Any:
    """Run an alternative once, with its setup."""
    return case.run() if case.setup is None else case.run(case.setup())


def in_turn(run: Callable[[Any], Any], inputs: Iterable[Any]) -> Callable[[], Any]:
    """A call that takes the next input each time: a loop over one and the same teaches
    the processor its branches.
    """
    endless = itertools.cycle(inputs)
    return lambda: run(next(endless))


def _seconds(case: Case, times: int) -> float:
    total = 0.0
    if case.setup is None:
        start = time.perf_counter()
        for _ in range(times):
            case.run()
        return (time.perf_counter() - start) / times
    for _ in range(times):
        argument = case.setup()
        start = time.perf_counter()
        case.run(argument)
        total += time.perf_counter() - start
    return total / times


def compare(
    title: str, cases: Sequence[Case], options: argparse.Namespace, weights: int = 0
) -> list[Row]:
    """Time alternatives in interleaved rounds, print a table, and return it. The first
    is the base of the ratios.

    A round runs each once, or as often as `SHORTEST` asks for, every other round
    backwards. A round's ratios belong to one moment, so that a machine that is busy for
    a while slows both sides of them. With a number of weights, if it is `SOME` or more,
    memory is measured too.
    """
    for case in cases:
        call(case)  # warms up
    times = [max(1, int(SHORTEST / max(_seconds(case, 1), 1e-7))) for case in cases]
    taken: list[list[float]] = []
    start = time.perf_counter()
    while len(taken) < options.rounds and (
        len(taken) < 5 or time.perf_counter() - start < options.budget
    ):
        order = (
            range(len(cases)) if len(taken) % 2 == 0 else reversed(range(len(cases)))
        )
        one = {i: _seconds(cases[i], times[i]) for i in order}
        taken.append([one[i] for i in range(len(cases))])
    rows = [
        row(case.name, [one[i] for one in taken], [one[0] for one in taken])
        for i, case in enumerate(cases)
    ]
    if weights >= SOME:
        rows = [
            with_memory(row, case, weights)
            for row, case in zip(rows, cases, strict=True)
        ]
    show(f"{title} ({len(taken)} rounds)", rows)
    return rows


def row(name: str, taken: Sequence[float], base: Sequence[float]) -> Row:
    """The row of an alternative from its seconds in each round and those of the
    base.
    """
    return Row(name, statistics.median(taken), *middle(taken, base), tuple(taken))


def middle(taken: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """The median of the ratios of each round, and their quartiles."""
    ratios = [one / other for one, other in zip(taken, base, strict=True)]
    low, median, high = (
        statistics.quantiles(ratios, n=4, method="inclusive")
        if len(ratios) > 1
        else ratios * 3
    )
    return median, low, high


def show(title: str, rows: Sequence[Row]) -> None:
    """Print one table."""
    width = max(len(row.name) for row in rows)
    memory = any(row.peak_mib is not None for row in rows)
    head = f"{'':{width}}  {'time, ms':>10}  {'ratio':>7}  {'middle half':>15}"
    print(
        f"\n{title}\n{head}"
        + (f"  {'peak, MiB':>9}  {'extra, bytes a weight':>21}" if memory else "")
    )
    for row in rows:
        spread = f"{row.low:.2f}..{row.high:.2f}"
        line = (
            f"{row.name:{width}}  {row.seconds * 1e3:10.3f}  {row.ratio:7.2f}  "
            f"{spread:>15}"
        )
        print(
            line
            + (
                ""
                if row.peak_mib is None
                else f"  {row.peak_mib:9.1f}  {row.extra:21.2f}"
            ),
            flush=True,
        )


# ---- memory --------------------------------------------------------------------------


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {field} in /proc/self/status")


def _resident() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory is used again, and not seen
    return _status("VmRSS")


def memory_of(case: Case) -> tuple[float, float] | None:
    """Resident memory that a call adds at its peak, and that it leaves behind: its
    result. In MiB.

    None where Linux does not say. The call has run before, so that code pages are
    loaded.
    """
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    argument = None if case.setup is None else case.setup()
    before = _resident()
    # the peak starts at the memory that is resident now
    reset.write_text("5", encoding="ascii")
    result = case.run() if case.setup is None else case.run(argument)
    peak = _status("VmHWM") - before
    left = _resident() - before
    del result, argument
    return peak, left


def with_memory(row: Row, case: Case, weights: int) -> Row:
    """The row with the memory of a call."""
    memory = memory_of(case)
    return (
        row
        if memory is None
        else row._replace(
            peak_mib=memory[0], extra=(memory[0] - memory[1]) * 2**20 / weights
        )
    )


# ---- output --------------------------------------------------------------------------


def options_of(
    description: str | None, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options that all benchmarks share; sets the number of threads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smaller sizes: all benchmarks in under two minutes",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes, one round: does it run, do masks agree",
    )
    parser.add_argument(
        "--large", action="store_true", help="also 1e8 scores (needs 8 GiB of memory)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=None,
        help="rounds of each comparison, at most (default 25)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of torch; one gives the steadiest ratios",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks"),
        help="folder of the JSON files",
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (
        1 if options.smoke else 9 if options.quick else 25
    )
    # seconds of a comparison, but five rounds at least
    options.budget = 2.0 if options.quick else 12.0
    torch.set_num_threads(options.threads)
    return options


def machine() -> dict[str, Any]:
    """The setting that the numbers depend on. No name and no path of the machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "sparsefn": sf.__version__,
    }


def write(name: str, tables: dict[str, list[Any]], options: argparse.Namespace) -> None:
    """Write tables of named tuples as JSON, with their setting."""
    options.out.mkdir(parents=True, exist_ok=True)
    file: Path = options.out / f"{name}.json"
    size = "smoke" if options.smoke else "quick" if options.quick else "full"
    rows = {title: [row._asdict() for row in table] for title, table in tables.items()}
    content = {"machine": machine(), "size": size, "tables": rows}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {file.name}", file=sys.stderr)


# ---- do masks agree ------------------------------------------------------------------


def same_up_to_ties(
    ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor
) -> None:
    """Raise unless two masks keep as many, and differ in entries of one score at most:
    ties, which peers leave open.
    """
    if ours.shape != theirs.shape or int(ours.sum()) != int(theirs.sum()):
        raise AssertionError(
            f"kept {int(ours.sum())} of {tuple(ours.shape)}, and {int(theirs.sum())}"
        )
    contested = scores[ours != theirs]
    if contested.numel() and contested.amin() != contested.amax():
        raise AssertionError(f"{contested.numel()} entries of several scores differ")
