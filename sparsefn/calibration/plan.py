"""What is read, run and written when a folder is pruned: the parts of its model in
turn, and the leaves of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsefn.calibration.folders import StoredTensor, some, stored_in
from sparsefn.calibration.unloaded import Leaf, leaves_in, read_leaves, unloaded
from sparsefn.modules.wrappers import own_tensors
from sparsefn.state import State, Where
from sparsefn.tree.chosen import matching

OUTSIDE = ""  # the part that is in no list
_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Plan(NamedTuple):
    """A folder and its model without weights; the paths of the parts in the order in
    which data passes them, the blocks in each, with the names of their leaves, and all
    leaves of each, those outside of all parts under "".
    """

    folder: Path
    stored: dict[str, StoredTensor]
    model: nn.Module
    order: list[str]
    blocks: dict[str, list[tuple[Where, list[str]]]]
    leaves: dict[str, list[Leaf]]

    def load(self, path: str, device: torch.device) -> tuple[dict[str, Tensor], str]:
        """The weights of a part by their names in the model, and a digest of them;
        buffers go into the model.
        """
        found, digest = read_leaves(self.folder, self.stored, self.leaves[path])
        buffers = dict(self.model.named_buffers())
        for name in [name for name in found if name in buffers]:
            buffers[name].copy_(found.pop(name))
        return {name: x.to(device) for name, x in found.items()}, digest

    def outside(self, device: torch.device) -> dict[str, Tensor]:
        """The weights of the model, of which those outside of all parts have values."""
        own = {
            name: param.detach()
            for name, (_, param) in own_tensors(self.model, "parameters").items()
        }
        return own | self.load(OUTSIDE, device)[0]


def bare(weights: dict[str, Tensor]) -> State:
    """The state of weights without masks, which it does not copy.

    >>> bare({"w": torch.ones(1)}).masks
    {'w': tensor(True)}
    """
    return State(
        weights,
        {
            name: torch.ones((), dtype=torch.bool, device=x.device)
            for name, x in weights.items()
        },
    )


def planned(
    folder: Path,
    blocks: Sequence[Where] | None,
    make: Callable[[], nn.Module] | None,
    device: torch.device,
) -> Plan:
    """Read what a folder holds, and find its parts: the members of the lists of layers
    that have a block.

    >>> planned(Path("/nowhere"), None, None, torch.device("cpu"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the folder of a model, got '/nowhere', which is no
    folder
    """
    if blocks is not None and (
        isinstance(blocks, str) or not isinstance(blocks, Sequence)
    ):
        raise TypeError(
            "stream: expected blocks to be a sequence, with an entry a block, got "
            f"{blocks!r}"
        )
    stored = stored_in(folder)
    dtype = next(
        (_PLAIN[one.dtype] for one in stored.values() if one.dtype in _PLAIN),
        torch.float32,
    )
    model = unloaded(folder, make, dtype)
    for part in model.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    leaves = leaves_in(model, stored)
    lists = _lists_of_layers(model)
    if not lists:
        raise ValueError(
            "stream: expected a model with a list of layers, but the "
            f"{type(model).__name__} has none"
        )
    members: dict[str, list[str]] = {}
    for path, layers in lists.items():
        members[path] = [f"{path}.{name}" for name, _ in layers.named_children()]
    every = [path for paths in members.values() for path in paths]
    places = list[tuple[int, Where]]()
    _by_part(leaves, every)  # which raises where layers share leaves
    asked = [f"{path}.*" for path in every] if blocks is None else blocks
    found: dict[str, list[tuple[Where, list[str]]]] = {}
    named = {
        name: param for name, (_, param) in own_tensors(model, "parameters").items()
    }
    for block in asked:
        chosen = [
            name
            for name, param in matching("blocks", block, named).items()
            if param.ndim > 1
        ]
        own = {_part_of(name, every) for name in chosen}
        if len(own) != 1 or OUTSIDE in own:
            raise ValueError(
                "stream: expected each block to be in one layer of a list "
                f"({some(members)}), but the matrices of {block!r} are {some(chosen)}"
            )
        found.setdefault(str(*own), []).append((block, chosen))
        places.append((every.index(str(*own)), block))
    check_places(places)
    order: list[str] = []
    for paths in members.values():
        if any(path in found for path in paths):
            order += paths
    return Plan(folder, stored, model, order, found, _by_part(leaves, order))


def check_places(places: Sequence[tuple[int, Where]]) -> None:
    """Raise ValueError where blocks, each with its place in the model, are in another
    order than data passes them.

    >>> check_places([(1, "1.*"), (0, "0.*")])
    Traceback (most recent call last):
        ...
    ValueError: stream: expected blocks in the order in which data passes them, but
    '1.*' is before '0.*'
    """
    for (place, block), (after, other) in itertools.pairwise(places):
        if after < place:
            raise ValueError(
                "stream: expected blocks in the order in which data passes them, but "
                f"{block!r} is before {other!r}"
            )


def _lists_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    # The outermost lists whose members are made of other modules: experts are inside of
    # layers, and heads are plain.
    lists: dict[str, nn.Module] = {}
    for path, part in model.named_modules():
        layers = (
            isinstance(part, nn.ModuleList)
            and len(part)
            and all(any(one.children()) for one in part)
        )
        if layers and not any(_inside(path, other) for other in lists):
            lists[path] = part
    return lists


def _by_part(leaves: Iterable[Leaf], order: Sequence[str]) -> dict[str, list[Leaf]]:
    found: dict[str, list[Leaf]] = {path: [] for path in [OUTSIDE, *order]}
    for leaf in leaves:
        own = {_part_of(name, order) for name in leaf.names}
        if len(own) > 1:
            raise ValueError(
                "stream: expected the leaves of a layer to be its own, but "
                f"{some(leaf.names)} are one tensor: prune the model in memory, with "
                "sf.calibration.in_order"
            )
        found[own.pop()].append(leaf)
    return found


def _part_of(name: str, parts: Iterable[str]) -> str:
    return next((path for path in parts if _inside(name, path)), OUTSIDE)


def _inside(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.")
