"""Groups of units: what a model's code ties together, and what stays, and why."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsefn.masks.budgets import UnitCosts
from sparsefn.masks.patterns import Pattern, tied
from sparsefn.nn.modules import computed_from, inner_module
from sparsefn.shrinking.analysis import (
    Analysis,
    analyse,
    has_shuffles,
    labels_of,
    without_shuffles,
)
from sparsefn.shrinking.channels import (
    CoupledChannels,
    Ids,
    factors_of,
    kinds_of,
    preferred_groups,
)
from sparsefn.shrinking.plan import (
    PruningPlan,
    cost,
    free,
    left_of,
    one_stays,
    terms_of,
)
from sparsefn.shrinking.trace import (
    Example,
    Parts,
    Trace,
    calls_of,
    matched,
    shapes_of,
    traced,
)
from sparsefn.typing import Reduce


class Member(NamedTuple):
    """Where the units of a group lie in one leaf: along `dim`, the unit of each index,
    -1 for none.
    """

    leaf: str
    dim: int
    units: npt.NDArray[np.int64]

    def tied(self) -> list[Any]:
        """The member as `sf.patterns.tied` takes it: [leaf, dim], with a block and
        parts, or with the units of all indices.
        """
        here = [self.leaf, self.dim]
        units = self.units
        count = int(units.max()) + 1
        (steps,) = np.nonzero(np.diff(units))
        block = len(units)
        if len(steps):
            block = int(steps[0]) + 1
        parts = len(units) // (block * count)
        blocks = np.repeat(np.arange(count), block)
        if not parts or not np.array_equal(units, np.tile(blocks, parts)):
            return [*here, units.tolist()]
        if parts > 1:
            return [*here, block, parts]
        if block > 1:
            return [*here, block]
        return here

    def __str__(self) -> str:
        _, _, *rest = self.tied()
        here = f"{self.leaf}[{self.dim}]"
        if not rest:
            return here
        if isinstance(rest[0], list):
            count = int((self.units >= 0).sum())
            return f"{here} ({count} of {len(self.units)})"
        parts = f" in {rest[1]} parts" if rest[1:] else ""
        return f"{here} (blocks of {rest[0]}{parts})"


class Group(NamedTuple):
    """Units that compete: each is kept or goes in all members at once."""

    size: int  # how many units
    members: tuple[Member, ...]
    entries: int  # of the parameters, for one unit on average
    # groups that multiply with it, such as heads and the entries of a head
    multiplies_with: frozenset[int]
    preferred: bool  # of the groups that multiply, `Groups.pattern` takes this

    def tied(self, parameters: Collection[str]) -> list[Any]:
        """The members that are parameters, as `sf.patterns.tied` takes them."""
        return [member.tied() for member in self.members if member.leaf in parameters]

    def scores(self, known: Mapping[str, Tensor]) -> Any:
        """The mean magnitude of the weights of each unit."""
        sums = np.zeros(self.size + 1)
        counts = np.zeros(self.size + 1)
        for leaf, dim, units in self.members:
            if leaf in known:
                x = known[leaf].detach().abs().double().movedim(dim, 0)
                rows = x.reshape(len(units), -1).cpu()
                np.add.at(sums, units, rows.sum(1).numpy())
                np.add.at(counts, units, rows.shape[1])
        # the last one is no unit's
        return sums[:-1] / np.maximum(counts[:-1], 1)

    def __str__(self) -> str:
        text = f"{self.size} units of {self.entries} weights: "
        text += ", ".join(map(str, self.members[:6]))
        more = len(self.members) - 6
        if more > 0:
            text += f" and {more} more"
        if self.multiplies_with:
            others = ", ".join(map(str, sorted(self.multiplies_with)))
            text += f"; multiplies with {others}"
        return text


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The groups of units of a model, and the reasons why other dimensions stay.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... ).eval()
    >>> groups = sf.shrinking.groups(net, torch.ones(1, 3))
    >>> groups[0].size, groups.stays["2.bias", 0], groups.masks({0: [1, 2]})["0.bias"]
    (4, 'it is an output of the model', tensor([ True, False, False,  True]))

    Attributes:
        groups: The groups by number. Of each, `size` is its number of units, `members`
            where they lie in the leaves, `entries` how many weights a unit has on
            average, `multiplies_with` the numbers of groups such as the entries of a
            head, and `preferred` says whether `pattern()` takes it.
        stays: By (name, dimension), why a dimension of a parameter cannot lose entries.
        analysis: What is known of the traced program.
        channels: By group, the channels of its units in the analysis.
        originals: Names of parameters that weights are computed from.
        trace: The program, with the shapes of the example; None for groups of
            submodules.
    """

    groups: tuple[Group, ...]
    stays: Mapping[tuple[str, int], str]
    analysis: Analysis = dataclasses.field(repr=False)
    channels: tuple[Ids, ...] = dataclasses.field(repr=False)
    # the parameters that weights are computed from
    originals: Set[str] = dataclasses.field(repr=False)
    # none where groups are of submodules
    trace: Trace | None = dataclasses.field(default=None, repr=False)

    def __getitem__(self, i: int) -> Group:
        return self.groups[i]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __str__(self) -> str:
        names: dict[str, list[str]] = defaultdict(list)
        for (leaf, dim), why in self.stays.items():
            if dim > 1 and why.endswith("mixes its entries"):  # places of a kernel
                continue
            names[why].append(f"{leaf}[{dim}]")
        lines = []
        for i, group in enumerate(self.groups):
            head, _, rest = str(group).partition(":")
            lines.append(f"{i}: {head} and {self._flops(i)} FLOPs:{rest}")
        if names:
            lines.append("stays:")
        for why, some in names.items():
            first = ", ".join(some[:4])
            more = f" and {len(some) - 4} more" if len(some) > 4 else ""
            lines.append(f"  {first}{more}: {why}")
        return "\n".join(lines)

    def _flops(self, i: int) -> int:
        # What the first unit of a group costs, with all other units in place.
        alive = np.ones(self.analysis.log.channels.count, bool)
        alive[self.channels[i][:1]] = False
        return self.cost(unit="flops") - cost(
            PruningPlan(self.analysis, alive), "flops"
        )

    def pattern(
        self, only: Sequence[int] | None = None, *, reduce: Reduce = "mean"
    ) -> Pattern:
        """The pattern for algorithms that prune units of these groups.

        Args:
            only: Numbers of the groups to prune. Default: all but those that multiply
                with another one that is pruned: heads rather than the entries of a head
                (heads of queries where these read one head of keys), entries of a
                convolution's groups rather than groups.
            reduce: How the scores of a unit's entries become its score, as in
                `sf.patterns.tied`.

        Returns:
            An `sf.patterns.tied` pattern of the groups, each named by its first leaf.

        Raises:
            TypeError: `only` is no sequence, or a number is not an int.
            ValueError: There is no group to prune, or none of such a number.
        """
        chosen = self._chosen(only)
        if not chosen:
            raise ValueError(
                "groups: expected groups of units to prune, got none of the model's "
                f"{len(self)}"
            )
        parameters = _parameters(self.analysis)
        sets = []
        for i in chosen:
            sets.append(self._group(i).tied(parameters))
        return tied(sets, reduce)

    def _chosen(self, only: Sequence[int] | None) -> list[int]:
        if only is not None:
            if isinstance(only, str) or not isinstance(only, Iterable):
                raise TypeError(
                    "groups: expected only to be a sequence of numbers of groups, got "
                    f"{only!r}"
                )
            return list(only)
        return [i for i, group in enumerate(self.groups) if group.preferred]

    def _group(self, i: int) -> Group:
        if not isinstance(i, SupportsIndex):
            raise TypeError(
                f"groups: expected the number of a group to be an int, got {i!r}"
            )
        if not 0 <= i < len(self.groups):
            raise ValueError(
                f"groups: expected numbers of the model's {len(self)} groups, from 0, "
                f"got {i}"
            )
        return self.groups[i]

    def cut(self, gone: Mapping[int, Sequence[int]]) -> PruningPlan:
        """What is left of the program without some units.

        Args:
            gone: The units that go, by number of the group.

        Returns:
            The pruning plan, with what goes because of them; one index of each
            dimension stays.

        Raises:
            ValueError: There is no such group or unit, or all units of a group go.
        """
        alive = np.ones(self.analysis.log.channels.count, bool)
        for i, units in gone.items():
            size = self._group(i).size
            wrong = [unit for unit in units if not 0 <= unit < size]
            if wrong:
                raise ValueError(
                    f"groups: expected units of group {i} from 0 to {size - 1}, got "
                    f"{wrong}"
                )
            if len(set(units)) >= size:
                raise ValueError(
                    f"groups: expected at least one unit of group {i} to stay, but "
                    f"all {size} go"
                )
            alive[self.channels[i][list(units)]] = False
        return one_stays(PruningPlan(self.analysis, alive))

    def masks(self, gone: Mapping[int, Sequence[int]]) -> dict[str, Tensor]:
        """The masks of all parameters without some units.

        Args:
            gone: The units that go, by number of the group.

        Returns:
            Bool tensors on the CPU by name, of the shape of the parameter, or 0-d True
            for one that a weight is computed from, which loses nothing.

        Raises:
            ValueError: There is no such group or unit, or all units of a group go.
        """
        plan = self.cut(gone)
        parameters = _parameters(self.analysis)
        masks = {}
        for name in self.analysis.leaves:
            if name not in parameters:
                continue
            if name in self.originals:
                masks[name] = torch.tensor(True, device="cpu")
            else:
                masks[name] = plan.mask(name)
        return masks

    def cost(
        self,
        gone: Mapping[int, Sequence[int]] | None = None,
        unit: str = "params",
        *,
        bits: int | None = None,
        compressed: bool = False,
    ) -> int:
        """What the model costs without some units.

        Args:
            gone: The units that go, by number of the group. Default: none.
            unit: "params", "flops" of one call on the example, or "bytes" of the
                parameters.
            bits: For bytes, how many bits each weight has. Default: as its dtype has.
            compressed: For bytes, whether to add a bit for each weight of the leaves
                that may lose units.

        Returns:
            The exact number.

        Raises:
            TypeError: `bits` is no int.
            ValueError: `unit` is another one, `bits` is below 1, `bits` or `compressed`
                is given for another unit than bytes, or units are as `cut` refuses.
        """
        return cost(self.cut(gone or {}), unit, bits=bits, compressed=compressed)

    def priced(
        self,
        unit: str,
        bits: int | None,
        compressed: bool,
        only: Sequence[int] | None,
    ) -> UnitCosts:
        """The cost by numbers of kept units, for `sf.budgets.within`.

        Args:
            unit: As for `cost`.
            bits: As for `cost`.
            compressed: As for `cost`.
            only: As for `pattern`.

        Returns:
            The costs by the sets of `pattern(only)`. They are exact wherever the units
            of a group are alike. Where they are not, such as a channel that a
            concatenation repeats, it is the most that any choice of so many units
            costs.
        """
        names = self._set_names(only)
        terms = terms_of(self.analysis, unit, bits, compressed)
        sizes = [self.groups[i].size for i in names.values()]
        channels = [self.channels[i] for i in names.values()]
        left = left_of(self.analysis, channels, terms.labels)

        def cost(kept: Sequence[int]) -> int:
            return terms.value(left(kept))

        def scores() -> dict[str, Any]:
            known = dict(self.analysis.graph.named_parameters())
            return {name: self.groups[i].scores(known) for name, i in names.items()}

        return UnitCosts(dict(zip(names, sizes, strict=True)), cost, scores)

    def _set_names(self, only: Sequence[int] | None) -> dict[str, int]:
        # The numbers of the groups in a pattern, by the names of their sets in budgets.
        known = self.analysis.parameters
        names: dict[str, int] = {}
        for i in self._chosen(only):
            leaves = [member.leaf for member in self._group(i).members]
            first = next(leaf for leaf in leaves if leaf in known)
            name = first
            number = 1
            while name in names:
                name = f"{first}:{number}"
                number += 1
            names[name] = i
        return names

    def alive(self, masks: Mapping[str, Tensor]) -> list[Tensor]:
        """Which units stay under some masks: all but those that can go with equal
        outputs.

        Args:
            masks: Masks of all parameters by name: bool tensors of their shapes, or
                0-d for a dense one.

        Returns:
            For each group a bool tensor of its units, on the CPU.

        Raises:
            ValueError: A mask is missing, unknown or of another shape.
        """
        shapes = {name: tuple(x.shape) for name, x in self.analysis.parameters.items()}
        missing = sorted(_parameters(self.analysis) - masks.keys())
        unknown = sorted(masks.keys() - shapes.keys())
        if missing or unknown:
            raise ValueError(
                f"groups: expected masks of the parameters, but missing are {missing} "
                f"and unknown {unknown}"
            )
        for name, mask in masks.items():
            if mask.ndim and tuple(mask.shape) != shapes[name]:
                raise ValueError(
                    f"groups: expected mask of shape {shapes[name]} at {name!r}, got "
                    f"{tuple(mask.shape)}"
                )
        graph = self.analysis.graph
        log = self.analysis.log
        analysis = analyse(
            graph, masks, counted=log.counted, equal_parts=log.equal_parts
        )
        found = free(analysis)
        kept = []
        for group in self.groups:
            first = group.members[0]
            label = found.analysis.leaves[first.leaf].labels[first.dim]
            stays = np.zeros(group.size + 1, bool)
            here = found.kept(label, len(first.units))
            np.logical_or.at(stays, first.units, here)
            kept.append(torch.from_numpy(stays[: group.size]))
        return kept


def groups(
    model: nn.Module,
    example: Example,
    *,
    only: str | Sequence[str] | None = None,
    counted: bool = False,
    equal_parts: bool = True,
) -> Groups:
    """The groups of units of a model, from one analysis of its traced program.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... ).eval()
    >>> print(sf.shrinking.groups(net, torch.ones(1, 3)))
    0: 4 units of 6 weights and 10 FLOPs: 0.weight[0], 0.bias[0], 2.weight[1]
    stays:
      0.weight[1]: joined with what stays by linear at '0'
      2.weight[0], 2.bias[0]: it is an output of the model

    Args:
        model: The module, which does not change. One on the meta device is analysed
            there.
        example: What the model is called with: a tensor, a tuple of arguments or a dict
            of keyword arguments.
        only: Globs of submodules, for a model that `torch.export` cannot trace, or a
            part of one. The groups are each submodule's by itself, as the model calls
            it the first time on the example, under the names that their leaves have in
            the model. Algorithms then run on all params of the model. Costs in
            parameters and bytes are of the model, FLOPs of the submodules. Give
            `sf.shrink` the same `only`.
        counted: Whether norms and means may lose entries that are 0, and go on dividing
            by the old number, so that residual widths can be pruned.
        equal_parts: Whether the parts of a chunk, and the groups of channels that a
            shuffle mixes, lose the same entries. The code of the model itself often
            does not allow others, but its traced program does.

    Returns:
        The groups. Their `stays` says of each dimension that cannot lose entries which
        operation is the reason, or that a layer computes its weight, as weight norm
        does: then the units stay.

    Raises:
        TypeError: `example` is of another type, or `only` is no glob.
        ValueError: The model does not run on the example, `torch.export` cannot trace
            it, or it is in train mode and computes otherwise in eval mode. A glob of
            `only` matches no submodule, or one that shares a parameter with the rest,
            or that the model does not call.

    A group is a set of units that compete; each lies along dimensions of several
    tensors and goes from all of them at once, and then the outputs equal the outputs of
    the model with these entries at 0. `Groups.pattern()` is the pattern for algorithms,
    and `sf.shrink` removes what they prune: sooner with `groups=`, as the model is then
    traced once.
    """
    own = inner_module(model)
    if only is not None:
        globs = [only] if isinstance(only, str) else only
        paths = matched(own, globs)
        calls = calls_of(own, paths, example)
        own = Parts(own, paths)
        example = tuple([calls[path] for path in paths])
    graph = traced(own, example, dynamic=False)
    shuffled = not equal_parts and has_shuffles(graph)
    if shuffled:
        graphs = [without_shuffles(graph), graph]
    else:
        graphs = [graph]
    found = [analyse(one, counted=counted, equal_parts=equal_parts) for one in graphs]
    best = found[0]
    if shuffled:
        best = min(found, key=lambda analysis: cost(free(analysis)))
    made = groups_in(best, originals_in(own))
    if only is not None:
        return made
    return dataclasses.replace(made, trace=Trace(graph, shapes_of(example)))


def originals_in(model: nn.Module) -> dict[str, str]:
    """By path of a parameter that a layer computes its weight from: why it stays.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 1))
    >>> list(originals_in(layer))
    ['parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    found = {}
    for path, _ in model.named_parameters(remove_duplicate=False):
        computed = computed_from(model, path)
        if computed is not None:
            found[path] = computed.dense()
    return found


def groups_in(analysis: Analysis, originals: Mapping[str, str]) -> Groups:
    """The groups of an analysis, without the parameters that weights are computed from:
    these get no masks.
    """
    channels = analysis.log.channels
    for name in analysis.leaves.keys() & originals.keys():
        for label in analysis.leaves[name].labels:
            channels.freeze(label, originals[name])
    parameters = _parameters(analysis)
    labels = {}
    of_parameters = []
    for name, value in analysis.leaves.items():
        if value.name != name:  # a second name
            continue
        for d, label in enumerate(value.labels):
            if label is None:
                continue
            labels[name, d] = label
            if name in parameters:
                of_parameters.append(label)
    kinds = kinds_of(channels, of_parameters)
    order = np.argsort(kinds, kind="stable")
    ends = np.bincount(kinds).cumsum()
    units = np.split(order, ends)[1:-1]
    number = np.zeros(channels.count, np.int64)
    for own in units:
        number[own] = np.arange(len(own))
    made: list[list[Member]] = [[] for _ in units]
    weights = [0.0] * len(units)
    lie = dict[int, dict[int, Ids]]()
    for (name, d), label in labels.items():
        if id(label) not in lie:
            rows = kinds[label]
            lie[id(label)] = {}
            for kind in np.unique(rows[rows > 0]).tolist():
                unit = np.where(rows == kind, number[label], -1)
                lie[id(label)][kind - 1] = unit.max(1)
        for i, own in lie[id(label)].items():
            made[i].append(Member(name, d, own))
            if name in parameters:
                share = np.count_nonzero(own >= 0) / len(own)
                weights[i] += math.prod(analysis.leaves[name].shape) * share
    multiplies_with = factors_of(labels_of(analysis), kinds)
    preferred = preferred_groups(channels, units, weights, multiplies_with)
    groups = []
    for i, own in enumerate(units):
        entries = round(weights[i] / len(own))
        others = frozenset(multiplies_with[i])
        groups.append(Group(len(own), tuple(made[i]), entries, others, i in preferred))
    stays = _stays(channels, labels, parameters)
    return Groups(tuple(groups), stays, analysis, tuple(units), originals.keys())


def _parameters(analysis: Analysis) -> set[str]:
    # Each parameter that the program reads once, under its first name.
    read = {value.name for value in analysis.leaves.values()}
    return {name for name in analysis.parameters if name in read}


def _stays(
    channels: CoupledChannels,
    labels: Mapping[tuple[str, int], Any],
    parameters: Set[str],
) -> dict[tuple[str, int], str]:
    made = {}
    for (name, d), label in labels.items():
        reasons = np.bincount(channels.reason[label].ravel(), minlength=2)
        if name in parameters and not reasons[0]:
            reasons[1] = 0  # of what fills up
            why = channels.reasons[reasons.argmax()]
            made[name, d] = why or "it is joined with what stays"
    return made
