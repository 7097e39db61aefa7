"""Sparse training on scikit-learn's digits, all seeds of a method as one vmapped
ensemble.

    python examples/digits.py
    python examples/digits.py --seeds 3 --steps 300 --sparsity 0.95 --methods set rigl

It prints a table and writes `out/digits.png` and `out/digits.json`, which holds every
number. Needs the `demo` extra.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchopt
from _digits_report import draw, orderings, table
from _options import at_least, fraction, make_folder
from _progress import progress
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

import sparsefn as sf

SIZES = (64, 300, 100, 10)
TRAIN, BATCH = 1200, 64
METHODS = {
    "static": "static",
    "set": "SET",
    "rigl": "RigL",
    "gmp": "GMP",
    "one-shot": "one-shot",
}
DISTRIBUTIONS = {"uniform": sf.budgets.uniform(), "ERK": sf.budgets.erk()}

Params = list[dict[str, Tensor]]


class Data(NamedTuple):
    """Images with 64 numbers in [0, 1] each, and the digits they show."""

    x: Tensor
    y: Tensor


class Run(NamedTuple):
    """A trained ensemble: its state before and after, and every connection it ever
    had.
    """

    first: sf.State
    last: sf.State
    seen: Any
    seconds: float


# ---- data and model ------------------------------------------------------------------


def load() -> tuple[Data, Data]:
    """The same train and test images in every run."""
    digits = load_digits()
    x, y = (
        torch.tensor(digits.data / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    order = sf.random.permutation(sf.random.key(0), len(y))
    train, test = order[:TRAIN], order[TRAIN:]
    return Data(x[train], y[train]), Data(x[test], y[test])


def he_init(key: Tensor) -> Params:
    """One member's weights."""
    return [
        {
            "weight": sf.random.normal(sf.random.fold_in(key, i), (n_out, n_in))
            * math.sqrt(2 / n_in),
            "bias": torch.zeros(n_out),
        }
        for i, (n_in, n_out) in enumerate(itertools.pairwise(SIZES))
    ]


def forward(params: Params, x: Tensor) -> Tensor:
    """The MLP: images to ten logits."""
    *hidden, last = params
    for layer in hidden:
        x = functional.linear(x, **layer).relu()
    return functional.linear(x, **last)


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, the mean over a batch."""
    return functional.cross_entropy(forward(params, x), y)


# ---- methods -------------------------------------------------------------------------


def method(
    name: str, sparsity: float, distribution: str, steps: int
) -> Callable[[Tensor], sf.Algorithm]:
    """The algorithm of a member, as a function of the member's key."""
    every = max(1, steps // 50)
    stop = 3 * steps // 4 // every * every  # the last quarter trains a fixed mask
    budget = DISTRIBUTIONS[distribution]
    cubic = sf.schedules.polynomial(0.0, sparsity, begin=0, end=stop)
    return {
        "static": lambda key: sf.static(sparsity, distribution=budget, key=key),
        "set": lambda key: sf.set(sparsity, steps=steps, distribution=budget, key=key),
        "rigl": lambda key: sf.rigl(
            sparsity, steps=steps, distribution=budget, key=key
        ),
        "gmp": lambda key: sf.gmp(
            cubic, when=sf.every(every, stop=stop + 1), distribution=budget, key=key
        ),
    }[name]


def sgd(steps: int) -> torchopt.base.GradientTransformation:
    """TorchOpt's SGD with momentum and a cosine rate."""
    rate = sf.schedules.cosine_decay(0.1, steps)
    # TorchOpt asks for the rate once for each parameter
    rates = [rate(step) for step in range(steps)]
    # The count is the same in all members, so vmap leaves it a plain tensor.
    return torchopt.sgd(lr=lambda count: rates[int(count)], momentum=0.9)


# ---- training ------------------------------------------------------------------------


def train(
    make: Callable[[Tensor], sf.Algorithm],
    data: Data,
    keys: Tensor,
    steps: int,
    bar: Any,
) -> Run:
    """Train one member for each key, all at once: a plain training loop of one member,
    under vmap.
    """
    begin = time.perf_counter()
    per_epoch = TRAIN // BATCH
    optimizer = sgd(steps)

    def member(key: Tensor, params: Params) -> tuple[sf.State, sf.State, Any]:
        algorithm = sf.with_optimizer(make(sf.random.fold_in(key, "masks")), optimizer)
        first = state = algorithm.init(params)
        seen = state.masks
        for step in range(steps):
            epoch, i = divmod(step, per_epoch)
            if i == 0:
                order = sf.random.permutation(
                    sf.random.fold_in(sf.random.fold_in(key, "batches"), epoch), TRAIN
                )
            batch = order[i * BATCH : (i + 1) * BATCH]
            grads = grad(loss)(sf.effective(state), data.x[batch], data.y[batch])
            state = algorithm.update(state, grads, step)
            seen = sf.masks.union(seen, state.masks)
            bar.update()
        return first, state, seen

    params = vmap(he_init)(sf.random.fold_in(keys, "weights"))
    first, last, seen = vmap(member)(keys, params)
    return Run(first, last, seen, time.perf_counter() - begin)


def prune(dense: Run, sparsity: float, distribution: str) -> Run:
    """One-shot magnitude pruning of the dense run's weights, without any training after
    it.
    """
    begin = time.perf_counter()
    algorithm = sf.one_shot(sparsity, distribution=DISTRIBUTIONS[distribution])
    first = vmap(algorithm.init)(dense.last.params)
    # Magnitude reads no gradients, so the weights may stand in for them.
    last = vmap(lambda state: algorithm.update(state, state.params, 0))(first)
    return Run(first, last, first.masks, dense.seconds + time.perf_counter() - begin)


# ---- results -------------------------------------------------------------------------


def measure(run: Run, test: Data) -> dict[str, Any]:
    """The numbers of a run for the table, the figure and the JSON file."""
    predicted = vmap(lambda state: forward(sf.effective(state), test.x).argmax(-1))(
        run.last
    )
    accuracy = 100 * (predicted == test.y).double().mean(-1)
    error = accuracy.std() / math.sqrt(len(accuracy)) if len(accuracy) > 1 else None
    return {
        "reached": float(vmap(sf.masks.sparsity)(run.last.masks).mean()),
        "accuracy": accuracy.tolist(),
        "mean": float(accuracy.mean()),
        "standard_error": None if error is None else float(error),
        "exploration": float(1 - vmap(sf.masks.sparsity)(run.seen).mean()),
        "seconds": run.seconds,
        "connections_before": connections(run.first),
        "connections_after": connections(run.last),
    }


def connections(state: sf.State) -> list[list[float]]:
    """First-layer connections of each of the 8x8 pixels, the mean over seeds."""
    mask, weight = state.masks[0]["weight"], state.params[0]["weight"]
    if mask.ndim != weight.ndim:  # 0-d for each member: dense
        mask = torch.ones_like(weight, dtype=torch.bool)
    return mask.sum(1).double().mean(0).reshape(8, 8).tolist()


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Train sparse networks on scikit-learn's digits."
    )
    add = parser.add_argument
    add(
        "--seeds",
        type=at_least(1),
        default=6,
        help="members of each ensemble (default: 6)",
    )
    add(
        "--steps", type=at_least(3), default=1000, help="training steps (default: 1000)"
    )
    add(
        "--sparsity",
        type=fraction,
        nargs="+",
        default=[0.9, 0.98],
        help="fractions of zeros (default: 0.9 0.98)",
    )
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="default: all; dense is always trained",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for digits.png and digits.json (default: out)",
    )
    chosen = parser.parse_args(argv)
    chosen.sparsity = sorted(set(chosen.sparsity))
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, measure, print and draw."""
    chosen = options()
    torch.set_num_threads(1)  # the matrices are small: more threads wait for each other
    train_data, test_data = load()
    keys = sf.random.split(sf.random.key(1), chosen.seeds)

    names = [name for name in METHODS if name in chosen.methods]
    grid = [
        (name, s, d) for s in chosen.sparsity for name in names for d in DISTRIBUTIONS
    ]
    trained = 1 + sum(name != "one-shot" for name, _, _ in grid)
    results = []
    with progress(trained * chosen.steps, "dense") as bar:
        dense = train(lambda key: sf.dense(), train_data, keys, chosen.steps, bar)
        results.append(
            {
                "method": "dense",
                "distribution": None,
                "sparsity": 0.0,
                **measure(dense, test_data),
            }
        )
        for name, sparsity, distribution in grid:
            bar.set_description(f"{METHODS[name]} {distribution} {sparsity}")
            if name == "one-shot":
                run = prune(dense, sparsity, distribution)
            else:
                make = method(name, sparsity, distribution, chosen.steps)
                run = train(make, train_data, keys, chosen.steps, bar)
            about = {
                "method": METHODS[name],
                "distribution": distribution,
                "sparsity": sparsity,
            }
            results.append({**about, **measure(run, test_data)})

    ordered = orderings(results)
    print(
        f"\nTest accuracy in per cent, mean over {chosen.seeds} seeds after "
        f"{chosen.steps} steps"
    )
    print(f"\n{table(results)}\n")
    for o in ordered:
        ties = f", equal in {o['ties']}" if o["ties"] else ""
        print(
            f"sparsity {o['sparsity']:g}: {o['claim']} in {o['wins']} of {o['seeds']} "
            f"seeds{ties}"
        )

    report = {
        "seeds": chosen.seeds,
        "steps": chosen.steps,
        "train_images": TRAIN,
        "test_images": len(test_data.y),
        "mean_image": train_data.x.double().mean(0).reshape(8, 8).tolist(),
        "results": results,
        "orderings": ordered,
    }
    (chosen.out / "digits.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    draw(report, chosen.out / "digits.png")
    print(f"\nwrote {chosen.out / 'digits.png'} and {chosen.out / 'digits.json'}")


if __name__ == "__main__":
    main()
