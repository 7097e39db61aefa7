"""Plain data, as JSON gives it, read by name, with errors that list what is known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

T = TypeVar("T")


def listed(names: Collection[str]) -> str:
    """Names as an error lists them.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    return ", ".join(map(repr, names))


def named(what: str, name: object, table: Mapping[str, T]) -> T:
    """What a name, in upper or lower case, stands for.

    >>> named("the unit", "cm", {"mm": 0.001})
    Traceback (most recent call last):
        ...
    ValueError: expected the unit to be one of 'mm', got 'cm'
    """
    if not isinstance(name, str) or name.lower() not in table:
        raise ValueError(f"expected {what} to be one of {listed(table)}, got {name!r}")
    return table[name.lower()]


def check_keys(
    what: str,
    given: Collection[str],
    known: Collection[str],
    needed: Collection[str] = (),
) -> None:
    """Raise ValueError for a key that is not known, and where one is missing.

    >>> check_keys("a point", {"x": 1.0}, ["x", "y"], needed=["x", "y"])
    Traceback (most recent call last):
        ...
    ValueError: expected a point to have the key 'y', got 'x'
    """
    for name in given:
        if name not in known:
            raise ValueError(
                f"expected {what} to have keys among {listed(known)}, got {name!r}"
            )
    for name in needed:
        if name not in given:
            raise ValueError(
                f"expected {what} to have the key {name!r}, got "
                f"{listed(given) or 'none'}"
            )


def called(
    what: str,
    make: Callable[..., T],
    given: Mapping[str, object],
    **ours: object,
) -> T:
    """A function called with the keys of a dict as its arguments.

    Any error in them is a ValueError.

    >>> called("a point", lambda x, y: (x, y), {"x": 1}, y=2)
    (1, 2)
    """
    arguments = [
        p for p in inspect.signature(make).parameters.values() if p.name not in ours
    ]
    check_keys(
        what,
        given,
        [p.name for p in arguments],
        [p.name for p in arguments if p.default is p.empty],
    )
    try:
        return make(**given, **ours)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from None
