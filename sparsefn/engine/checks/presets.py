"""Presets: functions of this library that are another one with other defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from sparsefn.engine.checks.calls import check_keywords
from sparsefn.engine.checks.factories import described

_NAMES = ("__name__", "__qualname__", "__doc__")

P = ParamSpec("P")
Thing = TypeVar("Thing")


def preset(
    base: Callable[P, Thing], *, fixed: Mapping[str, Any] = {}, **defaults: Any
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
    """

    def decorate(text: Callable[[], None]) -> Callable[P, Thing]:
        whole = inspect.signature(base)
        shown = [
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in whole.parameters.items()
            if name not in fixed
        ]
        known = [parameter.name for parameter in shown]

        def make(*args: P.args, **given: P.kwargs) -> Thing:
            check_keywords(text.__name__, given, known)
            options: Any = {**defaults, **given, **fixed}
            return base(*args, **options)

        functools.update_wrapper(make, base)
        made: Any = functools.update_wrapper(make, text, ("__module__", *_NAMES))
        made.__wrapped__ = base
        made.__signature__ = whole.replace(parameters=shown)
        return described(make)

    return decorate
