"""Presets: functions of this library that are another one with other defaults."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from sparsefn.core.checks.callables import check_keywords
from sparsefn.core.checks.factories import described, shown

_NAMES = ("__name__", "__qualname__", "__doc__")

P = ParamSpec("P")
Thing = TypeVar("Thing")


def preset(
    base: Callable[P, Thing],
    *,
    fixed: Mapping[str, Any] = {},
    renamed: Mapping[str, Callable[[Any], dict[str, Any]]] = {},
    **defaults: Any,
) -> Callable[[Callable[[], None]], Callable[P, Thing]]:
    """A function that is `base` with other defaults; what it decorates has a docstring
    alone.

    >>> def draw(shape, *, color="black", width=1):
    ...     return lambda: f"{shape} in {color}, {width} wide"
    >>> @preset(draw, color="red", fixed={"width": 2})
    ... def outline():
    ...     "A red outline."
    >>> outline("circle"), outline("circle")()
    (outline('circle'), 'circle in red, 2 wide')

    The arguments that are `fixed` cannot be given:

    >>> import inspect
    >>> print(inspect.signature(outline))
    (shape, *, color='red')

    The keywords that are `renamed` are from an older release: each gives the
    keywords to write now, and a DeprecationWarning. They are not in the signature;
    `keywords_of` has them.
    """

    def decorate(text: Callable[[], None]) -> Callable[P, Thing]:
        whole = inspect.signature(base)
        parameters = [
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in whole.parameters.items()
            if name not in fixed
        ]
        known = [parameter.name for parameter in parameters]

        def make(*args: P.args, **given: P.kwargs) -> Thing:
            new = _translated(text.__name__, given, renamed)
            check_keywords(text.__name__, new, known)
            options: Any = {**defaults, **new, **fixed}
            return base(*args, **options)

        functools.update_wrapper(make, base)
        made: Any = functools.update_wrapper(make, text, ("__module__", *_NAMES))
        made.__wrapped__ = base
        made.renamed_keywords = tuple(renamed)
        made.__signature__ = whole.replace(parameters=parameters)
        return described(make)

    return decorate


def keywords_of(make: Callable[..., object]) -> list[str]:
    """The names of a function's arguments, but for **kwargs; of a preset also the
    names of an older release.

    >>> keywords_of(lambda shape, *, color="black": shape)
    ['shape', 'color']
    """
    named = [
        p.name
        for p in inspect.signature(make).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    return [*named, *getattr(make, "renamed_keywords", ())]


def _translated(
    name: str,
    given: Mapping[str, Any],
    renamed: Mapping[str, Callable[[Any], dict[str, Any]]],
) -> dict[str, Any]:
    new = dict(given)
    for old in given.keys() & renamed.keys():
        own = renamed[old](new.pop(old))
        both = own.keys() & new.keys()
        if both:
            raise TypeError(f"{name}: expected {old} or {min(both)}, got both")
        written = ", ".join(
            f"{keyword}={shown(value)}" for keyword, value in own.items()
        )
        text = f"{name}({old}=) goes: write {written}" if own else f"leave {old} out"
        warnings.warn(text, DeprecationWarning, stacklevel=4)
        new |= own
    return new
