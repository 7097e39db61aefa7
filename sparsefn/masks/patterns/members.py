"""The members of tied sets, as `sf.patterns.tied` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from sparsefn.core.checks import check_int, is_int, is_sequence, shown

# One of three: (glob, dim, block, parts); (glob, dim, the unit of each index, 1); and
# for a whole leaf (glob, None, its unit, how many units the set has).
Member: TypeAlias = tuple[str, int | None, int | tuple[int, ...], int]
# What users pass: a list of members, or a list of such lists.
Members: TypeAlias = Sequence[
    Sequence[str | int | Sequence[str | int | Sequence[int] | None] | None]
]


def family_of(given: Sequence[object]) -> tuple[Member, ...]:
    """The members of the sets that one list of members makes, checked.

    >>> family_of([["a", None, 0], ["b", None, 1]])
    (('a', None, 0, 2), ('b', None, 1, 2))

    Raises TypeError for members of another form, and ValueError for none, for a unit
    that has no whole leaf, and for whole leaves beside other members.
    """
    members = tuple(map(_member, given))
    if not members:
        raise ValueError("tied: expected at least one member [glob, dim], got none")
    units = [unit for _, dim, unit, _ in members if dim is None and is_int(unit)]
    if not units:
        return members
    if len(units) < len(members):
        other = next(glob for glob, dim, *_ in members if dim is not None)
        raise ValueError(
            "tied: expected all members of a set to be whole leaves, [glob, None, "
            f"unit], or none, got {other!r} beside whole ones"
        )
    count = max(units) + 1
    missing = set(range(count)).difference(units)
    if missing:
        raise ValueError(
            f"tied: expected whole leaves of each unit from 0 to {count - 1}, got none "
            f"of unit {min(missing)}"
        )
    return tuple([(glob, None, unit, count) for glob, _, unit, _ in members])


def _member(given: object) -> Member:
    wanted = (
        f"tied: expected members such as ['*.up_proj.weight', 0], got {shown(given)}"
    )
    if not is_sequence(given) or not 2 <= len(given) <= 4:
        raise TypeError(
            f"{wanted}: a glob, a dimension, and perhaps a block and the number of "
            "parts"
        )
    if not isinstance(given[0], str):
        raise TypeError(f"{wanted}, whose first entry is no glob")
    if given[1] is None:
        if len(given) != 3:
            raise TypeError(f"{wanted}: a whole leaf has one unit, ['*.bias', None, 0]")
        check_int("tied", "the unit of a whole leaf", given[2], 0)
        return given[0], None, given[2], 1
    check_int("tied", "the dimension of a member", given[1])
    if len(given) == 3 and is_sequence(given[2]):
        return given[0], given[1], _numbers(given[2]), 1
    for what, size in zip(("block", "parts"), given[2:], strict=False):
        check_int("tied", f"the {what} of a member", size, 1)
    glob, dim, block, parts = [*given, 1, 1][:4]
    return glob, dim, block, parts


def _numbers(given: Sequence[object]) -> tuple[int, ...]:
    # The unit of each index of a dimension.
    numbers = []
    for number in given:
        if not is_int(number) or number < -1:
            raise ValueError(
                "tied: expected unit numbers from 0 on, and -1 for none, got "
                f"{shown(number)}"
            )
        numbers.append(number)
    missing = set(range(max(numbers, default=-1) + 1)).difference(numbers)
    if missing or not any(number >= 0 for number in numbers):
        raise ValueError(
            "tied: expected each unit among unit numbers, got none of unit "
            f"{min(missing, default=0)}"
        )
    return tuple(numbers)
