"""Which atoms stay, and what that makes of labels, tensors and sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn.shrinking.analysis import Analysis, labels_of
from sparsefn.shrinking.atoms import Flags, Ids, Label
from sparsefn.shrinking.values import Value


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A program of which some atoms go."""

    analysis: Analysis
    alive: Flags  # by atom
    known: dict[int, tuple[Ids, Flags, Tensor | None]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def kept(self, label: Label, size: int = 0) -> Flags:
        """Which indices of a dimension stay; of one without label all of them."""
        return np.ones(size, bool) if label is None else self._places(label)[1]

    def _places(self, label: Ids) -> tuple[Ids, Flags, Tensor | None]:
        # The indices that stay, as flags and as numbers (None: all), known by id of the
        # label, which is held.
        if id(label) not in self.known:
            keep = np.asarray(
                self.alive[self.analysis.book.atoms.resolve(label)].all(1)
            )
            self.known[id(label)] = (
                label,
                keep,
                None if keep.all() else torch.from_numpy(keep).nonzero().flatten(),
            )
        return self.known[id(label)]

    def loses(self, value: Value) -> bool:
        """Whether any dimension loses indices."""
        return any(
            label is not None and self._places(label)[2] is not None
            for label in value.labels
        )

    def size(self, value: Value) -> list[int]:
        """The shape of a tensor after the cut."""
        return [int(keep.sum()) for keep in map(self.kept, value.labels, value.shape)]

    def indices(self, name: str) -> tuple[Tensor | None, ...]:
        """Of a leaf the indices that stay along each dimension; None: all."""
        value = self.analysis.leaves.get(name)
        labels = () if value is None else value.labels
        return tuple(
            None if label is None else self._places(label)[2] for label in labels
        )

    def take(self, name: str, x: Tensor) -> Tensor:
        """A leaf without the entries that go, in memory of its own."""
        return taken(x, self.indices(name))

    def mask(self, name: str) -> Tensor:
        """The mask of a leaf: an entry stays if its index along every dimension
        does.
        """
        value = self.analysis.leaves[name]
        made = torch.ones(value.shape, dtype=torch.bool, device="cpu")
        for d, keep in enumerate(map(self.kept, value.labels, value.shape)):
            if not keep.all():
                made &= torch.from_numpy(keep).reshape(
                    [-1 if e == d else 1 for e in range(made.ndim)]
                )
        return made


def taken(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """The entries of a tensor at indices along each dimension (None: all), in memory of
    their own.

    >>> taken(torch.tensor([[1, 2], [3, 4]]), (None, torch.tensor([1])))
    tensor([[2],
            [4]])
    """
    made = x.detach()
    for d, some in enumerate(indices):
        made = made if some is None else made.index_select(d, some.to(x.device))
    return made.clone() if all(some is None for some in indices) else made


def free(analysis: Analysis) -> Cut:
    """Without any atom that may go; but one index of each dimension stays."""
    atoms = analysis.book.atoms
    return one_stays(Cut(analysis, atoms.reason[: atoms.count] > 0))


def one_stays(cut: Cut) -> Cut:
    """A cut that leaves the first index of a dimension all of whose indices would
    go.
    """
    alive = cut.alive.copy()
    for label in labels_of(cut.analysis):
        if not alive[label].all(1).any():
            alive[label[:1]] = True
    return Cut(cut.analysis, alive)


def folded_biases(cut: Cut, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases that take in what constants give whose inputs go, in float64: a proof
    sees no rounding of theirs.
    """
    made: dict[str, Tensor] = {}
    for fold in cut.analysis.book.folds:
        gone = ~cut.kept(fold.label)
        constants = np.where(gone & np.isfinite(fold.constants), fold.constants, 0.0)
        if constants.any():
            groups, _, inputs = fold.weights.shape
            shift = (
                (fold.weights * constants.reshape(groups, 1, inputs)).sum(2).reshape(-1)
            )
            bias = made.get(fold.bias, params[fold.bias])
            made[fold.bias] = bias.double() + torch.from_numpy(shift).to(bias.device)
    return made
