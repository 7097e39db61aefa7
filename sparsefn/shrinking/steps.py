"""One operation of a traced program, as the rules of the analysis see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from sparsefn.shrinking.atoms import Atoms, Flags, Label
from sparsefn.shrinking.values import Value, replaced, values_in


@dataclasses.dataclass
class Book:
    """What the analysis of one program writes down."""

    atoms: Atoms
    counted: (
        bool  # norms and means may lose entries that are 0, and go on counting them
    )
    equal_parts: bool  # the parts of a chunk lose the same entries
    # of parameters by name; None: whatever goes is masked wherever it lies
    masks: Mapping[str, Tensor] | None
    # of grouped convolutions and norms
    groups: dict[fx.Node, Label] = dataclasses.field(default_factory=dict)
    folds: list[Fold] = dataclasses.field(default_factory=list)
    # by operation and shapes: layers repeat
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Inputs of a layer that are constant: where they go, its bias takes in what the
    weights make of them.
    """

    bias: str
    weights: npt.NDArray[np.float64]  # (groups, outputs, inputs)
    constants: npt.NDArray[np.float64]  # of all inputs, NaN where they vary
    label: Label


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation with its arguments by name: Values stand for tensors, and numbers
    for symbolic sizes.
    """

    node: fx.Node
    name: str
    where: str
    arguments: dict[str, Any]
    outs: Any
    book: Book
    splits: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def atoms(self) -> Atoms:
        return self.book.atoms

    @property
    def shown(self) -> str:
        """The arguments, without tensors."""
        return repr(replaced(self.arguments, ["x"] * len(values_in(self.arguments))))

    @property
    def is_symbolic(self) -> bool:
        """Whether an argument is a number that depends on the sizes of inputs."""
        return any(
            isinstance(n.meta.get("val"), torch.SymInt)
            for n in self.node.all_input_nodes
        )

    def join(self, *labels: Label) -> Label:
        """The label of dimensions whose indices stay or go together."""
        for other in labels[1:]:
            self.atoms.join(labels[0], other, f"joined with what stays by {self.where}")
        return labels[0] if all(label is not None for label in labels) else None

    def sums(self, label: Label, zero: Flags) -> None:
        """The operation sums over a dimension: indices stay that are not 0 where they
        go.
        """
        self.freeze(label, "sums over it, and it is not 0 where it is masked", ~zero)

    def mixes(self, *values: Value) -> None:
        """All indices of these tensors stay."""
        for label in (label for value in values for label in value.labels):
            self.freeze(label, "mixes its entries")

    def freeze(self, label: Label, why: str, which: Flags | None = None) -> None:
        """These indices stay, because the operation does this."""
        self.atoms.freeze(label, f"{self.where} {why}", which)
