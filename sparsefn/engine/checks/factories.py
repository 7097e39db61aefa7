"""Reprs and pickles of objects that a factory made: the call that made them."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, ParamSpec, SupportsIndex, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

P = ParamSpec("P")
Made = TypeVar("Made")

_MOST = 4  # numbers of a tensor that are shown: a key has two
# The fewest digits that tell a number from its neighbours of that dtype.
_BRIEF: dict[torch.dtype, Callable[[float], str]] = {
    torch.float16: lambda number: str(np.float16(number)),
    torch.bfloat16: lambda number: str(np.float32(number)),
    torch.float32: lambda number: str(np.float32(number)),
}


class Call(NamedTuple):
    """A call of a factory.

    >>> Call(sf.every, (10,), {"start": 5})
    every(10, start=5)
    """

    make: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}  # never written to

    def __repr__(self) -> str:
        parts = [
            *map(shown, self.args),
            *(f"{name}={shown(value)}" for name, value in self.kwargs.items()),
        ]
        return f"{self.make.__name__}({', '.join(parts)})"

    def arguments(self) -> dict[str, Any]:
        """Every argument by name, those that were left out with their defaults."""
        bound = inspect.signature(self.make).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments


class FromCall:
    """The base of objects that know the call which made them.

    A changed copy does not know it.

    >>> rigl = sf.rigl(0.9)
    >>> isinstance(rigl, FromCall), isinstance(rigl._replace(within=None), FromCall)
    (True, False)
    """

    def __repr__(self) -> str:
        return repr(vars(self)["_call"])

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        call = vars(self).get("_call")
        return (
            super().__reduce_ex__(protocol)
            if call is None
            else (_made_again, tuple(call))
        )


class Described(FromCall):
    """A function that knows the call which made it.

    >>> isinstance(sf.schedules.linear(0.5, 0.25), Described)
    True
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        vars(self).update(vars(fn))
        self.__wrapped__ = fn  # where `inspect` looks for the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.__wrapped__(*args, **kwargs)


Described.__name__ = "function"  # errors then name the type that users know


def described(make: Callable[P, Made]) -> Callable[P, Made]:
    """A factory whose functions, tuples of functions and patterns know the call that
    made them.

    >>> @described
    ... def above(limit):
    ...     return lambda x: x > limit
    >>> above(limit=2), above(2)(3)
    (above(limit=2), True)

    Lists and dicts among the arguments are copied, and iterators read into lists, so
    that the call stays what it was. Inside `torch.compile` the factory is as it would
    be without this.
    """

    @functools.wraps(make)
    def factory(*args: P.args, **kwargs: P.kwargs) -> Made:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        given: Any = [_copied(value) for value in args]
        named: Any = {name: _copied(value) for name, value in kwargs.items()}
        return _knowing(make(*given, **named), Call(factory, given, named))

    return factory_of(factory)


def factory_of(make: Callable[P, Made]) -> Callable[P, Made]:
    """The same function, marked as one that makes things, so that it is not taken for
    one of them.

    >>> factory_of(lambda n: range(n))(3)
    range(0, 3)
    """
    # which functools.wraps does not copy to a function around it
    vars(make)["_makes"] = make.__code__
    return make


def uncalled(value: object) -> str:
    """How to call a factory that was given in place of what it makes.

    It is "" for anything else.

    >>> (
    ...     uncalled(sf.budgets.erk),
    ...     uncalled(sf.budgets.erk()),
    ...     uncalled(sf.optimizers.adamw),
    ... )
    ('erk itself; call it: erk()', '', 'adamw itself; call it: adamw(lr)')
    """
    if not callable(value) or getattr(value, "_makes", None) is not getattr(
        value, "__code__", value
    ):
        return ""
    parameters = inspect.signature(value).parameters.values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    name = getattr(value, "__name__", "it")
    return f"{name} itself; call it: {name}({', '.join(needed)})"


def takes_keywords_of(
    base: Callable[..., Any], known: Iterable[str] | None = None, **defaults: Any
) -> Callable[[Callable[P, Made]], Callable[P, Made]]:
    """A function that hands its keywords on gets a signature which shows them, as
    `help` does.

    >>> def draw(shape, *, color, width=1): ...
    >>> @takes_keywords_of(draw, color="red")
    ... def circle(radius, **options):
    ...     return draw("circle", **({"color": "red"} | options))
    >>> import inspect
    >>> print(inspect.signature(circle))
    (radius, *, color='red', width=1)

    The parameters by name are those of `base` that are `known`, where they are not the
    function's own, with these defaults.
    """

    def signed(make: Callable[P, Made]) -> Callable[P, Made]:
        here = inspect.signature(make)
        own = [p for p in here.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {p.name for p in own}
        theirs = [
            p
            for p in inspect.signature(base).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        ]
        rest = [
            p
            for p in theirs
            if p.name not in names and (known is None or p.name in known)
        ]
        more = [p.replace(default=defaults.get(p.name, p.default)) for p in rest]
        make.__signature__ = here.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return make

    return signed


def with_call(
    made: Made, make: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Made:
    """The same object, of a type that shows and pickles it as this call.

    >>> with_call(lambda x: x, sf.schedules.linear, 1.0, slope=0.5)
    linear(1.0, slope=0.5)
    """
    return (
        made
        if torch.compiler.is_compiling()
        else _knowing(made, Call(make, args, kwargs))
    )


def call_of(made: object) -> Call | None:
    """The call that made an object, None for one that does not know it.

    >>> call_of(sf.rigl(0.9)), call_of(3)
    (rigl(0.9), None)
    """
    # functools.wraps copies what a function knows to another one.
    found = (
        None
        if isinstance(made, FunctionType)
        else getattr(made, "__dict__", {}).get("_call")
    )
    return found if isinstance(found, Call) else None


def parts_of(made: object) -> Iterator[object]:
    """An object, and everything that it was made of: the arguments of its calls, at any
    depth.

    >>> sf.scores.saliency in list(parts_of(sf.methods.snip(0.9)))
    True

    The calls themselves are there, too, also one inside the function whose call the
    object shows.
    """
    yield made
    items: Iterable[object] = ()
    if isinstance(made, Call):
        items = (*made.args, *made.kwargs.values())
    elif type(made) in (list, tuple, dict):
        items = made.values() if isinstance(made, dict) else made  # type: ignore[assignment]
    elif (call := call_of(made)) is not None:
        items = (call, vars(made).get("_inner"))
    for item in items:
        yield from parts_of(item)


def has_name(fn: object) -> bool:
    """Whether a function is known to others: by the call that made it, or by its own
    name in its module.

    >>> (
    ...     has_name(sf.schedules.linear(1.0, 0.5)),
    ...     has_name(sf.scores.saliency),
    ...     has_name(lambda x: x),
    ... )
    (True, True, False)

    One that is being decorated is not, as its name will be that of the decorated
    function.
    """
    if isinstance(fn, FromCall) or torch.compiler.is_compiling():
        return isinstance(fn, FromCall)
    found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
    for name in getattr(fn, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is fn and fn is not None


def _knowing(made: Made, call: Call) -> Made:
    new: Any = type(made)
    if isinstance(made, FunctionType):
        new = Described(made)
    elif isinstance(made, tuple):
        new = tuple.__new__(_kind(type(made)), made)
    else:  # a pattern or a score, which has a place for the call
        new = object.__new__(_kind(new))
        vars(new).update(vars(made))
    inner = call_of(made)
    vars(new)["_call"] = call
    if inner is not None:
        vars(new)["_inner"] = inner
    return new  # type: ignore[no-any-return]


@functools.cache
def _kind(kind: type[Any]) -> type[Any]:
    # Of objects that know their call. `_replace` of a named tuple goes through `_make`,
    # which makes one that does not.
    if issubclass(kind, FromCall):
        return kind
    names = ("__module__", "__qualname__", "__doc__", "_make")
    same = {name: getattr(kind, name) for name in names if hasattr(kind, name)}
    return type(kind.__name__, (FromCall, kind), same)


def _made_again(
    make: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return make(*args, **kwargs)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple or hasattr(kind, "__next__"):
        return (tuple if kind is tuple else list)(map(_copied, value))
    return (
        {name: _copied(item) for name, item in value.items()} if kind is dict else value
    )


def shown(value: Any) -> str:
    """An argument as it would be written: functions by name, tensors in short.

    >>> print(shown([sf.scores.magnitude, 0.5, sf.random.key(7), torch.zeros(3, 4)]))
    [magnitude, 0.5, tensor([0, 7]), tensor(shape=(3, 4), dtype=float32)]
    """
    kind = type(value)
    if kind in (list, tuple):
        text = ", ".join(map(shown, value))
        return (
            f"[{text}]" if kind is list else f"({text}{',' if len(value) == 1 else ''})"
        )
    if kind is dict:
        items = [f"{shown(name)}: {shown(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, FunctionType | MethodType | type):
        return value.__qualname__
    # torch.abs is a method of a private class
    if isinstance(value, BuiltinFunctionType):
        return value.__name__
    if isinstance(value, nn.Module):
        return kind.__name__
    if kind is float:
        return _number(value)
    text = repr(value)
    # an object that does not say what it is
    return kind.__name__ if " at 0x" in text else text


def _number(value: float) -> str:
    # `inf` is no name
    return repr(value) if math.isfinite(value) else f"float('{value}')"


def _tensor(value: Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    try:
        numbers = (
            value.reshape(-1).tolist()
            if value.ndim < 2 and value.numel() <= _MOST
            else None
        )
    except RuntimeError:  # hidden by a transform, or on the meta device
        numbers = None
    if numbers is None:
        return f"tensor(shape={tuple(value.shape)}, dtype={kind})"
    text = ", ".join(map(_BRIEF.get(value.dtype, shown), numbers))
    plain = value.dtype in (torch.float32, torch.int64, torch.bool)
    values = f"[{text}]" if value.ndim else text
    return f"tensor({values})" if plain else f"tensor({values}, dtype={kind})"
