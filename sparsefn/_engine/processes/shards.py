"""What torch's DTensors hold: the one place that knows of other processes' parts.

A DTensor has the shape of the whole, and what is computed from it may still be the part
of one process: a sum is "partial" until the processes add their parts. Read as a number
it would differ between them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparsefn._engine.processes.agreements import agree, agreement
from sparsefn._engine.processes.extent import Extent
from sparsefn._engine.transforms import (
    read_number,
    temporarily_clear_interpreter_stack,
    unwrapped,
    without_compiler,
)

Out = TypeVar("Out")
Rebuild = Callable[[Sequence[Tensor]], Out]
Box = tuple[tuple[int, int], ...]  # first and end along each dimension


class Layout(NamedTuple):
    """How the processes of some groups have cut a tensor into boxes.

    >>> from sparsefn._engine.processes.shards import Layout
    >>> Layout((5, 6), ((0, 0),), (2,), ("1",), (1,)).box((1,))
    ((3, 5), (0, 6))

    `cuts` are pairs of a group's position and the dimension that it cuts, in the order
    in which they are made. `sizes` are the sizes of the groups, `names` their names,
    and `at` is this process's rank in each.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    at: tuple[int, ...]

    def box(self, at: Sequence[int]) -> Box:
        """The box of the process with these ranks, as torch.chunk cuts it."""
        box = [(0, n) for n in self.shape]
        for group, dim in self.cuts:
            first, end = box[dim]
            chunk = -(-(end - first) // self.sizes[group])
            first += min(at[group] * chunk, end - first)
            box[dim] = (first, min(first + chunk, end))
        return tuple(box)

    def extent(self, box: Box) -> Extent:
        """A box of this tensor as an Extent."""
        return Extent(
            self.shape,
            tuple(a for a, _ in box),
            tuple(b - a for a, b in box),
            self.names,
        )


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    # Importing the module takes a second; without it there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of some tensors is a DTensor."""
    others = [x for x in tensors if type(x) is not Tensor]  # quick, as every step asks
    return bool(others) and any(map(is_sharded, others))


def full_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of which processes may hold parts, as plain tensors that are complete.

    >>> from sparsefn._engine.processes.shards import full_tensors
    >>> full_tensors([torch.tensor(3), torch.tensor(4)])
    [tensor(3), tensor(4)]

    Meant for counts and other small results. The 0-d ones of one dtype, mesh and
    placement travel together, so that counting many leaves takes one message. All
    processes of a mesh must call it.
    """
    results = list(tensors)
    together: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        if is_sharded(x) and x.ndim:
            results[i] = x.full_tensor()  # type: ignore[attr-defined]
        elif is_sharded(x):
            together.setdefault((x.device_mesh, x.placements, x.dtype), []).append(i)  # type: ignore[attr-defined]
    for (mesh, placements, _), at in together.items():
        parts = torch.stack([results[i].to_local() for i in at])  # type: ignore[attr-defined]
        sums = sys.modules["torch.distributed.tensor"].DTensor.from_local(
            parts, mesh, placements, run_check=False
        )
        for i, x in zip(at, sums.full_tensor().unbind(), strict=True):
            results[i] = x
    return results


def layout_of(x: Tensor, sums: bool = False) -> Layout:
    """How the processes have cut a DTensor. Raises the errors of `extent_of`; with
    `sums` no errors for partial ones.
    """
    mesh = x.device_mesh  # type: ignore[attr-defined]
    placements = x.placements  # type: ignore[attr-defined]
    ranks = mesh.get_coordinate()
    if ranks is None:
        raise ValueError(
            "expected a DTensor on a mesh that contains this process, got "
            f"{_named(x)} on {mesh}"
        )
    cuts: list[tuple[int, int]] = []
    for i in reversed(range(mesh.ndim)):
        placement = placements[i]
        if placement.is_replicate() or (sums and placement.is_partial()):
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise ValueError(
                f"expected a DTensor of shards or replicas, got {_named(x)}; "
                "redistribute it to the placements of its parameter first"
            )
        # A strided shard says that some mesh dimensions after it cut first. Only where
        # all of them do is a part a box.
        stride = getattr(placement, "split_factor", 1)
        if stride == 1:
            cuts.insert(0, (i, placement.dim))
        elif stride == math.prod(
            mesh.size(j) for j, dim in cuts if dim == placement.dim
        ):
            cuts.append((i, placement.dim))
        else:
            raise ValueError(
                "expected strided shards only together with the shards that they are "
                "strided by, as FSDP2 over tensor parallelism has them, got "
                f"{_named(x)}, whose parts are no boxes"
            )
    split = sorted(i for i, _ in cuts if mesh.size(i) > 1)
    return Layout(
        tuple(x.shape),
        tuple((split.index(i), dim) for i, dim in cuts if i in split),
        tuple(mesh.size(i) for i in split),
        tuple(mesh.get_group(i).group_name for i in split),
        tuple(ranks[i] for i in split),
    )


def extent_of(x: Tensor) -> Extent:
    """Where the part of a DTensor that this process holds lies in the whole.

    All is worked out from the shape of the whole, so that processes agree without a
    message. Replicas have no group. Raises ValueError for a partial tensor, for strided
    shards that are no boxes, for shards that torch.chunk would not make, and for a mesh
    without this process. Callers add the path.
    """
    return _checked_extent(x, layout_of(x))


def _checked_extent(x: Tensor, layout: Layout) -> Extent:
    extent = layout.extent(layout.box(layout.at))
    held = tuple(local_tensor(x).shape)
    if held != extent.size:
        raise ValueError(
            "expected a DTensor cut as torch.chunk cuts, on rank "
            f"{torch.distributed.get_rank()} a part of shape {extent.size}, got a "
            f"part of shape {held} of {_named(x)}"
        )
    return extent


def local_tensor(x: Tensor) -> Tensor:
    """The part of a DTensor that this process holds, as a plain tensor.

    A plain tensor is returned unchanged.
    """
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def sharded_like(local: Tensor, x: Tensor) -> Tensor:
    """A DTensor that is laid out as x from the part of this process; the part itself
    where x is plain.
    """
    if not is_sharded(x):
        return local
    module = sys.modules["torch.distributed.tensor"]
    strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    # Without the shape every process would work out another one from shards of
    # different sizes.
    made: Tensor = module.DTensor.from_local(
        local,
        x.device_mesh,  # type: ignore[attr-defined]
        x.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=x.shape,
        stride=tuple(strides),
    )
    return made


def check_plain(what: str, path: str, x: Tensor, instead: str = "") -> None:
    """Raise ValueError for a DTensor where something reads whole tensors; `instead`
    says what else to do.
    """
    if is_sharded(x):
        raise ValueError(
            f"{what}: expected plain tensors, got a DTensor at {path!r}{instead}"
        )


def check_bare(path: str, x: Tensor) -> None:
    """Raise ValueError for a DTensor inside a transform of torch.func, which hides
    whose part is whose.
    """
    if torch.compiler.is_compiling():
        inner = x
    else:
        inner = unwrapped(x)
    if inner is not x and is_sharded(inner):
        raise ValueError(
            "expected a DTensor outside of vmap and other transforms of torch.func, "
            f"got {_named(inner)} in one at {path!r}; update the members of an "
            "ensemble one by one"
        )


def check_shards(path: str, x: Tensor) -> None:
    """Raise ValueError for a DTensor that an algorithm cannot hold: see `extent_of`.

    It raises inside a transform, too.
    """
    check_bare(path, x)
    check_local_size(path, x)


def check_local_size(path: str, x: Tensor, what: str = "", sums: bool = False) -> None:
    """Raise ValueError, naming path and sizes, for a DTensor whose part here has
    another size: see `extent_of`.

    >>> from sparsefn._engine.processes.shards import check_local_size
    >>> check_local_size("w", torch.ones(2))

    `what` says what it is. With `sums` it may be a partial sum.
    """
    if is_sharded(x):
        try:
            _checked_extent(x, layout_of(x, sums))
        except ValueError as error:
            raise ValueError(f"{what}{error} at {path!r}") from None


def groups_of(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """The names of the process groups of the meshes of some DTensors, by first
    appearance; () for plain tensors.
    """
    meshes = dict.fromkeys(x.device_mesh for x in tensors if is_sharded(x))  # type: ignore[attr-defined]
    names: dict[str, None] = {}
    for mesh in meshes:
        for i in range(mesh.ndim):
            if mesh.size(i) > 1:
                names[mesh.get_group(i).group_name] = None
    return tuple(names)


def agreed(
    call: Mapping[str, object],
    leaves: Mapping[str, Mapping[str, Any]],
    fn: Callable[[], Out],
) -> Out:
    """The result of a function that may call code of a user: an error on one process is
    raised on all of them.

    >>> from sparsefn._engine.processes.shards import agreed
    >>> agreed({"call": "sum"}, {"scores": {"w": torch.ones(2)}}, lambda: 3)
    3

    The processes are in the meshes of the DTensors among the leaves. First they compare
    the named values of the call, and the leaves by path. All raise ValueError where
    these differ, or where the part of a leaf has another size than the whole and its
    placements say.
    """
    groups = groups_of(x for tree in leaves.values() for x in tree.values())
    if not groups:
        return fn()
    with agreement(groups):
        _compare(call, leaves)
        return fn()


@without_compiler
def _compare(
    call: Mapping[str, object], leaves: Mapping[str, Mapping[str, Any]]
) -> None:
    seen = {(name, ""): str(read_number(value)) for name, value in call.items()}
    for what, tree in leaves.items():
        for path, leaf in tree.items():
            check_local_size(path, leaf, f"{what}: ", sums=True)
            seen[what, path] = told_of(leaf)
    agree((), seen=seen)


def told_of(leaf: object) -> str:
    """What processes tell each other of a leaf, in words.

    >>> from sparsefn._engine.processes.shards import told_of
    >>> told_of(torch.ones(2))
    'a tensor of shape (2,) and torch.float32, plain'
    """
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}, {words_of(leaf)}"


def is_spread(x: Tensor, like_: Tensor) -> bool:
    """Whether both are DTensors, with different placements."""
    return is_sharded(x) and is_sharded(like_) and x.placements != like_.placements  # type: ignore[attr-defined]


def redistributed(x: Tensor, like_: Tensor) -> Tensor:
    """A DTensor with the placements of another one, perhaps over another mesh."""
    if not is_spread(x, like_):
        return x
    moved: Tensor = x.redistribute(like_.device_mesh, like_.placements)  # type: ignore[attr-defined]
    return moved


def part(full: Tensor, x: Tensor) -> Tensor:
    """A plain tensor, the same on every process, laid out as x."""
    if not is_sharded(x):
        return full
    extent = extent_of(x)
    box = tuple(
        slice(first, first + n)
        for first, n in zip(extent.start, extent.size, strict=True)
    )
    return sharded_like(full[box].contiguous(), x)


def laid_like(x: Tensor, like_: Tensor) -> Tensor:
    """A tensor on the device of another one and laid out as it, of which processes hold
    parts or all have the whole.
    """
    x = x.to(like_.device)
    if x.ndim and not is_sharded(x):
        return part(x, like_)
    return redistributed(x, like_)


def words_of(x: Tensor) -> str:
    """How a tensor is laid out, in words."""
    if not is_sharded(x):
        return "plain"
    placements = list(x.placements)  # type: ignore[attr-defined]
    mesh = x.device_mesh  # type: ignore[attr-defined]
    return f"laid out as {placements} over {mesh}"


def _named(x: Tensor) -> str:
    return f"one of shape {tuple(x.shape)} with placements {x.placements}"  # type: ignore[attr-defined]


def localized(
    rows: Sequence[tuple[Any, ...]], rebuild: Rebuild[Out]
) -> tuple[Sequence[tuple[Any, ...]], Rebuild[Out]]:
    """Rows of tensors as local ones, and a function that rebuilds a tree of results
    laid out as their first tensors.
    """
    if not any_sharded([row[0] for row in rows]):
        return rows, rebuild
    firsts = [row[0] for row in rows]

    def rebuild_sharded(results: Sequence[Tensor]) -> Out:
        pairs = zip(results, firsts, strict=True)
        return rebuild([sharded_like(*pair) for pair in pairs])

    return [tuple(map(local_tensor, row)) for row in rows], rebuild_sharded


def outside_vjp(fn: Callable[[Tensor], Out], x: Tensor) -> Out:
    """What a function makes of a tensor, for constants: of a DTensor inside
    `torch.func.vjp`, as if it were outside.

    Inside, nobody sees that it is one, and what is drawn or selected for it would be a
    plain tensor.
    """
    if torch.compiler.is_compiling():
        inner = x
    else:
        inner = unwrapped(x)
    if inner is x or not is_sharded(inner):
        return fn(x)
    with temporarily_clear_interpreter_stack():
        return fn(inner)
