"""Loops of FSDP2 beside one process that gets the same gradients, and checkpoints that
other ranks read.
"""

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import sparsefn as sf
from sparsefn.testing.harness import assert_same
from tests.nn.distributed.harness import Cases, on_ranks
from tests.nn.distributed.sharded import (
    SHAPES,
    Layout,
    assert_parts,
    full,
    held,
    layouts,
    mesh,
    values,
)

KEY = sf.random.key(3)
EVERY: dict[str, Any] = {"drop_fraction": 0.3, "when": sf.every(2), "key": KEY}

ALGORITHMS: dict[str, Callable[[], sf.Algorithm]] = {
    "rigl erk": lambda: sf.rigl(0.8, distribution=sf.budgets.erk(), **EVERY),
    "gmp global": lambda: sf.gmp(
        sf.schedules.polynomial(0.0, 0.9, begin=0, end=6),
        distribution=sf.budgets.global_(),
    ),
    "set": lambda: sf.set(0.8, **EVERY),
    "snfs": lambda: sf.snfs(0.8, **EVERY),
}


def adam(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(algorithm, sf.optimizers.adam(1e-2))


# ---- a loop --------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 36),
        nn.ReLU(),
        nn.Linear(36, 40),
        nn.ReLU(),
        nn.Linear(40, 40),
        nn.ReLU(),
        nn.Linear(40, 8),
    )


def whole(model: nn.Module) -> None:
    fully_shard(model)


def layer_by_layer(model: nn.Module) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)


def hsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=mesh(2, 2))


def with_tensor_parallelism(model: nn.Module) -> None:
    parallelize_module(
        model, mesh(2, 2)["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh(2, 2)["outer"])


def batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(16, 24, generator=generator), torch.randint(
        0, 8, (16,), generator=generator
    )


def same_loop(
    shard: Callable[[nn.Module], None], make: Callable[[], sf.Algorithm]
) -> None:
    """Eight steps; the masks and weights are those of one process that gets the
    gathered gradients.
    """
    model = net()
    shard(model)
    algorithm, alone = adam(make()), adam(make())
    state = algorithm.init(sf.modules.params_of(model))
    want = alone.init(full(state.params))
    part = dist.get_rank() // 2 if shard is with_tensor_parallelism else dist.get_rank()
    for step in range(8):
        sf.distributed.commit(model, state)
        x, y = batch(step, part)
        nn.functional.cross_entropy(model(x), y).backward()
        grads = sf.distributed.grads_of(model, state)
        assert all(parameter.grad is None for parameter in model.parameters())
        want = alone.update(want, full(grads), step)
        state = algorithm.update(state, grads, step)
        assert_parts(f"step {step}", want, state)
    sf.distributed.check_replicas(state)


# ---- checkpoints ---------------------------------------------------------------------

STEPS = 3


def later(
    algorithm: sf.Algorithm, state: sf.State, start: int, lay: Layout
) -> sf.State:
    for step in range(start, start + STEPS):
        state = algorithm.update(state, lay(values(SHAPES, seed=step)), step)
    return state


def made(name: str) -> sf.Algorithm:
    return adam(ALGORITHMS[name]())


def started(name: str, lay: Layout) -> tuple[sf.Algorithm, sf.State]:
    algorithm = made(name)
    return algorithm, algorithm.init(lay(values(SHAPES)))


@cache
def wanted(name: str, steps: int) -> sf.State:
    algorithm, state = started(name, lambda tree: tree)
    for start in range(0, steps, STEPS):
        state = later(algorithm, state, start, lambda tree: tree)
    return state


def save(folder: Path, name: str, lay: Layout) -> None:
    algorithm, state = started(name, lay)
    sf.distributed.save(later(algorithm, state, 0, lay), folder)


def resume(folder: Path, name: str, lay: Layout, start: int = STEPS) -> None:
    """Load, check that the template stays as it was, run three more steps, and compare
    with a run that never ended.
    """
    algorithm = made(name)
    template = algorithm.init(lay(values(SHAPES, seed=9)))
    before = sf.tree.copied(held(template))
    state = sf.distributed.load(template, folder)
    assert_same("the template", before, held(template))
    assert_parts("the loaded state", wanted(name, start), state)
    assert_parts(
        "three steps on",
        wanted(name, start + STEPS),
        later(algorithm, state, start, lay),
    )


FOUR = ("S0", "S1", "R", "HSDP", "S0,S1", "S0,S0", "S1,R")
SAVED = {"rigl erk": FOUR, "gmp global": ("S0", "HSDP")}  # on four processes


def on_four(folder: Path) -> Cases:
    for name, make in ALGORITHMS.items():
        yield f"{name}, layer by layer", partial(same_loop, layer_by_layer, make)
    for name, shard in (
        ("rigl erk", whole),
        ("rigl erk", with_tensor_parallelism),
        ("gmp global", hsdp),
    ):
        yield f"{name}, {shard.__name__}", partial(same_loop, shard, ALGORITHMS[name])
    places = layouts(4)
    for name, saved in SAVED.items():
        for layout in saved:
            yield (
                f"save {name} on {layout}",
                partial(save, folder / f"{name} {layout}", name, places[layout]),
            )
        yield (
            f"from plain, {name}",
            partial(resume, folder / f"{name} plain", name, places["S0,S1"]),
        )


def on_two(folder: Path) -> Cases:
    places = layouts(2)
    for name, saved in SAVED.items():
        for i, before in enumerate(saved):
            layout = ("S0", "S1", "R")[i % 3]
            yield (
                f"{name} {before} to {layout}",
                partial(resume, folder / f"{name} {before}", name, places[layout]),
            )


def test_loops_and_checkpoints(tmp_path: Path) -> None:
    for name in SAVED:  # up: one process of plain tensors saves, four read
        save(tmp_path / f"{name} plain", name, lambda tree: tree)
    on_ranks(4, on_four, tmp_path)
    on_ranks(2, on_two, tmp_path)
    for name, saved in SAVED.items():  # down to one process of plain tensors
        for before in saved:
            resume(tmp_path / f"{name} {before}", name, lambda tree: tree)
    shutil.rmtree(tmp_path)
