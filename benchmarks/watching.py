"""What `sf.testing.passive` adds to training, with one change of masks in every 100
steps.

    python benchmarks/watching.py
    python benchmarks/watching.py --quick

Weights with it are held against those without.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from _models import Transformer
from _timing import Case, Row, compare, options_of, write
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf
from sparsefn.testing import passive

SPARSITY, RATE, EVERY = 0.9, 1e-3, 100
NAMES = ("as it is", "in passive")


def functional_cases(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[Case]:
    """So many steps of a functional loop, the first of which changes masks: RigL with
    AdamW, as it is and watched.
    """

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            torch.func.functional_call(model, params, (x,)), y
        )

    algorithm = sf.with_optimizer(
        sf.rigl(SPARSITY, when=sf.every(EVERY)), sf.optimizers.adamw(RATE)
    )
    differentiate, params = sf.modules.value_and_grad(loss), sf.modules.params_of(model)

    def carrying(algorithm: sf.Algorithm) -> Callable[[], sf.State]:
        states = [algorithm.init(params)]

        def run() -> sf.State:
            for step in range(steps):
                states[0] = algorithm.update(
                    states[0], differentiate(sf.effective(states[0]))[1], step
                )
            return states[0]

        return run

    runs = [carrying(algorithm), carrying(passive(algorithm))]
    plain, watched = (run() for run in runs)
    if not sf.checkpoint.tree_equal(plain, watched):
        raise AssertionError("passive changes bits")
    return [Case(name, run) for name, run in zip(NAMES, runs, strict=True)]


def update_cases(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[Case]:
    """The updates of such a loop alone, without the gradients."""
    algorithm = sf.with_optimizer(
        sf.rigl(SPARSITY, when=sf.every(EVERY)), sf.optimizers.adamw(RATE)
    )
    params = sf.modules.params_of(model)
    grads = {path: torch.sin(1000.0 * p.detach()) for path, p in params.items()}

    def carrying(algorithm: sf.Algorithm) -> Callable[[], None]:
        states, counter = [algorithm.init(params)], itertools.count()

        def run() -> None:
            for _ in range(steps):
                states[0] = algorithm.update(states[0], grads, next(counter) % EVERY)

        return run

    return [
        Case(name, carrying(a))
        for name, a in zip(NAMES, (algorithm, passive(algorithm)), strict=True)
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    torch.manual_seed(0)
    steps = 2 if options.smoke else EVERY
    sizes = (8, 16) if options.smoke else (784, 300) if options.quick else (784, 1024)
    mlp = nn.Sequential(nn.Linear(*sizes), nn.ReLU(), nn.Linear(sizes[1], 10))
    rows, classes = torch.randn(128, sizes[0]), torch.randint(0, 10, (128,))
    width, layers, shape = (
        (8, 1, (2, 4))
        if options.smoke
        else (64, 2, (8, 32))
        if options.quick
        else (128, 2, (8, 32))
    )
    encoder, tokens = Transformer(width, layers), torch.randint(0, 128, shape)
    models = {
        f"an MLP {sizes[0]}-{sizes[1]}-10": (mlp, rows, classes),
        f"a Transformer {layers} x {width}": (
            encoder,
            tokens,
            tokens.roll(1, 1).flatten(),
        ),
    }
    done = {}
    for name, (model, x, y) in models.items():
        for what, make in (
            ("training steps", functional_cases),
            ("updates alone", update_cases),
        ):
            title = f"{steps} {what} of {name}, RigL and AdamW"
            done[title] = compare(title, partial(make, model, x, y, steps)(), options)
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("watching", main(chosen), chosen)
