"""What a program costs, exactly: parameters, FLOPs or bytes, as sums of products of the
sizes of its dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from sparsefn.shrinking.analysis import Analysis, Cut
from sparsefn.shrinking.atoms import Atoms, Ids, Label
from sparsefn.shrinking.values import Dims, Value, blank

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
    cut: Cut,
    unit: str = "params",
    *,
    bits: int | None = None,
    compressed: bool = False,
) -> int:
    """What is left of a program after a cut, in parameters, FLOPs or bytes, as
    `Groups.cost` counts them.
    """
    terms = terms_of(cut.analysis, unit, bits, compressed)
    return terms.value([int(cut.kept(label).sum()) for label in terms.labels])


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
    if key not in analysis.book.known:
        check_unit(unit, bits, compressed)
        if unit == "flops":
            found = [(2, product.dims) for product in analysis.book.products]
        else:
            found = list(_sizes(analysis, unit, bits, compressed))
        analysis.book.known[key] = _collected(
            analysis, found, 8 if unit == "bytes" else 1
        )
    made: Terms = analysis.book.known[key]
    return made


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
) -> Iterable[tuple[int, Dims]]:
    for value, x in parameters(analysis).values():
        dims = (value or blank(x)).dims
        if unit == "bytes":
            per = bits or 8 * x.dtype.itemsize
        else:
            per = 1
        yield per, dims
        atoms = analysis.book.atoms
        if compressed and any(atoms.free(label) is not None for _, label in dims):
            bytes_of_mask = -(-x.numel() // 8)
            yield 8 * bytes_of_mask, ()


def _collected(
    analysis: Analysis, found: Iterable[tuple[int, Dims]], per: int
) -> Terms:
    given = list(found)
    every = (label for _, dims in given for _, label in dims)
    places = _places(every, analysis.book.atoms)
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


def distinct(values: Iterable[Value], atoms: Atoms) -> list[Ids]:
    """The labels of values whose indices may go, each once, without the atoms that
    stay.
    """
    every = (label for value in values for label in value.labels)
    found: dict[int, Ids] = {}
    for place, label in _places(every, atoms).values():
        if label is not None:
            found[place] = label
    return list(found.values())


def _places(labels: Iterable[Label], atoms: Atoms) -> dict[int, tuple[int, Label]]:
    # By id: the number of what a label is without the atoms that stay, and that.
    places: dict[int, tuple[int, Label]] = {}
    known: dict[object, tuple[int, Ids]] = {}
    for label in labels:
        if label is not None and id(label) not in places:
            free = atoms.free(label)
            places[id(label)] = (-1, None)
            if free is not None:
                key = (free.shape, free.tobytes())
                places[id(label)] = known.setdefault(key, (len(known), free))
    return places
