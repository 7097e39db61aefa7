"""How far an update walks: moves from one file of the library to another, by calls and
returns.

    python benchmarks/walks.py
    python benchmarks/walks.py --json

Five walks of RigL with SGD: an update that changes masks, one that does not, an update
of DTensors on a mesh of one process that changes masks, and steps under `attach` at
which masks change, of a layer and of an MLP 784-300-10. Two of RigL with AdamW on 30
leaves: an update that changes masks, and one that does not. One of `in_order`, which
prunes three blocks on one batch. The most frequent pairs of files are printed below
each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sparsefn as sf

PACKAGE = str(Path(sf.__file__).parent)


class Walk(NamedTuple):
    """The files that a call visits, its moves between files, and its calls from file to
    file.
    """

    files: set[str]
    moves: Counter[tuple[str, str]]
    calls: int


def walk(run: Callable[[], object]) -> Walk:
    """What `run` visits; frames outside the package are part of the file that calls
    them.
    """
    files: set[str] = set()
    moves: Counter[tuple[str, str]] = Counter()
    calls, last = 0, ""

    def note(frame: FrameType | None, event: str, arg: Any) -> None:
        nonlocal calls, last
        if (
            event not in ("call", "return")
            or frame is None
            or not frame.f_code.co_filename.startswith(PACKAGE)
        ):
            return
        if event == "return":
            frame = frame.f_back
            while frame is not None and not frame.f_code.co_filename.startswith(
                PACKAGE
            ):
                frame = frame.f_back
            if frame is None:
                return
        here = frame.f_code.co_filename[len(PACKAGE) + 1 : -3]
        files.add(here)
        if last and last != here:
            moves[last, here] += 1
            calls += event == "call"
        last = here

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(files, moves, calls)


def rigl(*when: int) -> sf.Algorithm:
    return sf.rigl(
        0.5, when=sf.at(when), drop_fraction=0.3, distribution=sf.budgets.erk()
    )


def updating(
    params: dict[str, torch.Tensor],
    steps: int,
    when: int,
    optimizer: sf.optimizers.Optimizer = sf.optimizers.sgd(0.1, momentum=0.9),
) -> Callable[[], object]:
    """Update number `steps`, after the updates before it; masks change at `when` and at
    the first.
    """
    algorithm = sf.with_optimizer(rigl(0, when), optimizer)
    state, grads = (
        algorithm.init(params),
        {path: torch.ones_like(p) for path, p in params.items()},
    )
    for step in range(steps):
        state = algorithm.update(state, grads, step)
    return lambda: algorithm.update(state, grads, steps)


def attached(*sizes: int) -> Callable[[], object]:
    """A step of an MLP at which masks change: both calls and the optimizer's step
    between them.
    """
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = sf.attach(rigl(0, 2), model, optimizer)

    def step(number: int) -> None:
        sparse.before_step()
        optimizer.step()
        sparse.after_step(number)

    for number in range(3):
        model(torch.ones(3, sizes[0])).sum().backward()
        if number < 2:
            step(number)
    return lambda: step(2)


def blocks_in_order() -> Callable[[], object]:
    """Three blocks of a linear layer and ReLU, pruned by Wanda on one batch."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    )
    batch = torch.randn(16, 8)

    def prune(stats: dict[str, dict[str, torch.Tensor]]) -> sf.Algorithm:
        return sf.one_shot(0.5, sf.scores.wanda(stats))

    in_order = sf.calibration.in_order  # it is loaded here, and not on the walk
    return lambda: in_order(model, None, ["0.*", "1.*", "2.*"], prune, batch)


def walks() -> dict[str, Walk]:
    """The walks by name."""
    torch.manual_seed(0)
    params = sf.modules.params_of(nn.Linear(8, 8))
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(15)))
    leaves = sf.modules.params_of(layers)  # 15 weights and 15 biases
    adamw = sf.optimizers.adamw(1e-3)
    found = {
        "change": walk(updating(params, 2, 2)),
        "quiet": walk(updating(params, 2, 9)),
        "attached change": walk(attached(8, 8)),
        "adamw change": walk(updating(leaves, 2, 2, adamw)),
        "adamw quiet": walk(updating(leaves, 2, 9, adamw)),
        "in_order": walk(blocks_in_order()),
    }
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        mesh = init_device_mesh("cpu", (1,))
        shards = {
            path: distribute_tensor(p, mesh, [Shard(0)]) for path, p in params.items()
        }
        found["sharded change"] = walk(updating(shards, 2, 2))  # type: ignore[arg-type]
        dist.destroy_process_group()
    found["attached change, 784-300-10"] = walk(attached(784, 300, 10))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="numbers only")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a second thread shares out the same work
    found = walks()
    if options.json:
        numbers = {
            name: {"files": len(files), "moves": moves.total(), "calls": calls}
            for name, (files, moves, calls) in found.items()
        }
        print(json.dumps(numbers))
        return
    for name, (files, moves, calls) in found.items():
        print(
            f"{name}: {len(files)} files, {moves.total()} moves, of them {calls} calls"
        )
        for (origin, here), n in moves.most_common(8):
            print(f"  {n:4}  {origin} -> {here}")


if __name__ == "__main__":
    main()
