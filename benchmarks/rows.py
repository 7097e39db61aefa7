"""What it saves when processes share the rows of a solve: `sf.distributed.by_rows`, on
processes of this machine.

    python benchmarks/rows.py
    python benchmarks/rows.py --quick

Each process has one thread. A round solves a layer on one process while the others
wait, and then on all of them. Both clocks count: on a machine that has less idle cores
than processes, the time that the busiest process computes says what more cores would
give. Weights and masks are held against those of one process.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import Row, options_of, row, show, write
from torch import Tensor, distributed

import sparsefn as sf

Solve = Callable[[], Any]


def solves(n: int, rows: int) -> dict[str, Solve]:
    """Solves of a layer of so many rows and n columns."""
    torch.manual_seed(0)
    x, weight = torch.randn(2 * n, n), torch.randn(rows, n)
    gram = x.T @ x
    stats = {"w": {"count": torch.tensor(2 * n), "square": gram.diagonal().double()}}
    wanda = sf.methods.wanda(0.5, stats, pattern=sf.patterns.row_balanced())
    start = wanda.init({"w": weight})
    return {
        "SparseGPT, half kept": lambda: sf.solve.obs(weight, gram, keep=0.5),
        "SparseGPT, 2:4": lambda: sf.solve.obs(
            weight, gram, pattern=sf.patterns.nm(2, 4)
        ),
        "Wanda": lambda: wanda.update(start, start.params, 0)[:2],
    }


def timed(solve: Solve) -> tuple[float, float, Any]:
    """Seconds by the clock and of this process's own, and the result."""
    begun, own = time.perf_counter(), time.process_time()
    result = solve()
    return time.perf_counter() - begun, time.process_time() - own, result


def shared(solve: Solve) -> tuple[float, float, Any]:
    """The same on all processes: the seconds are those of the process that has most of
    them.
    """

    def run() -> Any:
        with sf.distributed.by_rows():
            return solve()

    distributed.barrier()
    *seconds, result = timed(run)
    most = torch.tensor(seconds)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return float(most[0]), float(most[1]), result


def rounds_of(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """All rounds on one of the processes."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    n = 64 if options.smoke else 2048 if options.quick else 4096
    found = {}
    for name, solve in solves(
        n, 2 * n if options.smoke or options.quick else n
    ).items():
        taken = []
        for _ in range(min(options.rounds, 5) + 1):
            alone = timed(solve) if not rank else None
            both = shared(solve)
            if alone is not None:
                trees: list[dict[str, Tensor]] = [
                    sf.tree.flatten(one[2])[0] for one in (alone, both)
                ]
                if not all(
                    torch.equal(x, trees[1][path]) for path, x in trees[0].items()
                ):
                    raise AssertionError(
                        f"{name}: {ranks} processes give other bits than one"
                    )
                taken.append((*alone[:2], *both[:2]))
        found[f"{name}, {n} columns"] = taken[1:]  # the first warms up
    if not rank:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    sf.distributed.leave()


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    tables = {}
    for ranks in (2,):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(rounds_of, (ranks, folder, options), ranks)
            found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
        for name, taken in found.items():
            for clock, what in enumerate(("by the clock", "of the busiest process")):
                base, both = ([one[i + clock] for one in taken] for i in (0, 2))
                title = f"{name}, seconds {what}"
                tables[title] = [
                    row("one process", base, base),
                    row(f"{ranks} processes", both, base),
                ]
                show(f"{title} ({len(taken)} rounds)", tables[title])
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("rows", main(chosen), chosen)
