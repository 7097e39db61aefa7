"""Selection, draws and updates on a GPU: exactness first, then what they cost, with
kernels and without.

    python benchmarks/device.py                       # all of it, under eight minutes
    python benchmarks/device.py --kernels             # with kernels/README.md's, too
    python benchmarks/device.py --only exact waits    # some of it
    python benchmarks/device.py --smoke --device cpu  # does it run: in tiny sizes

Tables are printed as they grow and written as JSON after each section. The exit status
is 1 where a bit differs. Where `compute-sanitizer` is installed, the exactness of small
sizes is checked under its memcheck and racecheck, too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import torch
from _device import FILLS, OFF, ON, Bench, by_sort, by_topk, scores, switched
from _device_pruning import in_order, solvers
from _device_updates import leaves_of, optimizers, updates
from _timing import write
from torch import Tensor

import sparsefn as sf
from sparsefn._engine.draws.leaf_draws import drawn_leaves
from sparsefn._engine.selection.dispatch import Entry, winners

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHARES = (0.01, 0.1, 0.5, 0.99)
PATTERNS = ((2, 4), (4, 8), (8, 16), (16, 32))
STEPPED = {
    "sgd": sf.optimizers.sgd(0.1, weight_decay=1e-4),
    "momentum": sf.optimizers.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": sf.optimizers.adam(1e-3, weight_decay=1e-4),
    "adamw": sf.optimizers.adamw(1e-3),
}
Masks = list[Tensor]


def name_of(n: int) -> str:
    """A size as it is said."""
    return f"{n:.0e}".replace("e+0", "e") if n >= 1000 else str(n)


def tenth_of_each(leaves: dict[str, Tensor]) -> Callable[[], Masks]:
    """A tenth of each tensor, all in one call."""
    entries = [Entry(w.reshape(1, -1), absolute=True) for w in leaves.values()]
    counts = torch.tensor(
        [w.numel() // 10 for w in leaves.values()], device=entries[0].scores.device
    )
    return lambda: winners(entries, counts)


def tenth_of_all(leaves: dict[str, Tensor]) -> Callable[[], Masks]:
    """A tenth of all tensors in one competition."""
    entries = [Entry(w.reshape(1, -1), absolute=True) for w in leaves.values()]
    count = torch.tensor(
        [sum(w.numel() for w in leaves.values()) // 10], device=entries[0].scores.device
    )
    return lambda: winners(entries, count, joint=True)


# ---- sections ------------------------------------------------------------------------


def machine(b: Bench) -> None:
    """What it is, and what a copy and a launch cost on it."""
    b.begin("the device")
    if b.device.type == "cuda":
        facts = torch.cuda.get_device_properties(b.device)
        b.add(
            facts.name,
            f"sm_{facts.major}{facts.minor}",
            facts.total_memory / 2**30,
            "GiB",
            f"cuda {torch.version.cuda}",
        )
    b.add("kernels", "serve" if not b.refused else "do not serve", None, "", b.refused)
    n = 10**4 if b.smoke else 2**28
    x, one = torch.ones(n, device=b.device), torch.ones(1, device=b.device)
    y = torch.empty_like(x)
    b.attempt(
        "copy of float32",
        OFF,
        "GB/s",
        lambda: 8 * n / 1e6 / b.milliseconds(lambda: y.copy_(x)),
    )
    b.attempt("a launch", OFF, "us", lambda: 1e3 * b.milliseconds(lambda: one.add_(1)))


def exact(b: Bench) -> None:
    """Bits of kernels against the definition on the device and the passes on the CPU,
    on fresh inputs, three times.
    """
    b.begin("exactness: how many cases differ")
    sizes = (1000, 20000) if b.smoke else (10**6, 10**7, 10**8)

    def of_one(
        n: int, dtype: torch.dtype, on_cpu: bool
    ) -> Iterator[tuple[Masks, Masks]]:
        for seed, fill in enumerate(FILLS):
            x = scores(n, dtype, fill, seed, b.device).reshape(1, -1)
            shares = SHARES if n < 10**8 else SHARES[1:3]
            counts = [
                torch.tensor([round(share * n)], device=b.device) for share in shares
            ]
            for count in counts:
                with switched(OFF):
                    want = winners(
                        [Entry(x.cpu() if on_cpu else x)],
                        [count.cpu() if on_cpu else count],
                    )
                yield winners([Entry(x)], [count]), want
                yield winners([Entry(x)], [count]), want

    def of_leaves() -> Iterator[tuple[Masks, Masks]]:
        for seed in range(3):
            leaves = leaves_of(b, seed)
            for make in (tenth_of_each, tenth_of_all):
                with switched(OFF):
                    want = make({path: w.cpu() for path, w in leaves.items()})()
                yield make(leaves)(), want
                yield make(leaves)(), want

    def of_patterns() -> Iterator[tuple[Masks, Masks]]:
        side = 64 if b.smoke else 4096
        for seed, fill in enumerate(FILLS):
            for dtype in DTYPES:
                x = scores(side * side, dtype, fill, seed, b.device).reshape(side, side)
                for kept, of in PATTERNS:
                    pattern = sf.patterns.nm(kept, of)
                    yield (
                        [sf.masks.topk_mask(x, None, pattern=pattern)],
                        [sf.masks.topk_mask(x.cpu(), None, pattern=pattern)],
                    )

    def of_rows() -> Iterator[tuple[Masks, Masks]]:
        rows, units = (8, 9000) if b.smoke else (512, 20000)
        for seed, fill in enumerate(FILLS):
            x = scores(rows * units, torch.float32, fill, seed, b.device).reshape(
                rows, units
            )
            allow, counts = x > -1, torch.arange(rows, device=b.device) * units // rows
            for flags in ((None, None), (allow, None), (None, allow)):
                there = [None if f is None else f.cpu() for f in flags]
                yield (
                    winners([Entry(x, *flags, True)], [counts]),
                    winners([Entry(x.cpu(), *there, True)], [counts.cpu()]),
                )

    def of_draws() -> Iterator[tuple[Masks, Masks]]:
        n = 1000 if b.smoke else 10**6
        key = sf.random.key(3)
        for call in draws(n).values():
            yield [call(key.to(b.device))], [call(key)]
        for kind in ("uniform", "normal"):
            there = leaves_of(b)
            here = {path: w.cpu() for path, w in there.items()}
            drawn, want = (
                drawn_leaves(key, leaves, 3, kind, torch.float32)
                for leaves in (there, here)
            )
            yield list(drawn.values()), list(want.values())

    def of_steps() -> Iterator[tuple[Masks, Masks]]:
        for optimizer in STEPPED.values():
            trained = sf.with_optimizer(
                sf.rigl(0.9, when=sf.at([1]), init="magnitude"), optimizer
            )
            there, here = (
                trained.init({p: w.to(device) for p, w in leaves_of(b).items()})
                for device in (b.device, "cpu")
            )
            for step in range(3):
                grads = leaves_of(b, step + 1)
                there = trained.update(there, grads, step)
                here = trained.update(
                    here, {path: g.cpu() for path, g in grads.items()}, step
                )
                yield tuple(optree.tree_leaves(state) for state in (there, here))

    def of_solves() -> Iterator[tuple[Masks, Masks]]:
        side = 64 if b.smoke else 1024
        weight, *inputs = (
            scores(side * side, torch.float32, "normal", seed, b.device).view(side, -1)
            for seed in range(3)
        )
        hessian = sum(x.T @ x for x in inputs)
        for how in (
            {"keep": 0.5},
            {"mask": weight > 0},
            {"pattern": sf.patterns.nm(2, 4)},
        ):
            with switched(OFF):
                want = sf.solve.obs(weight, hessian, **how)
            yield sf.solve.obs(weight, hessian, **how), want

    for way in b.ways():
        for n in sizes:
            for dtype in DTYPES:
                if way != OFF or n < 10**8:
                    b.equal(
                        f"{name_of(n)} {dtype}",
                        way,
                        of_one(n, dtype, way == OFF or n <= 10**7),
                    )
                    b.tidy()
        for what, cases in {
            "54 leaves, each and joint": of_leaves,
            "N:M of 4 to 32": of_patterns,
            "rows, flags, a count each": of_rows,
            "draws": of_draws,
            "steps of optimizers": of_steps,
            "SparseGPT, as by torch alone": of_solves,
        }.items():
            b.equal(what, way, cases())
            b.tidy()


def draws(n: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The draws that have kernels."""
    return {
        "uniform": lambda key: sf.random.uniform(key, (n,)),
        "uniform bfloat16": lambda key: sf.random.uniform(key, (n,), torch.bfloat16),
        "uniform float64": lambda key: sf.random.uniform(key, (n,), torch.float64),
        "normal": lambda key: sf.random.normal(key, (n,)),
        "bernoulli": lambda key: sf.random.bernoulli(key, 0.3, (n,)),
        "split": lambda key: sf.random.split(key, n // 10),
    }


def sanitized(b: Bench) -> None:
    """The same on small sizes under compute-sanitizer."""
    b.begin("compute-sanitizer: exit status")
    tool = shutil.which("compute-sanitizer")
    for check in ("memcheck", "racecheck"):
        command = [
            str(tool),
            f"--tool={check}",
            "--error-exitcode=9",
            sys.executable,
            str(Path(__file__).resolve()),
        ]
        command += [
            "--kernels",
            "--smoke",
            f"--device={b.device.type}",
            "--only=exact",
            "--out=out/sanitized",
        ]
        if tool is None or b.refused:
            b.add(
                check,
                ON,
                None,
                "status",
                "compute-sanitizer is not installed" if tool is None else b.refused,
            )
        else:
            b.attempt(check, ON, "status", lambda command=command: _status(command))


def _status(command: list[str]) -> float:
    # else an address beyond a tensor may be in a cache
    seen = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return float(
        subprocess.run(
            command, stdout=subprocess.DEVNULL, timeout=90, env=seen, check=False
        ).returncode
    )


def waits(b: Bench) -> None:
    """Which calls wait for the device: under torch's check, and where in the library
    they do.
    """
    b.begin("calls that wait for the device")
    x = torch.randn(256, 256, device=b.device)
    grads, mask = torch.randn_like(x), x > 0
    count, key = torch.tensor(100, device=b.device), sf.random.key(0).to(b.device)
    algorithm = sf.rigl(0.9, init="magnitude")
    state = algorithm.init({"w": x})
    calls: dict[str, Callable[[], Any]] = {
        "topk_mask, int": lambda: sf.masks.topk_mask(x, 100),
        "topk_mask, tensor": lambda: sf.masks.topk_mask(x, count),
        "topk_masks, int": lambda: sf.masks.topk_masks({"a": x, "b": grads}, 100),
        "2:4": lambda: sf.masks.topk_mask(x, None, pattern=sf.patterns.nm(2, 4)),
        "drop_lowest, int": lambda: sf.masks.drop_lowest(x, mask, 10),
        "grow_highest, int": lambda: sf.masks.grow_highest(x, mask, 10),
        "uniform": lambda: sf.random.uniform(key, (100,)),
        "bernoulli_mask": lambda: sf.masks.bernoulli_mask(x.sigmoid(), key),
        "rigl, an update of masks": lambda: algorithm.update(state, {"w": grads}, 0),
    }
    for way in b.ways():
        for what, call in calls.items():
            b.attempt(what, way, "waits", lambda call=call: _waits(b, call))


def _waits(b: Bench, call: Callable[[], Any]) -> float:
    call()  # compiles
    if b.device.type != "cuda":
        return 0.0
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "sparsefn" in frame.filename
        ]
        where = (
            f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        )
        raise RuntimeError(f"waits at {where}: {str(error).splitlines()[0]}") from None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0.0


def selection(b: Bench) -> None:
    """One tensor: sizes, then dtypes, shares and fills at one size."""
    sizes = (100, 1000) if b.smoke else (10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
    for dtype in DTYPES:
        b.begin(f"a tenth of n normal scores, {dtype}")
        for n in sizes:
            x = scores(n, dtype, "normal", 0, b.device)
            k, count = n // 10, torch.tensor(n // 10, device=b.device)
            for way in b.ways():
                if way != OFF or n <= 10**8:
                    b.time(
                        name_of(n),
                        f"{way}, int",
                        lambda x=x, k=k: sf.masks.topk_mask(x, k),
                    )
                    b.time(
                        name_of(n),
                        f"{way}, tensor",
                        lambda x=x, k=count: sf.masks.topk_mask(x, k),
                    )
                    if b.device.type == "cuda":
                        b.attempt(
                            name_of(n),
                            f"{way}, peak",
                            "B/entry",
                            lambda x=x, k=count: _peak(x, k),
                        )
            if n <= 10**8:
                b.time(name_of(n), "topk, scatter", lambda x=x, k=k: by_topk(x, k))
                b.time(name_of(n), "stable sort", lambda x=x, k=k: by_sort(x, k))
            del x
            b.tidy()
    n = 1000 if b.smoke else 10**8
    b.begin(f"{name_of(n)} scores by dtype, share and fill")
    for dtype in DTYPES:
        for fill in FILLS:
            x = scores(n, dtype, fill, 0, b.device)
            for share in SHARES if fill == "normal" or b.smoke else (0.1, 0.5):
                count = torch.tensor(round(share * n), device=b.device)
                what = f"{dtype}, {fill}, {share:.0%}".replace("torch.", "")
                for way in b.ways():
                    if way == ON or b.refused:
                        b.time(
                            what,
                            way,
                            lambda x=x, count=count: sf.masks.topk_mask(x, count),
                        )
            del x
            b.tidy()


def _peak(x: Tensor, count: Tensor) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sf.masks.topk_mask(x, count)
    return (torch.cuda.max_memory_allocated() - before) / x.numel()


def many(b: Bench) -> None:
    """Many tensors, many rows, few units a row."""
    b.begin("many competitions")
    leaves = leaves_of(b)
    small = {
        str(i): torch.randn(40 if b.smoke else 1000, device=b.device)
        for i in range(10 if b.smoke else 1000)
    }
    side = 64 if b.smoke else 4096
    square = torch.randn(side, side, device=b.device)
    for way in b.ways():
        b.time("54 leaves, a tenth of each", way, tenth_of_each(leaves))
        b.time("54 leaves, a tenth of all", way, tenth_of_all(leaves))
        b.time(f"{len(small)} small leaves, a tenth of each", way, tenth_of_each(small))
        b.time(
            f"{side} rows of {side}",
            way,
            lambda: winners([Entry(square)], [side // 10]),
        )
        for kept, of in PATTERNS:
            pattern = sf.patterns.nm(kept, of)
            b.time(
                f"{kept}:{of} of {side} x {side}",
                way,
                lambda p=pattern: sf.masks.topk_mask(square, None, pattern=p),
            )
    b.time(
        "54 leaves, a tenth of each",
        "topk, scatter",
        lambda: [by_topk(w, w.numel() // 10) for w in leaves.values()],
    )


def drawing(b: Bench) -> None:
    """Draws."""
    b.begin("draws")
    key = sf.random.key(0).to(b.device)
    for n in (100,) if b.smoke else (10**4, 10**6, 10**8):
        for what, call in draws(n).items():
            for way in b.ways():
                if n < 10**8 or way == ON or what == "uniform":
                    b.time(f"{what}, {name_of(n)}", way, lambda call=call: call(key))
        b.time(
            f"uniform, {name_of(n)}",
            "torch.rand",
            lambda n=n: torch.rand(n, device=b.device),
        )
        b.tidy()


def training(b: Bench) -> None:
    """Updates of masks, and a step of Adam under masks."""
    b.begin("updates of 54 leaves")
    leaves, grads = leaves_of(b, 0), leaves_of(b, 1)
    rigl = sf.rigl(0.9, init="magnitude")
    state = rigl.init(leaves)
    trained = sf.with_optimizer(sf.static(0.9), sf.optimizers.adam(1e-3))
    begun = trained.init(leaves)
    for way in b.ways():
        b.time("rigl, an update of masks", way, lambda: rigl.update(state, grads, 0))
        b.time("adam under masks", way, lambda: trained.update(begun, grads, 1))
        b.time(
            "uniforms of all",
            way,
            lambda: drawn_leaves(sf.random.key(0), leaves, 0, "uniform", torch.float32),
        )


def graphs(b: Bench) -> None:
    """Capture in a graph, and a replay on other scores: its masks must be those of the
    eager call.
    """
    b.begin("CUDA graphs")
    n = 1000 if b.smoke else 10**6
    if b.device.type != "cuda":
        b.add("capture and replay", "any", None, "ms", "there are none on this device")
        return
    fixed, other = (
        scores(n, torch.float32, "normal", seed, b.device) for seed in (0, 1)
    )
    count, key = torch.tensor(n // 10, device=b.device), sf.random.key(0).to(b.device)
    calls: dict[str, Callable[[], Tensor]] = {
        "topk_mask, tensor": lambda: sf.masks.topk_mask(fixed, count),
        "topk_mask, int": lambda: sf.masks.topk_mask(fixed, n // 10),
        "uniform": lambda: sf.random.uniform(key, (n,)),
    }
    start = fixed.clone()
    for way in b.ways():
        for what, call in calls.items():
            fixed.copy_(start)
            b.attempt(
                what, way, "ms", lambda call=call: _replayed(b, call, fixed, other)
            )


def _replayed(
    b: Bench, call: Callable[[], Tensor], fixed: Tensor, other: Tensor
) -> float:
    call()
    b.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    fixed.copy_(other)
    graph.replay()
    if not torch.equal(made, call()):
        b.wrong += 1
        raise AssertionError("a replay differs from the eager call")
    return b.milliseconds(graph.replay)


def captured(b: Bench) -> None:
    """Updates of `sf.captured`, at steps that change masks and at others: the bits of
    eager ones, and their time.
    """
    b.begin("captured updates of 54 leaves")
    leaves, grads = leaves_of(b, 0), leaves_of(b, 1)
    when = sf.every(2)
    rigl = sf.rigl(0.9, init="magnitude", when=when)
    algorithms = {
        "rigl": rigl,
        "set": sf.set(0.9, key=sf.random.key(0), when=when),
        "gmp": sf.gmp(sf.schedules.polynomial(0.0, 0.9, 0, 1000), when=when),
        "rigl + sgd": sf.with_optimizer(rigl, STEPPED["momentum"]),
        "rigl + adam": sf.with_optimizer(rigl, STEPPED["adam"]),
    }
    for way in b.ways():
        for name, algorithm in algorithms.items():
            replayed = sf.captured(algorithm)
            state = algorithm.init(leaves)
            cases = _of_both(algorithm, replayed, state, grads)
            b.equal(f"{name}: cases that differ", way, cases)
            for step, what in enumerate(("masks change", "masks stay")):
                for kind, of in (("eager", algorithm), ("captured", replayed)):
                    b.time(
                        f"{name}, {what}",
                        f"{way}, {kind}",
                        lambda of=of, state=state, step=step: of.update(
                            state, grads, step
                        ),
                    )
            b.tidy()


def _of_both(
    algorithm: sf.Algorithm, replayed: sf.Algorithm, state: sf.State, grads: Any
) -> Iterator[tuple[Any, Any]]:
    eager = state
    for step in range(4):
        eager = algorithm.update(eager, grads, step)
        state = replayed.update(state, grads, step)
        yield optree.tree_leaves(state), optree.tree_leaves(eager)


def compiled(b: Bench) -> None:
    """Compiled code: last, as it takes longest to begin."""
    b.begin("compiled")
    side, n = (64, 1000) if b.smoke else (4096, 10**7)
    square, key = (
        torch.randn(side, side, device=b.device),
        sf.random.key(0).to(b.device),
    )
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        f"{kept}:{of}": (
            lambda x, p=sf.patterns.nm(kept, of): sf.masks.topk_mask(
                x, None, pattern=p
            ),
            square,
        )
        for kept, of in PATTERNS[:3]
    }
    calls["uniform"] = (lambda key: sf.random.uniform(key, (n,)), key)
    calls["normal"] = (lambda key: sf.random.normal(key, (n,)), key)
    for way in b.ways():
        for what, (call, argument) in calls.items():
            b.attempt(
                what, way, "ms", lambda call=call, x=argument: _compiled(b, call, x)
            )


def _compiled(b: Bench, call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    torch.compiler.reset()
    fast = torch.compile(
        call, fullgraph=True, backend="aot_eager" if b.smoke else "inductor"
    )
    if not torch.equal(fast(x), call(x)):
        b.wrong += 1
        raise AssertionError("compiled results differ from eager ones")
    return b.milliseconds(lambda: fast(x))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section
    for section in (
        machine,
        exact,
        waits,
        selection,
        many,
        drawing,
        training,
        graphs,
        captured,
        updates,
        optimizers,
        solvers,
        in_order,
        sanitized,
        compiled,
    )
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="also with those that sparsefn_kernels registers",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.5,
        help="what is not measured by then is left out",
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks"),
        help="folder of the JSON file",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is here: nothing is measured")
        return 0
    if options.device == "cpu" and not options.smoke:
        parser.error("--device cpu goes with --smoke: its times mean nothing")
    options.quick = False
    if options.kernels:
        import sparsefn_kernels  # noqa: F401
    else:
        os.environ["SPARSEFN_KERNELS"] = "0"
    b = Bench(options.device, options.smoke, 60 * options.minutes)
    for name in options.only:
        SECTIONS[name](b)
        b.tidy()
        write("device", b.tables, options)
    if b.wrong:
        print(f"\nNOT EXACT: {b.wrong} of the rows above", file=sys.stderr)
    return int(b.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
