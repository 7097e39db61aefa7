"""Timing that survives a busy machine: alternatives in turn, ratios within a round, medians over rounds."""

import argparse
import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sparsefn as sf

SHORTEST = 2e-3  # seconds: faster calls are repeated within a round
WAIT = 300  # seconds a child may take to measure its memory


class Case(NamedTuple):
    """One alternative. What `setup` returns, untimed, is the argument of `run`, once a call."""

    name: str
    run: Callable[..., Any]
    setup: Callable[[], Any] | None = None


class Row(NamedTuple):
    """What one alternative took: seconds a call, time over that of the first, and the middle half of the rounds."""

    name: str
    seconds: float
    ratio: float
    low: float
    high: float
    peak_mib: float | None


def call(case: Case) -> Any:
    """Run an alternative once, with its setup."""
    return case.run() if case.setup is None else case.run(case.setup())


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


def compare(title: str, cases: Sequence[Case], options: argparse.Namespace, memory: bool = False) -> list[Row]:
    """Time alternatives in interleaved rounds, print a table, and return it. The first is the base of the ratios.

    A round runs each once, or as often as `SHORTEST` asks for, every other round backwards. A round's ratios
    belong to one moment, so that a machine that is busy for a while slows both sides of them.
    """
    times = [max(1, int(SHORTEST / max(_seconds(case, 1), 1e-7))) for case in cases]  # the first call warms up, too
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < options.rounds and (len(rounds) < 3 or time.perf_counter() - start < options.budget):
        order = range(len(cases)) if len(rounds) % 2 == 0 else reversed(range(len(cases)))
        taken = {i: _seconds(cases[i], times[i]) for i in order}
        rounds.append([taken[i] for i in range(len(cases))])
    rows = []
    for i, case in enumerate(cases):
        ratios = [taken[i] / taken[0] for taken in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        peak = peak_mib(case) if memory and not options.smoke else None
        rows.append(Row(case.name, statistics.median(taken[i] for taken in rounds), middle, low, high, peak))
    show(f"{title} ({len(rounds)} rounds)", rows)
    return rows


def show(title: str, rows: Sequence[Row]) -> None:
    """Print one table."""
    width = max(len(row.name) for row in rows)
    print(f"\n{title}\n{'':{width}}  {'time, ms':>10}  {'ratio':>7}  {'middle half':>15}  {'peak, MiB':>9}")
    for row in rows:
        spread = f"{row.low:.2f}..{row.high:.2f}"
        peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
        print(f"{row.name:{width}}  {row.seconds * 1e3:10.3f}  {row.ratio:7.2f}  {spread:>15}  {peak:>9}", flush=True)


# ---- memory --------------------------------------------------------------------------------------


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {field} in /proc/self/status")


def _peak_of_second_call(case: Case, out: Any) -> None:
    torch.set_num_threads(1)  # threads do not live through a fork
    call(case)  # so that code pages are loaded
    argument = None if case.setup is None else case.setup()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory is used again, and not seen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts at what is resident now
    before = _status("VmRSS")
    result = case.run() if case.setup is None else case.run(argument)
    out.send(_status("VmHWM") - before)
    del result


def peak_mib(case: Case) -> float | None:
    """Resident memory that one call adds at its peak, its result included, in MiB; None where Linux does not say.

    Measured in a forked child, by one thread. Runs no autograd: its threads do not live through a fork either.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_peak_of_second_call, args=(case, send))
    child.start()
    send.close()  # so that a child that dies ends the wait
    try:
        return float(receive.recv()) if receive.poll(WAIT) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()
        receive.close()


# ---- what is written -----------------------------------------------------------------------------


def options_of(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options that all benchmarks share; sets the number of threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes: all benchmarks in under two minutes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round: does it run, do masks agree")
    parser.add_argument("--large", action="store_true", help="also 1e8 scores (needs 8 GiB of memory)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of each comparison, at most (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; one gives the steadiest ratios")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder of the JSON files")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.smoke else 5 if options.quick else 9)
    options.budget = 3.0 if options.quick else 20.0  # seconds of a comparison, but three rounds at least
    torch.set_num_threads(options.threads)
    return options


def machine() -> dict[str, Any]:
    """What the numbers depend on. No name and no path of the machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparsefn": sf.__version__,
    }


def write(name: str, tables: dict[str, list[Row]], options: argparse.Namespace) -> None:
    """Write tables as JSON, with what they depend on."""
    options.out.mkdir(parents=True, exist_ok=True)
    file: Path = options.out / f"{name}.json"
    size = "smoke" if options.smoke else "quick" if options.quick else "full"
    rows = {title: [row._asdict() for row in table] for title, table in tables.items()}
    content = {"machine": machine(), "size": size, "tables": rows}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {file.name}", file=sys.stderr)


# ---- do masks agree ------------------------------------------------------------------------------


def same_up_to_ties(ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor) -> None:
    """Raise unless two masks keep as many, and differ in entries of one score at most: ties, which peers leave open."""
    if ours.shape != theirs.shape or int(ours.sum()) != int(theirs.sum()):
        raise AssertionError(f"kept {int(ours.sum())} of {tuple(ours.shape)}, and {int(theirs.sum())}")
    contested = scores[ours != theirs]
    if contested.numel() and contested.amin() != contested.amax():
        raise AssertionError(f"{contested.numel()} entries of several scores differ")
