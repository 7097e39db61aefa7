"""What calls cost on a device that is not here: launches, bytes a weight, and waits,
counted on meta tensors.

    python benchmarks/launches.py

Nothing is timed. The model is the 54 weights of a ResNet-50; with `--smoke` channels
are divided by 16. The model of the time is that of a device that takes 5 microseconds a
launch and moves 3.35e12 bytes a second, as an H100 does. Where the package of
kernels/README.md is installed, two more tables are counted as if kernels served: an
operator counts as one launch, and as the bytes of its tensors, whatever is in it.
"""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from _models import resnet50_shapes
from _timing import options_of, write

import sparsefn as sf
from sparsefn._engine.backends import BACKENDS
from sparsefn._engine.draws.leaf_draws import drawn_leaves
from sparsefn._engine.leaves.leafwise import added, zeroed
from sparsefn.testing.launches import counted

LAUNCH, BANDWIDTH = 5e-6, 3.35e12  # seconds, bytes a second
STEP = 100  # at which masks change
SOLVES = "SparseGPT of one layer"


class Row(NamedTuple):
    """One call: what was counted, and what a model makes of it."""

    name: str
    launches: int
    bytes_a_weight: float
    waits: int
    modelled_ms: float


def made(name: str, call: Callable[[], Any], weights: int) -> Row:
    """The row of a call."""
    found = counted(call)
    seconds = max(found.launches * LAUNCH, found.bytes / BANDWIDTH)
    return Row(
        name, found.launches, found.bytes / weights, len(found.waits), seconds * 1e3
    )


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on no device, of which only the shape is known."""
    return torch.empty(shape, dtype=dtype, device="meta")


def updates(shapes: list[tuple[int, ...]]) -> list[Row]:
    """An update that changes the masks, and steps of optimizers."""
    params = {f"layer{i:04d}": empty(*shape) for i, shape in enumerate(shapes)}
    weights = sum(x.numel() for x in params.values())
    there = torch.empty((), dtype=torch.int64, device="meta")
    joint, adam, sgd = (
        sf.budgets.global_(),
        sf.optimizers.adam(0.1),
        sf.optimizers.sgd(0.1, momentum=0.9),
    )
    algorithms = {
        "gmp": sf.gmp(0.9),
        "gmp, global": sf.gmp(0.9, distribution=joint),
        "rigl": sf.rigl(0.9),
        "rigl, rows": sf.rigl(0.9, pattern=sf.patterns.row_balanced()),
        "set": sf.set(0.9),
        "snfs": sf.snfs(0.9),
        "rigl and sgd": sf.with_optimizer(sf.rigl(0.9), sgd),
        "rigl and adam": sf.with_optimizer(sf.rigl(0.9), adam),
    }
    rows = []
    for name, algorithm in algorithms.items():
        state = algorithm.init(params)
        cases = {"": STEP, ", a step on the device": there} | (
            {", masks stay": STEP + 1} if "and" in name else {}
        )
        rows += [
            made(
                name + case,
                lambda a=algorithm, s=state, at=step: a.update(s, params, at),
                weights,
            )
            for case, step in cases.items()
        ]
    masks = {path: x > 0 for path, x in params.items()}
    for name, optimizer in {"adam": adam, "sgd": sgd}.items():
        moments = optimizer.init(params)
        rows.append(
            made(
                f"{name} alone",
                lambda o=optimizer, m=moments: o.update(params, m, params=params),
                weights,
            )
        )
        rows.append(
            made(
                f"{name} under masks",
                lambda o=optimizer, m=moments: step(o, m, params, masks),
                weights,
            )
        )
    return rows


def step(
    optimizer: sf.optimizers.Optimizer, moments: Any, params: Any, masks: Any
) -> object:
    """A step under masks, by an operator or by its parts, without the clearing of
    moments.
    """
    done = optimizer.under_masks(params, moments, params, masks)
    if done is not None:
        return done
    grads = dict(
        zip(params, zeroed(list(masks.values()), list(params.values())), strict=True)
    )
    updates, moments = optimizer.update(grads, moments, params=params)
    return added(
        list(masks.values()), list(params.values()), list(updates.values())
    ), moments


def calls(shapes: list[tuple[int, ...]], side: int) -> list[Row]:
    """Masks and draws of one tensor, and one mask of all."""
    scores, mask = empty(side, side), empty(side, side, dtype=torch.bool)
    leaves = {f"layer{i:04d}": empty(*shape) for i, shape in enumerate(shapes)}
    weights, n, key = (
        sum(x.numel() for x in leaves.values()),
        side * side,
        empty(2, dtype=torch.int64),
    )
    one: dict[str, Callable[[], Any]] = {
        "topk_mask": lambda: sf.masks.topk_mask(scores, n // 10),
        "topk_mask, a count in a tensor": lambda: sf.masks.topk_mask(
            scores, torch.tensor(n // 10)
        ),
        "topk_mask, 2:4": lambda: sf.masks.topk_mask(
            scores, None, pattern=sf.patterns.nm(2, 4)
        ),
        "topk_mask, 8:16": lambda: sf.masks.topk_mask(
            scores, None, pattern=sf.patterns.nm(8, 16)
        ),
        "drop_lowest": lambda: sf.masks.drop_lowest(scores, mask, n // 100),
        "grow_highest": lambda: sf.masks.grow_highest(scores, mask, n // 100),
        "uniform": lambda: sf.random.uniform(key, (n,)),
        "normal": lambda: sf.random.normal(key, (n,)),
    }
    rows = [made(name, call, n) for name, call in one.items()]
    own, many = sf.random.key(0), ("uniform", torch.float32)
    return [
        *rows,
        made(
            "topk_masks of all leaves",
            lambda: sf.masks.topk_masks(leaves, weights // 10),
            weights,
        ),
        made(
            "uniforms of all leaves",
            lambda: drawn_leaves(own, leaves, STEP, *many),
            weights,
        ),
    ]


def solves(side: int) -> list[Row]:
    """SparseGPT of one layer, whose checks of values wait."""
    weight, hessian = empty(side, side), empty(side, side)
    options: dict[str, dict[str, Any]] = {
        "half kept": {"keep": 0.5},
        "2:4": {"pattern": sf.patterns.nm(2, 4)},
        "4:8": {"pattern": sf.patterns.nm(4, 8)},
        "a mask": {"mask": empty(side, side, dtype=torch.bool)},
    }
    return [
        made(
            f"solve.obs, {name}",
            lambda o=option: sf.solve.obs(weight, hessian, **o),
            side * side,
        )
        for name, option in options.items()
    ]


def show(title: str, rows: list[Row]) -> None:
    """Print one table."""
    width = max(len(row.name) for row in rows)
    print(f"\n{title}\n{'':{width}}  launches  bytes a weight  waits  modelled, ms")
    for row in rows:
        line = (
            f"{row.launches:8}  {row.bytes_a_weight:14.1f}  {row.waits:5}  "
            f"{row.modelled_ms:12.3f}"
        )
        print(f"{row.name:{width}}  {line}", flush=True)


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    shapes = resnet50_shapes(16 if options.smoke else 1)
    side = 64 if options.smoke else 1024
    tables = {
        "updates of ResNet-50's 54 weights": updates(shapes),
        "one tensor": calls(shapes, side),
        SOLVES: solves(side),
    }
    if importlib.util.find_spec("sparsefn_kernels"):
        from sparsefn_kernels import backends_for

        with mock.patch.dict(BACKENDS, backends_for("meta")):
            tables |= {
                "updates, by kernels": updates(shapes),
                "one tensor, by kernels": calls(shapes, side),
                f"{SOLVES}, by kernels": solves(side),
            }
    for title, rows in tables.items():
        show(title, rows)
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("launches", main(chosen), chosen)
