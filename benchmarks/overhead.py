"""What an update costs beside its arithmetic: Python calls and time, on leaves so small
that nothing else is left.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --device-path   # as on a GPU, counted without one
    python benchmarks/overhead.py --json          # calls a leaf alone, both ways
    python benchmarks/overhead.py --top 20        # which functions take the time

There are 54 leaves of 8 x 8. With `--device-path` CPU tensors take the way of tensors
on a GPU without kernels: lists of tensors, joined competitions, and no numpy. Calls are
counted by cProfile, calls of functions in C included; their number depends on the
versions of Python and torch.
"""

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from _loops import attached_step
from _timing import write
from torch import Tensor, nn

import sparsefn as sf
from sparsefn._engine import transforms
from sparsefn._engine.backends import has_backend
from sparsefn._engine.draws import leaf_draws
from sparsefn._engine.leaves import leafwise, lists
from sparsefn._engine.selection import batches, dispatch
from sparsefn._engine.transforms import transformed
from sparsefn.masks import select

LEAVES = 54
SIDE = 8
NEVER = 10**6  # steps until an attached optimizer changes masks


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


def updates() -> dict[str, Callable[[], object]]:
    """Updates that change masks, and steps of optimizers that do or do not."""
    params, grads = tree(0), tree(1)
    calls: dict[str, Callable[[], object]] = {}
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


def cases() -> dict[str, Callable[[], object]]:
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


def counts() -> dict[str, float]:
    """Calls a leaf of each case, the fewest of three profiles, without a clock."""
    found = {}
    for name, call in cases().items():
        fewest = min(calls_of(profiled(call)) for _ in range(3))
        found[name] = round(fewest / LEAVES, 1)
    return found


def measured(top: int, rounds: int) -> list[Row]:
    """A row of each case, printed as it is made."""
    rows = []
    for name, call in cases().items():
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
    parser.add_argument(
        "--device-path", action="store_true", help="the way of tensors on a GPU"
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
        found = {"cpu": counts()}
        with device_path():
            found["device"] = counts()
        print(json.dumps(found))
        return
    way = device_path() if options.device_path else contextlib.nullcontext()
    title = "on the device's path" if options.device_path else "on a CPU"
    with way:
        rows = measured(options.top, 1 if options.smoke else 15)
    write("overhead", {f"updates of 54 leaves of 8 x 8, {title}": rows}, options)


if __name__ == "__main__":
    main()
