"""What an update costs beside its arithmetic: Python calls and time, on leaves so small
that nothing else is left.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --device-path   # as on a GPU, counted without one
    python benchmarks/overhead.py --kernels       # the same with kernels in Triton
    python benchmarks/overhead.py --json          # calls a leaf alone, all ways
    python benchmarks/overhead.py --top 20        # which functions take the time

There are 54 leaves of 8 x 8. With `--device-path` CPU tensors take the way of tensors
on a GPU without kernels: lists of tensors, joined competitions, and no numpy. With
`--kernels` they take the way of tensors on a GPU with kernels, and no kernel is
launched: what is left is the work of the host. Calls are counted by cProfile, calls of
functions in C included, but for calls that C makes, as `map` does; their number depends
on the versions of Python and torch.
"""

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from _loops import attached_step
from _timing import write
from torch import Tensor, nn

import sparsefn as sf
from sparsefn._engine import transforms
from sparsefn._engine.backends import BACKENDS, has_backend
from sparsefn._engine.draws import leaf_draws
from sparsefn._engine.leaves import leafwise, lists
from sparsefn._engine.selection import batches, dispatch
from sparsefn._engine.transforms import transformed
from sparsefn.masks import select

LEAVES = 54
SIDE = 8
KERNELS = Path(__file__).resolve().parent.parent / "kernels"
NEVER = 10**6  # steps until an attached optimizer changes masks


Cases = dict[str, Callable[[], object]]


class Row(NamedTuple):
    """The cost of one call on all leaves."""

    name: str
    calls: int
    calls_a_leaf: float
    milliseconds: float | None = None


@contextlib.contextmanager
def device_path() -> Iterator[None]:
    """CPU tensors take the way that tensors on a GPU take."""
    usual = dispatch._elsewhere
    kernels = has_backend("winners", "cpu")

    def as_lists(tensors: list[Tensor]) -> bool:
        return bool(tensors) and not transformed()

    def selected(entries: Any, counts: Any, joint: bool) -> list[Tensor]:
        if not batches.takes(entries) or kernels:
            return usual(entries, counts, joint)
        own = dispatch._placed(entries, counts, joint)
        if joint:
            return batches.joint_masks(entries, own[0])
        return batches.winners(entries, own)

    with contextlib.ExitStack() as stack:
        for module in (lists, batches, dispatch, leaf_draws, select):
            stack.enter_context(mock.patch.object(module, "pays", as_lists))
        stack.enter_context(mock.patch.object(transforms, "_memory", lambda x: None))
        # what CPU tensors alone have: small leaves end to end, and memory
        no_packs = mock.patch.object(lists, "small_packs", lambda rows: [])
        no_words = mock.patch.object(leafwise, "_words", lambda *row, **least: None)
        stack.enter_context(no_packs)
        stack.enter_context(no_words)
        stack.enter_context(mock.patch.object(dispatch, "_elsewhere", selected))
        yield


@contextlib.contextmanager
def kernels_path() -> Iterator[None]:
    """CPU tensors take the way that tensors on a GPU with kernels take. Nothing is
    launched, so that results have no values.
    """
    sys.path.insert(0, str(KERNELS))
    from triton.runtime.jit import JITFunction

    from sparsefn_kernels import device_tables
    from sparsefn_kernels.seams import backends_for

    def by_copy(numbers: list[int], table: Tensor) -> None:
        device_tables.by_copy(np.array(numbers, np.int64), table)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(BACKENDS, backends_for("cpu"), clear=True))
        stack.enter_context(
            mock.patch.object(JITFunction, "run", lambda self, *args, **options: None)
        )
        # a CUDA device copies its tables, unless a graph is captured
        stack.enter_context(mock.patch.object(device_tables, "by_launches", by_copy))
        stack.enter_context(device_path())
        yield


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "cpu": contextlib.nullcontext,
    "device": device_path,
    "kernels": kernels_path,
}
TITLES = {
    "cpu": "on a CPU",
    "device": "on the device's path",
    "kernels": "on the device's path, with kernels that are not launched",
}


def tree(seed: int) -> dict[str, Tensor]:
    """The leaves."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.weight": torch.randn(SIDE, SIDE, generator=generator)
        for i in range(LEAVES)
    }


def rigl(**options: object) -> sf.Algorithm:
    """RigL from masks by magnitude."""
    return sf.rigl(0.5, init="magnitude", **options)  # type: ignore[arg-type]


def updates() -> Cases:
    """Updates that change masks, and steps of optimizers that do or do not."""
    params, grads = tree(0), tree(1)
    calls: Cases = {}
    algorithms = {"rigl": rigl(), "set": sf.set(0.5), "gmp": sf.gmp(0.5, steps=1000)}
    for name, algorithm in algorithms.items():
        state = algorithm.init(params)
        calls[f"{name}, change"] = lambda a=algorithm, s=state: a.update(s, grads, 0)
    for name in ("sgd", "adam", "adamw"):
        optimizer = getattr(sf.optimizers, name)(1e-3)
        trained = sf.with_optimizer(rigl(), optimizer)
        state = trained.init(params)
        for case, step in {"quiet": 1, "change": 0}.items():
            calls[f"rigl + {name}, {case}"] = lambda t=trained, s=state, i=step: (
                t.update(s, grads, i)
            )
    return calls


def torch_adam() -> Callable[[], object]:
    """A step of torch's own Adam."""
    params = [nn.Parameter(x) for x in tree(0).values()]
    for param, grad in zip(params, tree(1).values(), strict=True):
        param.grad = grad
    return torch.optim.Adam(params, 1e-3, foreach=True).step


def attached_adam() -> Callable[[], object]:
    """The same on a module with masks attached, at a step that changes none."""
    leaves = {str(i): x for i, x in enumerate(tree(0).values())}
    algorithm = rigl(steps=10**7, when=sf.every(NEVER))
    return attached_step(algorithm, leaves, list(tree(1).values()), foreach=True)


def cases() -> Cases:
    """All calls by name."""
    return {
        **updates(),
        "torch.optim.Adam, foreach": torch_adam(),
        "attached torch Adam, quiet": attached_adam(),
    }


def profiled(call: Callable[[], object]) -> pstats.Stats:
    """The profile of one call, when caches are warm, without what the garbage collector
    calls.
    """
    call()
    call()
    gc.collect()
    gc.disable()
    try:
        profile = cProfile.Profile()
        profile.runcall(call)
    finally:
        gc.enable()
    return pstats.Stats(profile)


def calls_of(stats: pstats.Stats) -> int:
    """How many calls a profile saw."""
    return stats.total_calls  # type: ignore[attr-defined,no-any-return]


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def counts(some: Cases) -> dict[str, float]:
    """Calls a leaf of each case, the fewest of three profiles, without a clock."""
    found = {}
    for name, call in some.items():
        fewest = min(calls_of(profiled(call)) for _ in range(3))
        found[name] = round(fewest / LEAVES, 1)
    return found


def measured(some: Cases, top: int, rounds: int) -> list[Row]:
    """A row of each case, printed as it is made."""
    rows = []
    for name, call in some.items():
        stats = profiled(call)
        calls = calls_of(stats)
        row = Row(name, calls, calls / LEAVES, milliseconds(call, rounds))
        print(
            f"{name:28} {calls:8,} calls {row.calls_a_leaf:8.1f} a leaf "
            f"{row.milliseconds:8.2f} ms",
            flush=True,
        )
        if top:
            stats.sort_stats("tottime").print_stats(top)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--device-path",
        dest="way",
        action="store_const",
        const="device",
        default="cpu",
        help="the way of tensors on a GPU",
    )
    ways.add_argument(
        "--kernels",
        dest="way",
        action="store_const",
        const="kernels",
        help="the way of tensors on a GPU with kernels, of which none is launched",
    )
    parser.add_argument("--json", action="store_true", help="numbers only")
    parser.add_argument(
        "--smoke", "--quick", action="store_true", help="one round: does it run"
    )
    parser.add_argument(
        "--top", type=int, default=0, help="print the slowest functions, so many"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks"),
        help="folder of the JSON file",
    )
    options = parser.parse_args()
    options.quick = options.smoke
    torch.set_num_threads(1)
    if options.json:
        found = {}
        for name, way in WAYS.items():
            made = cases()  # first masks are no masks where nothing is launched
            with way():
                found[name] = counts(made)
        print(json.dumps(found))
        return
    title = TITLES[options.way]
    made = cases()
    with WAYS[options.way]():
        rows = measured(made, options.top, 1 if options.smoke else 15)
    write("overhead", {f"updates of 54 leaves of 8 x 8, {title}": rows}, options)


if __name__ == "__main__":
    main()
