"""Named tuples with a field that is another way of one of their functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def forgetting(name: str, *changed: str) -> Callable[[Kind], Kind]:
    """Mark a named tuple whose `_replace` of a function clears the field that is
    another way of that function.

    >>> from typing import Any, NamedTuple
    >>> from sparsefn.engine.checks.records import forgetting
    >>> Pair = forgetting("fast", "slow")(
    ...     NamedTuple("Pair", [("slow", Any), ("fast", Any)])
    ... )
    >>> Pair(1, 2)._replace(slow=3), Pair(1, 2)._replace(slow=3, fast=4)
    (Pair(slow=3, fast=None), Pair(slow=3, fast=4))
    """

    def mark(cls: Kind) -> Kind:
        replace = cls._replace  # type: ignore[attr-defined]

        def _replace(self: object, **fields: object) -> object:
            return replace(
                self,
                **({name: None} if any(field in fields for field in changed) else {})
                | fields,
            )

        setattr(cls, "_replace", _replace)  # noqa: B010 (types know of no such name)
        return cls

    return mark
