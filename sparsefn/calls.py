"""How a function can be called: errors at the door for another function, or another keyword, than was meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from sparsefn.types import Accumulated


def check_call(what: str, fn: Callable[..., Any], *arguments: str) -> None:
    """Raise TypeError unless it is a function that can be called with as many arguments as are named.

    >>> check_call("distribution", sf.budgets.erk(), "shapes", "sparsity")
    >>> check_call("distribution", sf.budgets.erk, "shapes", "sparsity")
    Traceback (most recent call last):
        ...
    TypeError: expected distribution to be a function of (shapes, sparsity), got erk, one of (power)

    A function whose signature Python does not know is not looked at, nor is any while compiling.
    """
    if torch.compiler.is_compiling() or _takes(fn, len(arguments)):
        return
    wanted = f"expected {what} to be a function of ({', '.join(arguments)})"
    if not callable(fn):
        raise TypeError(f"{wanted}, got {fn!r}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        name, own = getattr(fn, "__name__", type(fn).__name__), ", ".join(signature.parameters)
        raise TypeError(f"{wanted}, got {name}, one of ({own})") from None


def _takes(fn: Callable[..., Any], n: int) -> bool:
    # Whether n arguments are surely right, seen at a glance: algorithms are made anew at every step of an ensemble.
    fn = inspect.unwrap(fn)
    own = fn if isinstance(fn, FunctionType) else vars(type(fn)).get("__call__")
    if not isinstance(own, FunctionType) or own.__code__.co_kwonlyargcount:
        return False
    most = own.__code__.co_argcount - (own is not fn)
    least = most - len(own.__defaults__ or ())
    return least <= n and (n <= most or bool(own.__code__.co_flags & inspect.CO_VARARGS))


def check_keywords(given: Iterable[str], *makers: Any) -> None:
    """Raise TypeError for a keyword that no maker has: the first is named, and the keyword that is closest.

    >>> check_keywords(["drop_fractoin"], sf.rigl, sf.drop_grow)
    Traceback (most recent call last):
        ...
    TypeError: rigl() got an unexpected keyword argument 'drop_fractoin'; did you mean 'drop_fraction'?
    """
    if torch.compiler.is_compiling():
        return
    codes = [make.__code__ for make in makers]
    known = [name for c in codes for name in c.co_varnames[c.co_argcount : c.co_argcount + c.co_kwonlyargcount]]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"
            raise TypeError(f"{makers[0].__name__}() got an unexpected keyword argument {name!r}; {hint}")


def check_score(name: str, score: object) -> None:
    """Raise TypeError unless it is a score: a function of (state, grads, step), or one with memory.

    >>> check_score("drop", "magnitude")
    Traceback (most recent call last):
        ...
    TypeError: expected drop to be a score such as sf.scores.magnitude, got 'magnitude'
    """
    if isinstance(score, Accumulated):
        return
    if not callable(score):
        raise TypeError(f"expected {name} to be a score such as sf.scores.magnitude, got {score!r}")
    check_call(name, score, "state", "grads", "step")
