"""Tied sets: units that are made of rows and columns of several leaves."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from sparsefn.engine.checks import check_int, described, shown
from sparsefn.engine.processes import check_plain
from sparsefn.engine.surroundings import at_compile_time, concrete
from sparsefn.patterns.kinds import Box, Pattern, Reduce, reduction
from sparsefn.patterns.units import Place, Units, units_of
from sparsefn.tree import Leaves


@described
def tied(members: Sequence[Sequence[str | int]], reduce: Reduce = "mean") -> Pattern:
    """Rows and columns of several leaves form one unit, and are kept or pruned together.

    >>> mlp = sf.tied([["*.up.weight", 0], ["*.up.bias", 0], ["*.down.weight", 1]])
    >>> params = {"0.up.weight": torch.tensor([[1.0], [3.0], [2.0]]), "0.up.bias": torch.zeros(3),
    ...           "0.down.weight": torch.tensor([[1.0, 1.0, 5.0]])}
    >>> algorithm = sf.one_shot(2 / 3, pattern=mlp)
    >>> algorithm.update(algorithm.init(params), params, 0).masks["0.down.weight"]
    tensor([[False, False,  True]])

    Each member is `[glob, dim]`: an index along that dimension of a leaf belongs to the unit of that number. Leaves
    in which the wildcards of the globs match the same text form one tied set: here the rows of `0.up.weight`, the
    entries of `0.up.bias` and the columns of `0.down.weight`. A text for which a member has no leaf makes no set. All
    units of a set compete. The set counts in budgets, as a leaf of that many rows, under the path of its first leaf.

    `[glob, dim, block]` makes a unit of `block` indices that follow one another, such as a head. With grouped queries
    a unit is a head of keys and values, and the heads of queries that read it:

    >>> width, readers = 4, 2
    >>> heads = sf.tied([["*.q_proj.weight", 0, readers * width], ["*.k_proj.weight", 0, width],
    ...                  ["*.v_proj.weight", 0, width], ["*.o_proj.weight", 1, readers * width]])

    `[glob, dim, block, parts]` is for a fused leaf: the dimension is as many equal parts one after the other, each
    with a block of every unit. The queries, keys and values of GPT-2 are `["*.c_attn.weight", 1, width, 3]`.

    A unit's score is that of all of its entries, pooled by `reduce` as in `sf.patterns.block`: members in their
    order, each row by row. Globs in `where` choose the sets of all leaves that they match; a function is asked about
    the first leaf of a set, and its answer is for the whole set. Only algorithms take it: a mask of one tensor has no
    other leaves. Where single entries are drawn or move between leaves (`snfs`, `redistribute`,
    `supermask("bernoulli")`) it is refused, as other patterns are. `sf.shrink(model, state, only=mlp)` removes the
    units that are pruned; of blocks and parts with `example=`.

    Raises TypeError for members of another form. `init` raises ValueError for a glob that no path matches, where no
    set has a leaf for each member, for a leaf in two sets, for members whose numbers of units differ, and for given
    masks that prune a unit in part (on the CPU, where values are read).
    """
    if isinstance(members, str) or not isinstance(members, Sequence):
        raise TypeError(f"tied: expected a list of members [glob, dim], got {shown(members)}")
    made = tuple(_member(member) for member in members)
    if not made:
        raise ValueError("tied: expected at least one member [glob, dim], got none")
    name = f"tied([{', '.join(shown(list(member)) for member in members)}], reduce={reduce!r})"

    def of_one_tensor(shape: Box) -> NoReturn:
        raise ValueError(f"{name}: its units lie in several leaves; give it to an algorithm, as pattern=")

    return Pattern(name, of_one_tensor, lambda grid: grid, reduction(reduce), members=made)


def _member(given: object) -> tuple[str, int, int, int]:
    wanted = f"tied: expected members such as ['*.up_proj.weight', 0], got {shown(given)}"
    if isinstance(given, str) or not isinstance(given, Sequence) or not 2 <= len(given) <= 4:
        raise TypeError(f"{wanted}: a glob, a dimension, and perhaps a block and the number of parts")
    if not isinstance(given[0], str):
        raise TypeError(f"{wanted}, whose first entry is no glob")
    check_int("tied", "the dimension of a member", given[1])
    for what, size in zip(("block", "parts"), given[2:], strict=False):
        check_int("tied", f"the {what} of a member", size, 1)
    glob, dim, block, parts = [*given, 1, 1][:4]
    return glob, dim, block, parts


@at_compile_time
def sets_of(globs: tuple[str, ...], paths: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The paths of each tied set that has one for every glob, in the order of the globs.

    >>> sets_of(("*.a", "*.b"), ("0.a", "0.b", "1.a"))
    (('0.a', '0.b'),)
    """
    by_stem = [{stem: path for path in paths if (stem := _stem(glob, path)) is not None} for glob in globs]
    return tuple(
        tuple(found[stem] for found in by_stem) for stem in by_stem[0] if all(stem in found for found in by_stem)
    )


def tied_sets(pattern: Pattern, leaves: Leaves) -> dict[str, Units]:
    """The units of each tied set of some leaves, by the path of its first leaf.

    >>> params = {"0.a": torch.ones(4, 2), "0.b": torch.ones(3, 4), "1.a": torch.ones(4, 2)}
    >>> {path: units.rows for path, units in tied_sets(sf.tied([["*.a", 0], ["*.b", 1]]), params).items()}
    {'0.a': (1, 4)}
    """
    made: dict[str, Units] = {}
    seen: dict[str, None] = {}
    for paths in sets_of(tuple(glob for glob, *_ in pattern.members), tuple(leaves)):
        places = [
            _place(path, tuple(leaves[path].shape), *m[1:]) for path, m in zip(paths, pattern.members, strict=True)
        ]
        first = places[0]
        for place in places:
            if place.path in seen:
                raise ValueError(f"tied: {place.path!r} is a member twice; expected each leaf in one place of one set")
            if place.units != first.units:
                a, b = (f"{p.path!r} of shape {p.shape} has {p.units} along dimension {p.dim}" for p in (first, place))
                raise ValueError(f"tied: expected members with the same number of units, but {a}, and {b}")
            seen[place.path] = None
        elements = sum(math.prod(place.shape) // max(place.units, 1) for place in places)
        of_rows = dataclasses.replace(pattern, unit=lambda shape: (1, max(shape[1], 1)), members=())
        made[first.path] = units_of(of_rows, (first.units, elements))._replace(places=tuple(places))
    for path in seen:
        check_plain(str(pattern), path, leaves[path])
    return made


def checked_sets(pattern: Pattern, paths: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The paths of each set; ValueError where a member matches no path, or no set has a leaf for each member.

    >>> checked_sets(sf.tied([["*.up.weight", 0]]), ["0.upp.weight", "1.bias"])
    Traceback (most recent call last):
        ...
    ValueError: tied: no path matches '*.up.weight'; the nearest are '0.upp.weight', '1.bias'
    """
    return _checked(tuple(glob for glob, *_ in pattern.members), tuple(paths))


@at_compile_time
def _checked(globs: tuple[str, ...], paths: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    stems = []
    for glob in globs:
        hits = [stem for path in paths if (stem := _stem(glob, path)) is not None]
        if not hits:
            near = difflib.get_close_matches(glob.replace("*", ""), paths, 3, 0.0)
            known = ", ".join(map(repr, near)) or "none"
            raise ValueError(f"tied: no path matches {glob!r}; the nearest are {known}")
        stems.append((glob, hits))
    if not (sets := sets_of(globs, paths)):
        known = "; ".join(f"{glob!r} has {', '.join(map(repr, map('|'.join, hits[:3])))}" for glob, hits in stems)
        raise ValueError(f"tied: expected globs whose wildcards match the same text in every member, but {known}")
    return sets


def joined(units: Units, leaves: Mapping[str, Tensor]) -> Tensor:
    """The entries of each unit of a tied set as a row: (units, entries of a unit).

    >>> leaves = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[3.0, 4.0]])}
    >>> joined(tied_sets(sf.tied([["a", 0], ["b", 1]]), leaves)["a"], leaves)
    tensor([[1., 3.],
            [2., 4.]])
    """
    rows = []
    for place in units.places:
        x, d = leaves[place.path], place.dim
        split = x.reshape(*x.shape[:d], place.parts, place.units, place.block, *x.shape[d + 1 :])
        rows.append(split.movedim(d + 1, 0).reshape(place.units, math.prod(place.shape) // max(place.units, 1)))
    return torch.cat([row.to(rows[0].device) for row in rows], 1)


def check_whole_units(pattern: Pattern, masks: Mapping[str, Tensor], leaves: Leaves) -> None:
    """Raise ValueError for given masks that prune a unit of a tied set in part.

    >>> masks = {"a": torch.tensor([[True], [False]]), "b": torch.tensor([[True, True]])}
    >>> check_whole_units(sf.tied([["a", 0], ["b", 1]]), masks, masks)
    Traceback (most recent call last):
        ...
    ValueError: tied: expected masks that prune whole units, but unit 1 of the set of 'a' is kept at 'b', pruned at 'a'

    Values are read where nothing hides them and that takes no waiting.
    """
    for first, units in tied_sets(pattern, leaves).items():
        some, every = [], []
        for place in units.places:
            rows = joined(units._replace(places=(place,)), {place.path: masks[place.path].expand(place.shape)})
            some.append(rows.any(1))
            every.append(rows.all(1))
        split = torch.stack(some).any(0) & ~torch.stack(every).all(0)
        if concrete(split.any()):
            unit, paths = int(split.nonzero()[0]), [place.path for place in units.places]
            kept = next(path for path, flags in zip(paths, some, strict=True) if flags[unit])
            gone = next(path for path, flags in zip(paths, every, strict=True) if not flags[unit])
            raise ValueError(
                f"tied: expected masks that prune whole units, but unit {unit} of the set of {first!r} is kept at "
                f"{kept!r}, pruned at {gone!r}"
            )


def parted(units: Units, kept: Tensor, like: Mapping[str, Tensor]) -> Leaves:
    """The masks of the leaves of a tied set, from the flags of its units.

    >>> leaves = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[3.0, 4.0]])}
    >>> parted(tied_sets(sf.tied([["a", 0], ["b", 1]]), leaves)["a"], torch.tensor([[True, False]]), leaves)["b"]
    tensor([[ True, False]])
    """
    masks = {}
    for place in units.places:
        if not math.prod(units.shape):  # leaves without entries
            masks[place.path] = like[place.path].new_zeros(place.shape, dtype=torch.bool)
            continue
        flags = place.along(kept).reshape([size if d == place.dim else 1 for d, size in enumerate(place.shape)])
        masks[place.path] = flags.expand(place.shape).contiguous().to(like[place.path].device)
    return masks


def _place(path: str, shape: Box, dim: int, block: int, parts: int) -> Place:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"tied: no dimension {dim} in shape {shape} at {path!r}")
    dim, run = dim % len(shape), block * parts
    if shape[dim] % run:
        times = f"{parts} parts of blocks of {block}" if parts > 1 else f"blocks of {block}"
        raise ValueError(f"tied: expected dimension {dim} divisible into {times}, got shape {shape} at {path!r}")
    return Place(path, shape, dim, shape[dim] // run, block, parts)


def _stem(glob: str, path: str) -> tuple[str, ...] | None:
    # What the wildcards of a glob match; None where it does not match. Each part is translated by fnmatch, whose
    # regular expressions are `(?s:...)` and an end; a part that is no wildcard is only escaped.
    parts = re.split(r"(\*|\?|\[!?\]?[^\]]*\])", glob)
    words = [(re.escape(part), fnmatch.translate(part)[4:-3]) for part in parts]
    hit = re.fullmatch("".join(word if word == plain else f"({word})" for plain, word in words), path, re.DOTALL)
    return None if hit is None else hit.groups()
