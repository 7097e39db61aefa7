"""A run on DTensors beside the same run on plain tensors of one process: every state
has the same bits.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import sparsefn as sf
from sparsefn._engine.processes.shards import extent_of, sharded_like
from sparsefn.testing.harness import assert_same
from tests.nn.distributed.harness import Cases

Tree = dict[str, Tensor]
Layout = Callable[[Any], Any]

SHAPES = {
    "a.weight": (37, 24),
    "b.weight": (40, 32),
    "b.bias": (40,),
    "c.weight": (3, 8),
    "d.weight": (6, 5, 3, 3),
}
LARGE = {"a.weight": (371, 256), "b.weight": (300, 320), "c.weight": (90, 90)}


# ---- layouts -------------------------------------------------------------------------


@cache
def mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh(
        "cpu", sizes, mesh_dim_names=("outer", "inner")[2 - len(sizes) :]
    )


def laid(tree: Any, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    """DTensors; a leaf without the dimension that is split is split along its first."""

    def place(x: Tensor) -> Tensor:
        fits = [
            p if p.is_replicate() or p.dim < x.ndim else Shard(0) for p in placements
        ]
        return distribute_tensor(x, mesh, fits) if x.ndim else x

    return optree.tree_map(place, tree)


def as_parameters(parameters: Tree, tree: Tree) -> Tree:
    """DTensors with the placements of parameters; distribute_tensor cannot make uneven
    strided shards.
    """
    return {
        path: sharded_like(part_of(x, parameters[path]).contiguous(), parameters[path])
        for path, x in tree.items()
    }


def part_of(x: Any, sharded: Any) -> Any:
    """What this process holds of a whole tensor that is laid out as another one."""
    if not isinstance(sharded, DTensor):
        return x
    extent = extent_of(sharded)
    return x[
        tuple(
            slice(start, start + size)
            for start, size in zip(extent.start, extent.size, strict=True)
        )
    ]


def once(lay: Layout) -> Layout:
    """The same DTensors for the same tree: to lay a tree out takes messages."""
    seen: dict[int, tuple[Any, Any]] = {}

    def laid_once(tree: Any) -> Any:
        if id(tree) not in seen:
            # the tree is kept, as its number may be another's later
            seen[id(tree)] = (tree, lay(tree))
        return seen[id(tree)][1]

    return laid_once


def layouts(ranks: int) -> dict[str, Layout]:
    """The layouts that a number of ranks can have."""
    one, s0, s1, r = mesh(ranks), Shard(0), Shard(1), Replicate()
    found = {"S0": (one, [s0]), "S1": (one, [s1]), "R": (one, [r])}
    if ranks == 4:
        two = mesh(2, 2)
        found |= {
            "HSDP": (two, [r, s0]),
            "S0,S1": (two, [s0, s1]),
            "S0,S0": (two, [s0, s0]),
            "S1,R": (two, [s1, r]),
        }
    return {
        name: once(partial(laid, mesh=grid, placements=placements))
        for name, (grid, placements) in found.items()
    }


def parts_lie_right(ranks: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """A case a layout: what `part_of` cuts out is what torch puts there."""
    tree = values(SHAPES)
    for name, lay in layouts(ranks).items():
        yield (
            f"parts on {name}",
            lambda lay=lay: assert_same("gathered", tree, full(lay(tree))),
        )


def held(tree: Any) -> Any:
    """A tree of plain tensors, each the part that this process holds."""
    return optree.tree_map(
        lambda x: x.to_local() if isinstance(x, DTensor) else x, tree
    )


def full(tree: Any) -> Any:
    """A tree of plain tensors, each the whole."""
    return optree.tree_map(
        lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree
    )


# ---- values --------------------------------------------------------------------------


def _sprinkled(
    x: Tensor, value: float, generator: torch.Generator, share: float = 0.03
) -> Tensor:
    return torch.where(
        torch.rand(x.shape, generator=generator) < share, torch.tensor(value), x
    )


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda x, g: x,
    "ties": lambda x, g: (x * 2).round() / 2,
    "zeros": lambda x, g: _sprinkled(x, 0.0, g, 0.9),
    "equal": lambda x, g: torch.ones_like(x),
    "nan and inf": lambda x, g: _sprinkled(
        _sprinkled(x, float("nan"), g), float("-inf"), g
    ),
    "signed zeros": lambda x, g: _sprinkled(_sprinkled(x, 0.0, g, 0.5), -0.0, g, 0.5),
}


def values(
    shapes: dict[str, tuple[int, ...]],
    kind: str = "normal",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: KINDS[kind](torch.randn(shape, generator=generator), generator).to(dtype)
        for path, shape in shapes.items()
    }


# ---- the comparison ------------------------------------------------------------------


def run(algorithm: sf.Algorithm, params: Tree, grads: Tree) -> Iterator[sf.State]:
    """The state after init and after two updates."""
    state = algorithm.init(params)
    yield state
    for step in range(2):
        state = algorithm.update(state, grads, step)
        yield state


def compared(
    name: str,
    make: Callable[[], sf.Algorithm],
    params: Tree,
    grads: Tree,
    layouts: dict[str, Layout],
) -> Cases:
    """A case a layout: the states of a run on shards are those of a run on the whole
    tensors.
    """
    alone = cache(lambda: list(run(make(), params, grads)))
    for layout, lay in layouts.items():
        yield (
            f"{name} on {layout}",
            lambda lay=lay: same_states(alone(), run(make(), lay(params), lay(grads))),
        )


def assert_parts(what: str, want: Any, got: Any) -> None:
    """Every process holds its parts of the whole tensors that are wanted. Takes no
    messages, as `full` does.
    """
    assert_same(what, optree.tree_map(part_of, want, got), held(got))


def same_states(alone: Iterable[sf.State], sharded: Iterable[sf.State]) -> None:
    """The same bits, counts and placements."""
    for i, (want, got) in enumerate(zip(alone, sharded, strict=True)):
        for path, mask in got.masks.items():
            param = got.params[path]
            if mask.ndim and isinstance(param, DTensor):
                assert isinstance(mask, DTensor), (
                    f"after {i} updates the mask of {path} is plain"
                )
                assert mask.placements == param.placements, (
                    f"after {i} updates the mask of {path} is {mask.placements}"
                )
        assert_parts(f"after {i} updates", want, got)
    assert sf.masks.n_kept(got.masks) == sf.masks.n_kept(want.masks)
