"""Two small networks lose units while they train on scikit-learn's digits, to a third
of their FLOPs, and get smaller.

    python examples/smaller.py
    python examples/smaller.py --quick
    python examples/smaller.py --seeds 1 --share 0.5 --networks vit

A residual convnet with depthwise layers, and a vision transformer. Each is trained
dense; and, with as many steps, pruned gradually by units that its code ties together,
shrunk, and trained on as the smaller model. It prints accuracy, parameters, FLOPs and
milliseconds, and writes `out/smaller.png` and `out/smaller.json`, which holds every
number. Needs the `demo` extra, and measures in ONNX Runtime where onnx, onnxscript and
onnxruntime are installed.
"""

import argparse
import importlib.util
import json
import logging
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _options import at_least, fraction, make_folder
from _progress import progress
from _smaller_report import draw, table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf

TRAIN, BATCH = 1200, 64
# of all steps: pruning begins, masks are final, the model gets smaller
BEGUN, PRUNED, SHRUNK = (0.1, 0.55, 0.6)
SERVED = 64  # images in the batch that is timed
RATE, WARMUP = 3e-3, 50


# ---- networks ------------------------------------------------------------------------


class Mobile(nn.Module):
    """A residual block: wider, one filter for each channel, narrower."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attended(nn.Module):
    """A block of a vision transformer: attention, then an MLP, each with a layer norm
    before it.
    """

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, tokens, 3, heads, width of a head)
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        attended = functional.scaled_dot_product_attention(
            *split.permute(2, 0, 3, 1, 4).unbind()
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer that reads patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(
            *(Attended(width, heads, 2 * width) for _ in range(blocks))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def convnet(channels: int = 32, blocks: int = 3) -> nn.Module:
    """A residual convnet with depthwise layers."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        *(Mobile(channels, 3 * channels) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {"convnet": convnet, "vit": ViT}
# Widths are multiples of it: convolutions of ONNX Runtime are several times slower for
# 41 channels than for 48.
BLOCK = {"convnet": 16, "vit": 1}
TITLES = {"convnet": "residual convnet, depthwise", "vit": "vision transformer"}


def in_blocks(
    budget: Callable[..., dict[str, Any]], block: int
) -> Callable[..., dict[str, Any]]:
    """A budget whose counts are rounded down to multiples of `block`, but not to 0."""

    def counts(shapes: Any, sparsity: Any) -> dict[str, Any]:
        return {
            path: n // block * block or n
            for path, n in budget(shapes, sparsity).items()
        }

    return counts


# ---- data and training ---------------------------------------------------------------


class Data(NamedTuple):
    """Images of 8 x 8 numbers in [0, 1], and the digits they show."""

    x: Tensor
    y: Tensor


def load() -> tuple[Data, Data]:
    """The same train and test images in every run."""
    images, labels = load_digits(return_X_y=True)
    x, y = (
        torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8),
        torch.tensor(labels),
    )
    order = sf.random.permutation(sf.random.key(0), len(y))
    train, test = order[:TRAIN], order[TRAIN:]
    return Data(x[train], y[train]), Data(x[test], y[test])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, whose rate `train` sets before each step."""
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def train(
    model: nn.Module,
    optimizer: Any,
    data: Data,
    steps: range,
    end: int,
    bar: Any,
    sparse: Any = None,
) -> None:
    """A plain loop over `steps` of a run of `end` steps, with an algorithm attached or
    without.
    """
    model.train()
    for step in steps:
        batch = torch.randint(
            TRAIN, (BATCH,), generator=torch.Generator().manual_seed(step)
        )
        for group in optimizer.param_groups:
            group["lr"] = (
                RATE
                * min(1.0, (step + 1) / WARMUP)
                * (1 + math.cos(math.pi * step / end))
                / 2
            )
        functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
        if sparse:
            sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        if sparse:
            sparse.after_step(step)
        bar.update()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Per cent of the images."""
    return 100 * float((model(data.x).argmax(1) == data.y).double().mean())


# ---- what a model costs --------------------------------------------------------------


def measured(model: nn.Module, x: Tensor, file: Path) -> dict[str, Any]:
    """Parameters, FLOPs for an image, and milliseconds for a batch in torch and in ONNX
    Runtime.
    """
    dense = sf.dense().init(sf.modules.params_of(model))
    with torch.no_grad():
        here = milliseconds(lambda: model(x))
    return {
        "params": sum(p.numel() for p in model.parameters()),
        "flops": sf.report.flops(model, dense, x[:1]).total.dense,
        "torch_ms": here,
        "onnx_ms": onnx_milliseconds(model, x, file),
    }


def milliseconds(call: Callable[[], object]) -> float:
    """The fastest of 200 calls: other work on the machine only adds."""
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def onnx_milliseconds(model: nn.Module, x: Tensor, file: Path) -> float | None:
    """The same in ONNX Runtime, on one thread; None where it is not installed."""
    if not all(
        importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")
    ):
        return None
    import onnxruntime

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        torch.onnx.export(
            model, (x,), file, dynamo=True, external_data=False, verbose=False
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options)
    feed = {session.get_inputs()[0].name: x.numpy()}
    (outputs,) = session.run(None, feed)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(outputs), model(x), rtol=1e-3, atol=1e-3
        )
    return milliseconds(lambda: session.run(None, feed))


# ---- a run ---------------------------------------------------------------------------


def run(
    name: str, seed: int, chosen: argparse.Namespace, data: tuple[Data, Data], bar: Any
) -> dict[str, Any]:
    """A network trained dense, and one with the same seed pruned, shrunk and trained
    on.
    """
    make, (train_data, test_data), steps = NETWORKS[name], data, chosen.steps
    x = test_data.x[:SERVED]
    torch.manual_seed(seed)
    dense = make()
    train(dense, optimizer_of(dense), train_data, range(steps), steps, bar)

    torch.manual_seed(seed)
    model = make().eval()
    groups = sf.shrinking.groups(model, x[:2], counted=True)
    budget = sf.budgets.within(
        chosen.share * groups.cost(unit="flops"), groups, "flops"
    )
    budget = in_blocks(budget, BLOCK[name])
    every = max(1, steps // 100)
    last = int(PRUNED * steps) // every * every
    # of the way to the budget
    gradual = sf.schedules.polynomial(0.0, 1.0, begin=int(BEGUN * steps), end=last)
    algorithm = sf.gmp(
        gradual,
        when=sf.every(every, stop=last + 1),
        pattern=groups.pattern(),
        distribution=budget,
    )

    optimizer = optimizer_of(model)
    sparse = sf.attach(algorithm, model, optimizer)
    change = int(SHRUNK * steps)
    train(model, optimizer, train_data, range(change), steps, bar, sparse)

    made = sf.shrinking.smaller(model, sparse.state, x[:2])
    small = made.module.eval()
    with torch.no_grad():
        error = float((small(x) - sf.modules.call(model, sparse.state, x)).abs().max())
    pruned = accuracy(small, test_data)
    after = optimizer_of(small)
    after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, model, made))
    train(small, after, train_data, range(change, steps), steps, bar)
    return {
        "network": TITLES[name],
        "seed": seed,
        "form": made.form,
        "difference": error,
        "accuracy": {
            "dense": accuracy(dense, test_data),
            "shrunk": pruned,
            "tuned": accuracy(small, test_data),
        },
        "dense": measured(dense, x, chosen.out / f"{name}.onnx"),
        "small": measured(small, x, chosen.out / f"{name}-small.onnx"),
    }


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Make two small networks smaller while they train."
    )
    add = parser.add_argument
    add(
        "--seeds",
        type=at_least(1),
        help="runs of each network (default: 2; 1 with --quick)",
    )
    add(
        "--steps",
        type=at_least(20),
        help="training steps (default: 600; 40 with --quick)",
    )
    add(
        "--share",
        type=fraction,
        default=1 / 3,
        help="of the FLOPs that may stay (default: a third)",
    )
    add(
        "--networks",
        nargs="+",
        choices=NETWORKS,
        default=list(NETWORKS),
        help="default: both",
    )
    add("--quick", action="store_true", help="one seed, few steps")
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for smaller.png and smaller.json (default: out)",
    )
    chosen = parser.parse_args(argv)
    for name, full, quick in (("seeds", 2, 1), ("steps", 600, 40)):
        setattr(
            chosen, name, getattr(chosen, name) or (quick if chosen.quick else full)
        )
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, shrink, print and draw."""
    chosen = options()
    torch.set_num_threads(1)  # as the two runtimes are compared on one
    data, results = load(), []
    with progress(
        2 * chosen.steps * chosen.seeds * len(chosen.networks), "training"
    ) as bar:
        for name in chosen.networks:
            for seed in range(chosen.seeds):
                bar.set_description(f"{name}, seed {seed}")
                results.append(run(name, seed, chosen, data, bar))

    seeds = f"{chosen.seeds} seeds" if chosen.seeds > 1 else "one seed"
    print(f"\nAt most {chosen.share:.3g} of the FLOPs, {chosen.steps} steps, {seeds}")
    print(
        f"FLOPs are of an image, milliseconds of {SERVED} on one thread, accuracy in "
        "per cent\n"
    )
    print(f"{table(results)}\n")
    report = {
        "seeds": chosen.seeds,
        "steps": chosen.steps,
        "share": chosen.share,
        "results": results,
    }
    (chosen.out / "smaller.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    draw(report, chosen.out / "smaller.png")
    print(f"wrote smaller.png and smaller.json to {chosen.out}")


if __name__ == "__main__":
    main()
