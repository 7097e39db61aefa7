"""A pruning plan: which channels of a program go, what stays of each tensor, and what
the program then costs: parameters, FLOPs or bytes, exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from sparsefn.masks.budgets import UnitCosts
from sparsefn.shrinking.analysis import Analysis, analyse, labels_of
from sparsefn.shrinking.channels import ChannelMap, CoupledChannels, Flags, Ids
from sparsefn.shrinking.trace import Example, traced
from sparsefn.shrinking.values import (
    Dims,
    Value,
    blank,
    values_in,
)


@dataclasses.dataclass(frozen=True, eq=False)
class PruningPlan:
    """Which channels of a program go, and what is left of its tensors."""

    analysis: Analysis
    alive: Flags  # by channel
    known: dict[int, tuple[Ids, Flags, Tensor | None]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def kept(self, label: ChannelMap, size: int = 0) -> Flags:
        """Which indices of a dimension stay; of one without label all of them."""
        if label is None:
            return np.ones(size, bool)
        return self._places(label)[1]

    def _places(self, label: Ids) -> tuple[Ids, Flags, Tensor | None]:
        # The indices that stay, as flags and as numbers (None: all), known by id of the
        # label, which is held.
        if id(label) not in self.known:
            channels = self.analysis.log.channels.resolve(label)
            keep = np.asarray(self.alive[channels].all(1))
            places = None
            if not keep.all():
                places = torch.from_numpy(keep).nonzero().flatten()
            self.known[id(label)] = (label, keep, places)
        return self.known[id(label)]

    def _numbers(self, label: ChannelMap) -> Tensor | None:
        if label is None:
            return None
        return self._places(label)[2]

    def loses(self, value: Value) -> bool:
        """Whether any dimension loses indices."""
        return any(self._numbers(label) is not None for label in value.labels)

    def size(self, value: Value) -> list[int]:
        """The shape of what is left of a tensor."""
        return [int(keep.sum()) for keep in map(self.kept, value.labels, value.shape)]

    def indices(self, name: str) -> tuple[Tensor | None, ...]:
        """Of a leaf the indices that stay along each dimension; None: all."""
        value = self.analysis.leaves.get(name)
        if value is None:
            return ()
        return tuple(map(self._numbers, value.labels))

    def take(self, name: str, x: Tensor) -> Tensor:
        """A leaf without the entries that go, in memory of its own."""
        return taken(x, self.indices(name))

    def mask(self, name: str) -> Tensor:
        """The mask of a leaf: an entry stays if all of its indices do."""
        value = self.analysis.leaves[name]
        made = torch.ones(value.shape, dtype=torch.bool, device="cpu")
        for d, keep in enumerate(map(self.kept, value.labels, value.shape)):
            if not keep.all():
                later = [1] * (made.ndim - d - 1)
                made &= torch.from_numpy(keep).reshape(-1, *later)
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
        if some is not None:
            made = made.index_select(d, some.to(x.device))
    if all(some is None for some in indices):
        return made.clone()
    return made


def free(analysis: Analysis) -> PruningPlan:
    """The plan by which every channel goes that may; but one index of each dimension
    stays.
    """
    channels = analysis.log.channels
    stays = channels.reason[: channels.count] > 0
    return one_stays(PruningPlan(analysis, stays))


def one_stays(plan: PruningPlan) -> PruningPlan:
    """A plan that leaves the first index of a dimension whose indices would all go."""
    alive = plan.alive.copy()
    for label in labels_of(plan.analysis):
        if not alive[label].all(1).any():
            alive[label[:1]] = True
    return PruningPlan(plan.analysis, alive)


def folded_biases(plan: PruningPlan, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases that take in what constants give whose inputs go, in float64: a proof
    sees no rounding of the biases.
    """
    made: dict[str, Tensor] = {}
    for fold in plan.analysis.log.folds:
        gone = ~plan.kept(fold.label)
        known = gone & np.isfinite(fold.constants)
        constants = np.where(known, fold.constants, 0.0)
        if constants.any():
            groups, _, inputs = fold.weights.shape
            shift = (
                (fold.weights * constants.reshape(groups, 1, inputs)).sum(2).reshape(-1)
            )
            bias = made.get(fold.bias, params[fold.bias])
            taken_in = torch.from_numpy(shift).to(bias.device)
            made[fold.bias] = bias.double() + taken_in
    return made


UNITS = ("params", "flops", "bytes")


class Terms(NamedTuple):
    """A cost as a sum: a constant, and for each term a factor times the sizes of
    dimensions, by their places.
    """

    constant: int
    terms: tuple[tuple[int, tuple[int, ...]], ...]
    labels: tuple[Ids, ...]
    per: int  # how many of what is added up make one, rounded up

    def value(self, sizes: Sequence[int]) -> int:
        """The cost with these sizes of the dimensions."""
        total = self.constant
        for factor, at in self.terms:
            for place in at:
                factor *= sizes[place]
            total += factor
        return -(-total // self.per)


def cost(
    plan: PruningPlan,
    unit: str = "params",
    *,
    bits: int | None = None,
    compressed: bool = False,
) -> int:
    """What is left of a program, in parameters, FLOPs or bytes, as
    `Groups.cost` counts them.
    """
    terms = terms_of(plan.analysis, unit, bits, compressed)
    return terms.value([int(plan.kept(label).sum()) for label in terms.labels])


def terms_of(
    analysis: Analysis,
    unit: str,
    bits: int | None = None,
    compressed: bool = False,
) -> Terms:
    """The cost of a program as a function of its dimensions; worked out once.

    ValueError for another unit, and for bits or compression of what is not counted in
    bytes.
    """
    key = ("costs", unit, bits, compressed)
    if key not in analysis.log.known:
        check_unit(unit, bits, compressed)
        found = [(n, dims) for _, n, dims in summands(analysis, unit, bits, compressed)]
        per = 8 if unit == "bytes" else 1
        analysis.log.known[key] = collected(analysis, found, per)
    made: Terms = analysis.log.known[key]
    return made


def summands(
    analysis: Analysis,
    unit: str,
    bits: int | None = None,
    compressed: bool = False,
) -> Iterator[tuple[fx.Node | str, int, Dims]]:
    """What a cost adds up: the product or parameter that each summand is of, a factor,
    and the dimensions whose sizes it is multiplied with; bytes in bits.
    """
    if unit == "flops":
        for product in analysis.log.products:
            yield product.node, 2, product.dims
    else:
        yield from _sizes(analysis, unit, bits, compressed)


def check_unit(unit: object, bits: int | None, compressed: bool) -> None:
    """Raise ValueError for a unit of costs that there is not."""
    if unit not in UNITS:
        raise ValueError(
            f"expected unit to be 'params', 'flops' or 'bytes', got {unit!r}"
        )
    if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool)):
        raise TypeError(
            f"within: expected bits to be an int, got {type(bits).__name__}"
        )
    if bits is not None and bits < 1:
        raise ValueError(f"within: expected bits >= 1, got {bits}")
    if unit != "bytes" and (bits is not None or compressed):
        raise ValueError(
            f"bits= and compressed= are for unit='bytes', got unit={unit!r}"
        )


def parameters(analysis: Analysis) -> dict[str, tuple[Value | None, Tensor]]:
    """Each parameter once, under its first name.

    It has its Value where the program reads it.
    """
    known = {}
    for name, x in analysis.parameters.items():
        if name in analysis.leaves:
            known[id(x)] = analysis.leaves[name]
    found: dict[str, tuple[Value | None, Tensor]] = {}
    for name, x in analysis.graph.named_parameters():
        found[name] = (known.get(id(x)), x)
    return found


def _sizes(
    analysis: Analysis, unit: str, bits: int | None, compressed: bool
) -> Iterator[tuple[str, int, Dims]]:
    for name, (value, x) in parameters(analysis).items():
        dims = (value or blank(x)).dims
        if unit == "bytes":
            per = bits or 8 * x.dtype.itemsize
        else:
            per = 1
        yield name, per, dims
        channels = analysis.log.channels
        if compressed and any(channels.free(label) is not None for _, label in dims):
            bytes_of_mask = -(-x.numel() // 8)
            yield name, 8 * bytes_of_mask, ()


def collected(
    analysis: Analysis, found: Iterable[tuple[int, Dims]], per: int = 1
) -> Terms:
    """The sum of factors times sizes of dimensions, rounded up to whole `per`."""
    given = list(found)
    every = (label for _, dims in given for _, label in dims)
    places = _places(every, analysis.log.channels)
    labels: list[Ids] = []
    constant = 0
    terms = dict[tuple[int, ...], int]()
    for factor, dims in given:
        at = []
        for size, label in dims:
            free = None
            if label is not None:
                place, free = places[id(label)]
            if free is None:
                factor *= size
                continue
            at.append(place)
            if place == len(labels):
                labels.append(free)
        if at:
            key = tuple(sorted(at))
            terms[key] = terms.get(key, 0) + factor
        else:
            constant += factor
    factors = tuple((factor, at) for at, factor in terms.items())
    return Terms(constant, factors, tuple(labels), per)


def distinct(values: Iterable[Value], channels: CoupledChannels) -> list[Ids]:
    """The labels of values whose indices may go, each once, without the channels that
    stay.
    """
    every = (label for value in values for label in value.labels)
    found: dict[int, Ids] = {}
    for place, label in _places(every, channels).values():
        if label is not None:
            found[place] = label
    return list(found.values())


def _places(
    labels: Iterable[ChannelMap], channels: CoupledChannels
) -> dict[int, tuple[int, ChannelMap]]:
    # By id: the number of what a label is without the channels that stay, and that.
    places: dict[int, tuple[int, ChannelMap]] = {}
    known: dict[object, tuple[int, Ids]] = {}
    for label in labels:
        if label is not None and id(label) not in places:
            free = channels.free(label)
            places[id(label)] = (-1, None)
            if free is not None:
                key = (free.shape, free.tobytes())
                places[id(label)] = known.setdefault(key, (len(known), free))
    return places


Scores = npt.NDArray[np.float64]


class AlikeIndices(NamedTuple):
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
) -> tuple[int, list[AlikeIndices]]:
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
            AlikeIndices(
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
    # by channel: up to how many chosen units that may come about
    saved: dict[int, int] = {}
    values = values_in([analysis.leaves, list(analysis.values.values())])
    for label in distinct(values, analysis.log.channels):
        fixed, pieces = pieces_of(label, group, sizes)
        if fixed or any(piece.covers for piece in pieces):
            continue
        first = label[0]
        for channel in first[group[first] >= 0].tolist():
            g = int(group[channel])
            alone = [piece for piece in pieces if piece.groups == ((g, 1),)]
            here = max([piece.choices for piece in alone], default=0)
            saved[channel] = max(saved.get(channel, 0), sizes[g] - here)
    made = []
    for g, size in enumerate(sizes):
        limits = [n for channel, n in saved.items() if group[channel] == g]
        chosen = np.arange(size + 1)
        saves = np.array(limits, np.int64) >= chosen[:, None]
        counts = np.maximum.accumulate(chosen + saves.sum(1))
        made.append(np.minimum(counts, size).tolist())
    return made


def left_of(
    analysis: Analysis, units: Sequence[Ids], labels: Sequence[Ids]
) -> Callable[[Sequence[int]], list[int]]:
    """How many indices of dimensions are left, at most, by how many units of each group
    are kept; `units` are the channels of each group.
    """
    group = np.full(analysis.log.channels.count, -1)
    for i, own in enumerate(units):
        group[own] = i
    sizes = [len(own) for own in units]
    pieces = [pieces_of(label, group, sizes) for label in labels]
    most = most_kept(analysis, group, sizes)

    def left(kept: Sequence[int]) -> list[int]:
        kept = [row[n] for row, n in zip(most, kept, strict=True)]
        lengths = []
        for fixed, some in pieces:
            free_ones = sum(piece.count(kept) for piece in some)
            lengths.append(fixed + free_ones)
        return lengths

    return left


class Weights(NamedTuple):
    """The parameters of a model, for `sf.budgets.within` with single weights.

    Attributes:
        leaves: The parameters, by path.
        products: For each product of the model, its FLOPs and the parameters that are
            a factor of it.
    """

    leaves: Mapping[str, Tensor]
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
        if only is not None:
            raise ValueError(
                "within: expected no only for sf.shrinking.weights, which have no "
                f"groups, got only={only!r}; choose leaves with where"
            )
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

    Args:
        model: The module, which does not change.
        example: What the model is called with: a tensor, a tuple of arguments or a dict
            of keyword arguments.

    Returns:
        The model for `sf.budgets.within`.

    Raises:
        TypeError: `example` is of another type.
        ValueError: The model does not run on the example, `torch.export` cannot trace
            it, or it is in train mode and computes otherwise in eval mode.

    A weight of a product costs 2 FLOPs for each position at which it is used, as in
    `sf.report.flops`; a product with a part of a parameter, or with a tensor that is
    computed from one, costs what it does dense.
    """
    analysis = analyse(traced(model, example, dynamic=False))
    leaves = dict(analysis.graph.named_parameters())
    first = {id(x): name for name, x in leaves.items()}
    names = {name: first[id(x)] for name, x in analysis.parameters.items()}
    found = []
    for p in analysis.log.products:
        factors = tuple(names[leaf] for leaf in p.leaves if leaf in names)
        found.append((p.flops, factors))
    return Weights(leaves, tuple(found))
