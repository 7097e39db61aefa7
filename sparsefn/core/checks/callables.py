"""Checks of functions among the arguments: how they are called, unknown keywords."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType

import torch

from sparsefn.core.checks.factories import shown, uncalled


def check_call(what: str, fn: Callable[..., object], *arguments: str) -> None:
    """Raise TypeError unless it is a function that can be called with as many arguments
    as are named.

    >>> check_call("distribution", sf.budgets.erk(), "shapes", "sparsity")
    >>> check_call("distribution", sf.budgets.erk, "shapes", "sparsity")
    Traceback (most recent call last):
        ...
    TypeError: expected distribution to be a function of (shapes, sparsity), got erk
    itself; call it: erk()

    A function whose signature Python does not know is not looked at, nor is any while
    compiling.
    """
    if torch.compiler.is_compiling():
        return
    wanted = f"expected {what} to be a function of ({', '.join(arguments)})"
    words = uncalled(fn)
    if words:
        raise TypeError(f"{wanted}, got {words}")
    if _takes(fn, len(arguments)):
        return
    if not callable(fn):
        raise TypeError(f"{wanted}, got {fn!r}")
    try:
        signature = inspect.signature(_inner(fn), follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(fn, "__name__", None) or shown(fn)
        own = ", ".join(signature.parameters)
        raise TypeError(f"{wanted}, got {name}, one of ({own})") from None


def _takes(fn: Callable[..., object], n: int) -> bool:
    # Whether n arguments are surely right, seen at a glance: algorithms are made
    # again at every step of an ensemble.
    fn = _inner(fn)
    if isinstance(fn, FunctionType):
        own = fn
    else:
        own = vars(type(fn)).get("__call__")
    if not isinstance(own, FunctionType) or own.__code__.co_kwonlyargcount:
        return False
    most = own.__code__.co_argcount - (own is not fn)
    least = most - len(own.__defaults__ or ())
    return least <= n and (
        n <= most or bool(own.__code__.co_flags & inspect.CO_VARARGS)
    )


def _inner(fn: Callable[..., object]) -> Callable[..., object]:
    # The function that wrappers call in the end. A wrapper without `*args` has
    # arguments of its own and is not followed.
    while hasattr(fn, "__wrapped__") and not (
        isinstance(fn, FunctionType) and not fn.__code__.co_flags & inspect.CO_VARARGS
    ):
        fn = fn.__wrapped__
    return fn


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword, and name the closest known one.

    >>> check_keywords("rigl", ["drop_fractoin"], ["drop", "drop_fraction"])
    Traceback (most recent call last):
        ...
    TypeError: rigl() got an unexpected keyword argument 'drop_fractoin'; did you mean
    'drop_fraction'?
    """
    if torch.compiler.is_compiling():
        return
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            if close:
                hint = f"did you mean {close[0]!r}?"
            else:
                hint = f"expected one of {', '.join(known)}"
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}; {hint}"
            )
