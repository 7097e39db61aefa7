"""Layouts in two dimensions, patterns whose units cross the borders of shards, and
scores that are hard to rank.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import sparsefn as sf
from sparsefn._engine.processes.shards import local_tensor
from tests.nn.distributed.harness import Cases, on_ranks
from tests.nn.distributed.sharded import (
    KINDS,
    LARGE,
    SHAPES,
    as_parameters,
    compared,
    layouts,
    part_of,
    parts_lie_right,
    values,
)

KEY = sf.random.key(3)
SWAP: dict[str, Any] = {"drop_fraction": 0.3, "when": sf.always(), "key": KEY}
P, B = sf.patterns, sf.budgets


def adam(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(algorithm, sf.optimizers.adam(1e-2))


ALGORITHMS: dict[str, Callable[[], sf.Algorithm]] = {
    "adam rigl": lambda: adam(sf.rigl(0.6, **SWAP)),
    "adam rigl erk": lambda: adam(sf.rigl(0.6, distribution=B.erk(), **SWAP)),
    "adam rigl global": lambda: adam(sf.rigl(0.6, distribution=B.global_(), **SWAP)),
    "adam set": lambda: adam(sf.set(0.6, **SWAP)),
    "adam gmp global": lambda: adam(sf.gmp(0.6, distribution=B.global_())),
    "snfs": lambda: sf.snfs(0.6, **SWAP),
}

# {name: (pattern, leaves that it fits)}; of the borders of shards of 37 x 24 and 3 x 8
# only few fit a pattern.
PATTERNS: dict[str, tuple[P.Pattern, str]] = {
    "block 16 x 8": (P.block((16, 8)), "[abd].weight"),
    "block 3 x 5 l2": (P.block((3, 5), reduce="l2"), "*.weight"),
    "block 4 x 4": (P.block((4, 4)), "*.weight"),
    "2:4": (P.nm(2, 4), "[abc].weight"),
    "1:4 of rows": (P.nm(1, 4, axis=0), "b.*"),
    "channel 0": (P.channel(0), "*.weight"),
    "channel 1": (P.channel(1), "*.weight"),
    "kernel": (P.kernel(), "d.weight"),
    "row_balanced": (P.row_balanced(), "*.weight"),
    "in_groups": (P.in_groups(2), "[abc].weight"),
    "out_groups": (P.out_groups(4), "b.weight"),
    "nearly_diagonal": (P.nearly_diagonal(3), "[ab].weight"),
    "one dimension": (P.unstructured(), "*"),
}
FIXED = {"2:4", "1:4 of rows", "nearly_diagonal"}  # the pattern says the count
# a leaf has several groups, which no global budget takes
GROUPS = {"row_balanced", "in_groups", "out_groups"}


def with_pattern(
    make: Any, name: str, sparsity: float = 0.5, **options: Any
) -> sf.Algorithm:
    pattern, where = PATTERNS[name]
    return make(
        None if name in FIXED else sparsity, pattern=pattern, where=where, **options
    )


def fsdp_and_tp() -> dict[str, torch.Tensor]:
    """Parameters that tensor parallelism has cut along rows or columns, and FSDP2 again
    along rows.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(24, 37), nn.ReLU(), nn.Linear(37, 32))
    parallelize_module(
        model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])
    return {path: parameter.detach() for path, parameter in model.named_parameters()}


def on_four_ranks() -> Cases:
    places = layouts(4)
    yield from parts_lie_right(4)
    params, grads = values(SHAPES), values(SHAPES, seed=1)
    for name, make in ALGORITHMS.items():
        yield from compared(name, make, params, grads, places)
    parameters = fsdp_and_tp()
    shapes = {path: tuple(parameter.shape) for path, parameter in parameters.items()}
    two = {"FSDP2+TP": partial(as_parameters, parameters)}
    for name, make in ALGORITHMS.items():
        yield from compared(name, make, values(shapes), values(shapes, seed=1), two)
    for name in PATTERNS:
        makes: dict[str, Callable[[], sf.Algorithm]] = {
            "one_shot": partial(with_pattern, sf.one_shot, name),
            "rigl": partial(with_pattern, sf.rigl, name, **SWAP),
            "gmp global": partial(with_pattern, sf.gmp, name, distribution=B.global_()),
        }
        if name in FIXED | GROUPS:
            del makes["gmp global"]
        for algorithm, make in makes.items():
            on = (
                places
                if algorithm == "one_shot"
                else {layout: places[layout] for layout in ("S1", "S0,S1", "S0,S0")}
            )
            yield from compared(f"{algorithm}, {name}", make, params, grads, on)


def on_two_ranks() -> Cases:
    places = layouts(2)
    for kind in KINDS:
        params, grads = values(SHAPES, kind), values(SHAPES, kind, seed=1)
        for name in ("adam rigl", "adam rigl global", "adam gmp global", "snfs"):
            yield from compared(
                f"{name}, {kind}", ALGORITHMS[name], params, grads, places
            )
        params, grads = values(LARGE, kind), values(LARGE, kind, seed=1)
        for name in (
            ("adam rigl", "adam gmp global") if kind == "ties" else ("adam gmp global",)
        ):
            yield from compared(
                f"large {name}, {kind}", ALGORITHMS[name], params, grads, places
            )
        yield from counted(kind, (37, 24), places)
        yield from counted(kind, (371, 256), places)


def counted(kind: str, shape: tuple[int, ...], places: dict[str, Any]) -> Cases:
    """The smallest and the largest counts, and one in the middle."""
    n = math.prod(shape)
    scores = values({"w": shape}, kind)
    for k in (0, 1, n // 3, n - 1, n):
        alone = cache(lambda k=k: sf.masks.topk_mask(scores["w"], k))

        def same(lay: Any, k: int = k, alone: Any = alone) -> None:
            mask = sf.masks.topk_mask(lay(scores)["w"], k)
            assert torch.equal(local_tensor(mask), part_of(alone(), mask))

        for layout, lay in places.items():
            yield f"the best {k} of {shape}, {kind} on {layout}", partial(same, lay)


def test_layouts_and_patterns_on_four_ranks() -> None:
    on_ranks(4, on_four_ranks)


def test_values_on_two_ranks() -> None:
    on_ranks(2, on_two_ranks)
