"""What a function promises beside what it returns, such as another way to the same bits, told where it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sparsefn.engine.described import Described

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)


def promising(fn: Function, **promises: object) -> Function:
    """The function itself, which says these things of itself; `promised` reads them.

    >>> from sparsefn.engine.promises import promised, promising
    >>> promised(promising(lambda x: abs(x), signed=float), "signed")
    <class 'float'>
    """
    # `functools.wraps` copies attributes to functions of other code, and these keep no promise of this one.
    vars(fn).update(promises, promised_by=fn.__code__)
    return fn


def own_code(fn: Function) -> Function:
    """The function itself, with a copy of its code: the compiler makes 8 graphs of one code at most.

    >>> from sparsefn.engine.promises import own_code
    >>> first, second = (own_code(lambda: i) for i in range(2))
    >>> first.__code__ is second.__code__
    False
    """
    if not torch.compiler.is_compiling():
        named: Any = fn
        named.__code__ = named.__code__.replace()
    return fn


def promised(fn: Callable[..., Any], name: str) -> Any:
    """What a function promises under a name; None for one that does not, and for one that wraps another.

    >>> import functools
    >>> from sparsefn.engine.promises import promised, promising
    >>> magnitude = promising(lambda x: abs(x), signed=float)
    >>> promised(functools.wraps(magnitude)(lambda x: -abs(x)), "signed")
    """
    own = fn.__wrapped__ if isinstance(fn, Described) else fn
    if getattr(own, "promised_by", None) is not getattr(own, "__code__", own):
        return None
    return getattr(own, name, None)


def forgetting(name: str, *changed: str) -> Callable[[Kind], Kind]:
    """Mark a named tuple whose `_replace` of a function clears the field that is another way of that function.

    >>> from typing import Any, NamedTuple
    >>> from sparsefn.engine.promises import forgetting
    >>> Pair = forgetting("fast", "slow")(NamedTuple("Pair", [("slow", Any), ("fast", Any)]))
    >>> Pair(1, 2)._replace(slow=3), Pair(1, 2)._replace(slow=3, fast=4)
    (Pair(slow=3, fast=None), Pair(slow=3, fast=4))
    """

    def mark(cls: Kind) -> Kind:
        replace = cls._replace  # type: ignore[attr-defined]

        def _replace(self: object, **fields: object) -> object:
            return replace(self, **({name: None} if any(field in fields for field in changed) else {}) | fields)

        setattr(cls, "_replace", _replace)  # noqa: B010 (types know of no such name)
        return cls

    return mark
