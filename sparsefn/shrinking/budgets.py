"""How many indices of dimensions stay by how many units of groups are kept, and what a
model costs by how many single weights are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from sparsefn.masks.budgets import UnitCosts
from sparsefn.shrinking.analysis import Analysis, analyse
from sparsefn.shrinking.atoms import Ids
from sparsefn.shrinking.costs import (
    check_unit,
    distinct,
)
from sparsefn.shrinking.trace import Example, traced
from sparsefn.shrinking.values import values_in

Scores = npt.NDArray[np.float64]


class Priceable(NamedTuple):
    """Indices of a dimension that are alike: each stays where these units of these
    groups all stay.
    """

    groups: tuple[tuple[int, int], ...]  # a group, and how many of its units
    choices: int  # how many choices of units have indices
    # whether they all have some, so that one stays as long as each group has a unit
    covers: bool
    times: int  # how many indices a choice has, at most
    total: int  # how many indices in all
    # of one group, by how many of its units stay, where units have unequal numbers of
    # indices
    most: Ids | None

    def count(self, kept: Sequence[int]) -> int:
        """How many of them stay, at most; exactly where units are alike."""
        if self.most is not None:
            return int(self.most[kept[self.groups[0][0]]])
        return min(
            self.times * math.prod(math.comb(kept[g], n) for g, n in self.groups),
            self.total,
        )


def pieces_of(
    label: Ids, group: Ids, sizes: Sequence[int]
) -> tuple[int, list[Priceable]]:
    # How many indices of a dimension always stay, and the other indices.
    rows = np.where(group[label] >= 0, label, 0)
    rows, counts = np.unique(np.sort(rows, 1), axis=0, return_counts=True)
    owners = np.where(rows > 0, group[rows], -1)
    owners = np.sort(owners, 1)
    kinds, which = np.unique(owners, axis=0, return_inverse=True)
    fixed = 0
    pieces = []
    for k, kind in enumerate(kinds.tolist()):
        here = counts[which.reshape(-1) == k]
        groups = tuple((g, kind.count(g)) for g in dict.fromkeys(kind) if g >= 0)
        if not groups:
            fixed += int(here.sum())
            continue
        all_choices = math.prod(math.comb(sizes[g], n) for g, n in groups)
        most = None
        alike = len(here) == all_choices and here.min() == here.max()
        if groups[0][1] == len(groups) == 1 and not alike:
            largest_first = np.sort(here)[::-1]
            each = np.pad(largest_first, (0, all_choices - len(here)))
            most = np.concatenate([[0], np.cumsum(each)])
        covers = len(here) == all_choices and all(n == 1 for _, n in groups)
        pieces.append(
            Priceable(
                groups,
                len(here),
                covers,
                int(here.max()),
                int(here.sum()),
                most,
            )
        )
    return fixed, pieces


def most_kept(analysis: Analysis, group: Ids, sizes: Sequence[int]) -> list[list[int]]:
    # How many units stay where so many are chosen, at most: a dimension whose units
    # would all go keeps its first index.
    # by atom: up to how many chosen units that may come about
    saved: dict[int, int] = {}
    values = values_in([analysis.leaves, list(analysis.values.values())])
    for label in distinct(values, analysis.book.atoms):
        fixed, pieces = pieces_of(label, group, sizes)
        if fixed or any(piece.covers for piece in pieces):
            continue
        first = label[0]
        for atom in first[group[first] >= 0].tolist():
            g = int(group[atom])
            alone = [piece for piece in pieces if piece.groups == ((g, 1),)]
            here = max([piece.choices for piece in alone], default=0)
            saved[atom] = max(saved.get(atom, 0), sizes[g] - here)
    made = []
    for g, size in enumerate(sizes):
        limits = [n for atom, n in saved.items() if group[atom] == g]
        chosen = np.arange(size + 1)
        saves = np.array(limits, np.int64) >= chosen[:, None]
        counts = np.maximum.accumulate(chosen + saves.sum(1))
        made.append(np.minimum(counts, size).tolist())
    return made


class Weights(NamedTuple):
    """The parameters of a model, for `sf.budgets.within` with single weights."""

    leaves: Mapping[str, Tensor]
    # FLOPs, and the parameters that are a factor
    products: tuple[tuple[int, tuple[str, ...]], ...]

    def priced(
        self,
        unit: str,
        bits: int | None,
        compressed: bool,
        only: Sequence[int] | None,
    ) -> UnitCosts:
        """The cost of the model by how many weights of each parameter are not zero."""
        check_unit(unit, bits, compressed)
        if unit == "bytes" and not compressed:
            raise ValueError(
                "weights that are zero take as many bytes as others: say "
                "compressed=True"
            )
        sizes = {name: x.numel() for name, x in self.leaves.items()}
        place = {name: i for i, name in enumerate(sizes)}
        numbers = list(sizes.values())
        widths = [bits or 8 * x.dtype.itemsize for x in self.leaves.values()]
        work = []
        for full, names in self.products:
            work.append((full, [place[name] for name in names]))

        def cost(kept: Sequence[int]) -> int:
            if unit == "flops":
                flops = 0
                for full, at in work:
                    thinned = [full * kept[i] // max(numbers[i], 1) for i in at]
                    flops += min([full, *thinned])
                return flops
            if unit == "params":
                return sum(kept)
            weighted = sum(n * width for n, width in zip(kept, widths, strict=True))
            return -(-weighted // 8)

        def scores() -> dict[str, Scores]:
            made = {}
            for name, x in self.leaves.items():
                size = x.detach().abs().double().cpu()
                made[name] = size.numpy().reshape(-1)
            return made

        masks = dict.fromkeys(sizes, 0)
        if unit == "bytes":
            masks = {name: -(-n // 8) for name, n in sizes.items()}
        return UnitCosts(sizes, cost, scores, masks)


def weights(model: nn.Module, example: Example) -> Weights:
    """The parameters of a model as single weights, for `sf.budgets.within`.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2)
    ... ).eval()
    >>> budget = sf.budgets.within(
    ...     800, sf.shrinking.weights(net, torch.ones(1, 1, 6, 6)), "flops"
    ... )
    >>> budget({"0.weight": (4, 1, 3, 3), "2.weight": (2, 64)}, 1.0)
    {'0.weight': 20, '2.weight': 80}

    A weight of a product costs 2 FLOPs for each position at which it is used, as in
    `sf.report.flops`; a product with a part of a parameter, or with a tensor that is
    computed from one, costs what it does dense. Raises what `sf.shrinking.groups`
    raises for an example that the model does not run on.
    """
    analysis = analyse(traced(model, example, dynamic=False))
    leaves = dict(analysis.graph.named_parameters())
    first = {id(x): name for name, x in leaves.items()}
    names = {name: first[id(x)] for name, x in analysis.parameters.items()}
    found = []
    for p in analysis.book.products:
        factors = tuple(names[leaf] for leaf in p.leaves if leaf in names)
        found.append((p.flops, factors))
    return Weights(leaves, tuple(found))
