"""Groups of units: what a model's code ties together, and what stays, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsefn.budgets.filling import Priced
from sparsefn.modules.wrappers import unwrapped
from sparsefn.patterns.kinds import Pattern, Reduce
from sparsefn.patterns.tied import tied
from sparsefn.shrinking.analysis import Analysis, analyse
from sparsefn.shrinking.costs import cost
from sparsefn.shrinking.cut import Cut, free, one_stays
from sparsefn.shrinking.priced import priced
from sparsefn.shrinking.traced import Example, traced
from sparsefn.shrinking.values import Value, values_in


class Member(NamedTuple):
    """Where the units of a group lie in one leaf: along `dim`, the unit of each index, -1 for none."""

    leaf: str
    dim: int
    units: npt.NDArray[np.int64]

    def tied(self) -> list[Any]:
        """The member as `sf.tied` takes it: [leaf, dim], with a block and parts, or with the units of all indices."""
        units, count = self.units, int(self.units.max()) + 1
        steps = np.nonzero(np.diff(units))[0]
        block = int(steps[0]) + 1 if len(steps) else len(units)
        parts = len(units) // (block * count)
        if parts and np.array_equal(units, np.tile(np.repeat(np.arange(count), block), parts)):
            return [self.leaf, self.dim, block, parts][: 4 if parts > 1 else 3 if block > 1 else 2]
        return [self.leaf, self.dim, units.tolist()]

    def __str__(self) -> str:
        _, _, *rest = self.tied()
        here = f"{self.leaf}[{self.dim}]"
        if not rest:
            return here
        if isinstance(rest[0], list):
            return f"{here} ({int((self.units >= 0).sum())} of {len(self.units)})"
        return f"{here} (blocks of {rest[0]}{f' in {rest[1]} parts' if rest[1:] else ''})"


class Group(NamedTuple):
    """Units that compete: each is kept or goes in all members at once."""

    size: int  # how many units
    members: tuple[Member, ...]
    entries: int  # of the parameters, for one unit on average
    beside: frozenset[int]  # groups that multiply with it, such as heads and the entries of a head
    preferred: bool  # of the groups that multiply, the one that `Groups.pattern` takes

    def __str__(self) -> str:
        members = ", ".join(map(str, self.members[:6])) + (
            f" and {len(self.members) - 6} more" * (len(self.members) > 6)
        )
        beside = f"; multiplies with {', '.join(map(str, sorted(self.beside)))}" if self.beside else ""
        return f"{self.size} units of {self.entries} weights: {members}{beside}"


@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Sequence[Group]):
    """The groups of units of a model, and for dimensions of parameters that cannot lose entries the reason."""

    groups: tuple[Group, ...]
    stays: Mapping[tuple[str, int], str]
    analysis: Analysis = dataclasses.field(repr=False)
    atoms: tuple[npt.NDArray[np.int64], ...] = dataclasses.field(repr=False)

    def __getitem__(self, i: Any) -> Any:
        return self.groups[i]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __str__(self) -> str:
        names: dict[str, list[str]] = defaultdict(list)
        for (leaf, dim), why in self.stays.items():
            names[why].append(f"{leaf}[{dim}]")
        heads = (str(group).partition(":") for group in self.groups)
        lines = [f"{i}: {head} and {self._flops(i)} FLOPs:{rest}" for i, (head, _, rest) in enumerate(heads)]
        lines += ["stays:"] * bool(names)
        for why, some in names.items():
            more = f" and {len(some) - 4} more" if len(some) > 4 else ""
            lines.append(f"  {', '.join(some[:4])}{more}: {why}")
        return "\n".join(lines)

    def _flops(self, i: int) -> int:
        # What the first unit of a group costs, with all others in place.
        alive = np.ones(self.analysis.book.atoms.count, bool)
        alive[self.atoms[i][:1]] = False
        return self.cost(unit="flops") - cost(Cut(self.analysis, alive), "flops")

    def pattern(self, only: Sequence[int] | None = None, *, reduce: Reduce = "mean") -> Pattern:
        """The pattern for algorithms: every group is a tied set, named by its first leaf.

        `only` are the numbers of the groups to prune; of groups that multiply with each other all but one are left
        out by default: heads rather than the entries of a head, entries of a convolution's groups rather than groups.
        """
        chosen = [i for i, group in enumerate(self.groups) if group.preferred] if only is None else list(only)
        if not chosen:
            raise ValueError(f"groups: expected groups of units to prune, got none of the model's {len(self)}")
        parameters = {name for name, value in self.analysis.leaves.items() if _is_parameter(self.analysis, name)}
        sets = [[m.tied() for m in self._group(i).members if m.leaf in parameters] for i in chosen]
        return tied(sets, reduce)

    def _group(self, i: int) -> Group:
        if not 0 <= i < len(self.groups):
            raise ValueError(f"groups: expected numbers of the model's {len(self)} groups, from 0, got {i}")
        return self.groups[i]

    def cut(self, gone: Mapping[int, Sequence[int]]) -> Cut:
        """The program without these units, by number of the group."""
        alive = np.ones(self.analysis.book.atoms.count, bool)
        for i, units in gone.items():
            size = self._group(i).size
            if wrong := [unit for unit in units if not 0 <= unit < size]:
                raise ValueError(f"groups: expected units of group {i} from 0 to {size - 1}, got {wrong}")
            if len(set(units)) >= size:
                raise ValueError(f"groups: expected at least one unit of group {i} to stay, but all {size} go")
            alive[self.atoms[i][list(units)]] = False
        return one_stays(Cut(self.analysis, alive))

    def masks(self, gone: Mapping[int, Sequence[int]]) -> dict[str, Tensor]:
        """The masks of all parameters without these units, by number of the group."""
        cut, made = self.cut(gone), {}
        for name, value in self.analysis.leaves.items():
            if _is_parameter(self.analysis, name):
                made[name] = torch.ones(value.shape, dtype=torch.bool)
                for d, label in enumerate(value.labels):
                    kept = torch.from_numpy(cut.kept(label, value.shape[d]))
                    made[name] &= kept.reshape([-1 if e == d else 1 for e in range(len(value.shape))])
        return made

    def cost(self, gone: Mapping[int, Sequence[int]] | None = None, unit: str = "params", **how: Any) -> int:
        """What the model costs without these units: its parameters, FLOPs or bytes (`bits=`, `compressed=`)."""
        return cost(self.cut(gone or {}), unit, **how)

    def priced(self, unit: str, bits: int | None, compressed: bool, only: Sequence[int] | None) -> Priced:
        """The cost by kept units, for `sf.budgets.within`."""
        return priced(self, unit, bits, compressed, only)

    def alive(self, masks: Mapping[str, Tensor]) -> list[Tensor]:
        """For each group which of its units stay under these masks: all but those that can go with equal outputs."""
        book = self.analysis.book
        shapes = {n: value.shape for n, value in self.analysis.leaves.items() if _is_parameter(self.analysis, n)}
        if masks.keys() != shapes.keys():
            missing, unknown = sorted(shapes.keys() - masks.keys()), sorted(masks.keys() - shapes.keys())
            raise ValueError(
                f"groups: expected masks of the model's parameters, but missing are {missing} and unknown {unknown}"
            )
        for name, mask in masks.items():
            if mask.ndim and tuple(mask.shape) != shapes[name]:
                raise ValueError(
                    f"groups: expected a mask of shape {shapes[name]} at {name!r}, got {tuple(mask.shape)}"
                )
        found = free(analyse(self.analysis.graph, masks, counted=book.counted, equal_parts=book.equal_parts))
        kept = []
        for group in self.groups:
            first = group.members[0]
            label = found.analysis.leaves[first.leaf].labels[first.dim]
            stays = np.zeros(group.size + 1, bool)
            np.logical_or.at(stays, first.units, found.kept(label, len(first.units)))
            kept.append(torch.from_numpy(stays[: group.size]))
        return kept


def groups(model: nn.Module, example: Example, *, counted: bool = False, equal_parts: bool = True) -> Groups:
    """The groups of units of a model, from one analysis of its traced program.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    >>> print(sf.shrinking.groups(net, torch.ones(1, 3)))
    0: 4 units of 6 weights and 10 FLOPs: 0.weight[0], 0.bias[0], 2.weight[1]
    stays:
      0.weight[1]: joined with what stays by linear at '0'
      2.weight[0], 2.bias[0]: it is an output of the model
    """
    graph = traced(unwrapped(model), example, dynamic=False)
    return grouped(analyse(graph, counted=counted, equal_parts=equal_parts))


def grouped(analysis: Analysis) -> Groups:
    """The groups of an analysis."""
    atoms, parameters = analysis.book.atoms, []
    labels: dict[tuple[str, int], Any] = {}
    for name, value in analysis.leaves.items():
        if value.name != name:  # a second name of a tensor
            continue
        parameters += [name] if _is_parameter(analysis, name) else []
        labels |= {(name, d): atoms.resolve(label) for d, label in enumerate(value.labels) if label is not None}
    kinds = _alike(analysis, labels)
    units = [np.nonzero(kinds == kind)[0] for kind in range(1, int(kinds.max()) + 1)]
    beside = _beside(analysis, kinds)
    made, weights = [], []
    for own in units:
        number = np.full(atoms.count, -1)
        number[own] = np.arange(len(own))
        members = []
        for (name, d), label in labels.items():
            at = number[label].max(1, initial=-1)
            if (at >= 0).any():
                members.append(Member(name, d, at))
        entries = sum(
            float(np.prod(analysis.leaves[m.leaf].shape)) * float((m.units >= 0).mean())
            for m in members
            if m.leaf in parameters
        )
        made.append(members)
        weights.append(entries)
    preferred = _preferred(units, weights, beside, atoms.rank)
    groups = [
        Group(len(own), tuple(members), round(weight / len(own)), frozenset(beside[i]), i in preferred)
        for i, (own, members, weight) in enumerate(zip(units, made, weights, strict=True))
    ]
    stays = _stays(analysis, labels, parameters)
    return Groups(tuple(groups), stays, analysis, tuple(units))


def _is_parameter(analysis: Analysis, name: str) -> bool:
    return isinstance(dict(analysis.graph.named_parameters()).get(name), nn.Parameter)


def _alike(analysis: Analysis, labels: Mapping[tuple[str, int], Any]) -> npt.NDArray[np.int64]:
    # A number from 1 for atoms that lie in the same dimensions of leaves, as the same factors; 0 for others.
    atoms = analysis.book.atoms
    kinds = np.zeros(atoms.count, np.int64)
    place = 0
    for (name, _), label in labels.items():
        if not _is_parameter(analysis, name):
            continue
        for column in label.T:
            place += 1
            here = np.unique(column[atoms.reason[column] == 0])
            pairs = np.unique(kinds[here], return_inverse=True)[1]
            kinds[here] = int(kinds.max()) + 1 + pairs
    used, numbers = np.unique(kinds, return_inverse=True)
    first = {int(k): int(np.nonzero(kinds == k)[0][0]) for k in used if k}
    order = {k: i + 1 for i, k in enumerate(sorted(first, key=lambda k: first[k]))}
    return np.array([order.get(int(k), 0) for k in used])[numbers]


def _beside(analysis: Analysis, kinds: npt.NDArray[np.int64]) -> dict[int, set[int]]:
    # Which groups are factors of one product.
    beside: dict[int, set[int]] = defaultdict(set)
    for value in values_in([analysis.leaves, list(analysis.values.values())]):
        for label in value.labels:
            if label is None:
                continue
            rows = kinds[analysis.book.atoms.resolve(label)]
            if rows.shape[1] > 1:
                for row in np.unique(rows, axis=0).tolist():
                    some = {k - 1 for k in row if k}
                    for k in some:
                        beside[k] |= some - {k}
    return beside


def _preferred(units: Any, weights: Any, beside: Mapping[int, set[int]], rank: Any) -> set[int]:
    taken: set[int] = set()
    for i in sorted(range(len(units)), key=lambda i: (rank[units[i][0]], -weights[i])):
        if not beside[i] & taken and len(units[i]) > 1:
            taken.add(i)
    return taken


def _stays(
    analysis: Analysis, labels: Mapping[tuple[str, int], Any], parameters: Sequence[str]
) -> dict[tuple[str, int], str]:
    atoms, made = analysis.book.atoms, {}
    for (name, d), label in labels.items():
        if name in parameters and atoms.free(label) is None:
            reasons = Counter(atoms.reasons[i] for i in atoms.reason[label].ravel() if i > 1)
            made[name, d] = reasons.most_common(1)[0][0] if reasons else "it is joined with what stays"
    return made


__all__ = ["Group", "Groups", "Member", "Value", "grouped", "groups"]
