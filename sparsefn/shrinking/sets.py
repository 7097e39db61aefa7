"""Units of tied sets that are cut out of a module: the sets say what belongs together, and nothing is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsefn.modules.weights import is_conv1d, layer_of
from sparsefn.modules.wrappers import own_tensors
from sparsefn.patterns.kinds import Pattern
from sparsefn.patterns.matching import checked_sets
from sparsefn.patterns.places import Place
from sparsefn.patterns.tied import joined, tied_sets
from sparsefn.patterns.units import Units
from sparsefn.shrinking.layers import keep_entries


def cut_sets(module: nn.Module, masks: dict[str, Tensor], patterns: Sequence[Pattern]) -> list[str]:
    """Remove the units of tied sets that no layer reads; say which pruned ones stay, and why.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> masks = {"0.weight": torch.tensor([[True], [False]]), "2.weight": torch.tensor([[True, False]])}
    >>> cut_sets(net, masks, [sf.tied([["0.weight", 0], ["2.weight", 1]])])
    []
    >>> net
    Sequential(
      (0): Linear(in_features=1, out_features=1, bias=True)
      (1): ReLU()
      (2): Linear(in_features=1, out_features=1, bias=True)
    )

    Module and masks are cut in place. `masks` are by name; a leaf without one is dense. The layers are `nn.Linear` and
    the `Conv1D` of transformers. Raises ValueError for others, for weights that two names share, for a set that no
    layer reads, or none makes, and for a dimension of a leaf in two sets.
    """
    cut: set[tuple[str, int]] = set()
    return [note for pattern in patterns for note in _cut_pattern(module, masks, pattern, cut)]


def _cut_pattern(module: nn.Module, masks: dict[str, Tensor], pattern: Pattern, cut: set[tuple[str, int]]) -> list[str]:
    named = own_tensors(module, "parameters", tied=True)
    leaves = {name: param for name, (_, param) in named.items()}
    checked_sets(pattern, list(leaves))
    cuts: list[tuple[Place, Tensor]] = []
    notes: list[str] = []
    for first, units in tied_sets(pattern, leaves).items():
        for place in units.places:
            _check(place, leaves, cut)
        reads = [place for place in units.places if _reads(module, named[place.path][0], place)]
        if not reads or len(reads) == len(units.places):
            which = "reads" if not reads else "makes"
            raise ValueError(
                f"shrink: expected a member of the tied set of {first!r} that {which} its units: a dimension of "
                f"{'inputs' if not reads else 'outputs'} of an nn.Linear or a Conv1D of transformers"
            )
        makes = [place for place in units.places if place not in reads]
        made, read = (_kept(units._replace(places=tuple(some)), leaves, masks) for some in (makes, reads))
        if stays := int((read & ~made).sum()):
            notes.append(f"{first!r} keeps {stays} of {int((~made).sum())} pruned units: weights on them are kept")
        if not read.any():
            notes.append(f"{first!r} keeps 1 of {len(read)} pruned units: one unit always stays")
            read = torch.arange(len(read), device=read.device) == 0
        cuts += [(place, place.along(read)) for place in units.places]
    _cut(module, named, masks, cuts)
    return notes


def _check(place: Place, leaves: Mapping[str, Tensor], cut: set[tuple[str, int]]) -> None:
    path = place.path
    if place.numbers is not None:
        raise ValueError(f"shrink: expected tied sets of blocks in only=, got one with unit numbers at {path!r}")
    for name, leaf in leaves.items():
        if leaf is leaves[path] and name != path:
            raise ValueError(f"shrink: expected {path!r} to have its weights alone, but it shares them with {name!r}")
    if (path, place.dim) in cut:
        raise ValueError(
            "shrink: expected tied sets in only= that have no dimension of a leaf in common, but two of them cut "
            f"dimension {place.dim} of {path!r}"
        )
    cut.add((path, place.dim))


def _kept(units: Units, leaves: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensor:
    # Of which units these leaves keep an entry.
    paths, dense = [place.path for place in units.places], torch.ones((), dtype=torch.bool, device="cpu")
    return joined(units, {path: masks.get(path, dense).expand(leaves[path].shape) for path in paths}).any(1)


def _layer(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    layer, name = layer_of(module, path)
    if not (isinstance(layer, nn.Linear) or is_conv1d(layer)) or name not in layer._parameters:
        raise ValueError(
            f"shrink: expected members of tied sets to be weights and biases of nn.Linear, or of Conv1D of "
            f"transformers, but {path!r} is the {name} of a {type(layer).__name__}"
        )
    return layer, name


def _reads(module: nn.Module, path: str, place: Place) -> bool:
    # Whether the units are inputs of the layer, and not outputs.
    layer, name = _layer(module, path)
    return name == "weight" and place.dim == (0 if is_conv1d(layer) else 1)


def _cut(
    module: nn.Module,
    named: Mapping[str, tuple[str, Tensor]],
    masks: dict[str, Tensor],
    cuts: list[tuple[Place, Tensor]],
) -> None:
    members = {place.path for place, _ in cuts}
    for place, keep in cuts:
        path = named[place.path][0]
        layer, name = _layer(module, path)
        keep_entries(layer, name, keep, place.dim)
        _take_mask(masks, place.path, keep, place.dim)
        if name != "weight":
            continue
        inputs, outputs = ("nx", "nf") if is_conv1d(layer) else ("in_features", "out_features")
        if _reads(module, path, place):
            setattr(layer, inputs, int(keep.sum()))
            continue
        setattr(layer, outputs, int(keep.sum()))
        bias = place.path[: -len("weight")] + "bias"
        if bias not in members:
            keep_entries(layer, "bias", keep)
            _take_mask(masks, bias, keep, 0)
        # GPT-2 splits the fused outputs into equal parts of a size that the attention holds.
        around = module.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
        if place.parts > 1 and getattr(around, "split_size", None) == len(keep) // place.parts:
            around.split_size = int(keep.sum()) // place.parts  # type: ignore[assignment]


def _take_mask(masks: dict[str, Tensor], path: str, keep: Tensor, dim: int) -> None:
    # So that masks fit the smaller leaves, for the next part that is cut.
    if path in masks and masks[path].ndim:
        masks[path] = masks[path].index_select(dim, keep.nonzero().flatten().to(masks[path].device))
