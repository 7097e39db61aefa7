"""Reprs and pickles of objects that a factory made: the call that made them."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    ParamSpec,
    SupportsIndex,
    TypeVar,
)

import numpy as np
import torch
from torch import Tensor, nn

P = ParamSpec("P")
Thing = TypeVar("Thing")

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

    Attributes:
        make: The function that was called.
        args: Its arguments by position.
        kwargs: Its arguments by name.
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
        """Every argument by name, with the defaults of arguments that were left out."""
        bound = inspect.signature(self.make).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments


class Made:
    """The base of what factories make: it knows the call that made it.

    >>> rigl = sf.rigl(0.9)
    >>> rigl.made_by, rigl.made_by.arguments()["sparsity"]
    (rigl(0.9), 0.9)

    A changed copy is no longer made by that call, and knows what it was made of:

    >>> changed = rigl._replace(within=None)
    >>> changed.made_by, changed.made_of
    (None, rigl(0.9))

    A function that hands on what another factory made keeps that call in `made_of`.
    """

    made_by: Call | None = None
    made_of: object = None
    # Fields that are other ways of these: a copy with other ones has none.
    ways_of: ClassVar[Mapping[str, Collection[str]]] = {}

    def __repr__(self) -> str:
        if self.made_by is None:
            return super().__repr__()
        return repr(self.made_by)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        if self.made_by is None:
            return super().__reduce_ex__(protocol)
        return _made_again, tuple(self.made_by)

    if not TYPE_CHECKING:  # types know the fields of each named tuple

        def _replace(self, **changes: Any) -> Any:
            ways = [way for way, of in self.ways_of.items() if changes.keys() & {*of}]
            new = super()._replace(**dict.fromkeys(ways) | changes)
            # of a copy of a copy the original alone is held
            vars(new)["made_of"] = self.made_of if self.made_by is None else self
            return new


class Described(Made):
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


def described(make: Callable[P, Thing]) -> Callable[P, Thing]:
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
    def factory(*args: P.args, **kwargs: P.kwargs) -> Thing:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        given: Any = [_copied(value) for value in args]
        named: Any = {name: _copied(value) for name, value in kwargs.items()}
        return _knowing(make(*given, **named), Call(factory, given, named))

    return factory_of(factory)


def factory_of(make: Callable[P, Thing]) -> Callable[P, Thing]:
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


def with_call(
    made: Thing,
    make: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Thing:
    """The same object, of a type that shows and pickles it as this call.

    >>> with_call(lambda x: x, sf.schedules.linear, 1.0, slope=0.5)
    linear(1.0, slope=0.5)
    """
    if torch.compiler.is_compiling():
        return made
    return _knowing(made, Call(make, args, kwargs))


def call_of(made: object) -> Call | None:
    """The call that made an object, None for one that does not know it.

    >>> call_of(sf.rigl(0.9)), call_of(3)
    (rigl(0.9), None)
    """
    # functools.wraps copies the attributes of a function to its wrapper.
    return made.made_by if isinstance(made, Made) else None


def own_calls(made: object) -> Iterator[Call]:
    """The calls that made an object, without its parts: also the calls that made the
    object it was changed from, and the object that its function passed on.

    >>> [call.make.__name__ for call in own_calls(sf.rigl(0.9)._replace(settled=None))]
    ['rigl', 'drop_grow']
    """
    while isinstance(made, Made):
        if made.made_by is not None:
            yield made.made_by
        made = made.made_of
    if isinstance(made, Call):
        yield made


def parts_of(made: object) -> Iterator[object]:
    """An object, and everything that it was made of: the arguments of its calls, at any
    depth.

    >>> sf.scores.saliency in list(parts_of(sf.methods.snip(0.9)))
    True

    The calls themselves are there, too, also one inside the function whose call the
    object shows. A changed copy was made of what it was changed from.
    """
    yield made
    items: Iterable[object] = ()
    if isinstance(made, Call):
        items = (*made.args, *made.kwargs.values())
    elif type(made) in (list, tuple, dict):
        items = made.values() if isinstance(made, dict) else made  # type: ignore[assignment]
    elif isinstance(made, Made):
        items = (made.made_by, made.made_of)
    for item in items:
        yield from parts_of(item)


def has_name(fn: object) -> bool:
    """Whether other code can name a function: by the call that made it, or by its own
    name in its module.

    >>> (
    ...     has_name(sf.schedules.linear(1.0, 0.5)),
    ...     has_name(sf.scores.saliency),
    ...     has_name(lambda x: x),
    ... )
    (True, True, False)

    False for a function that is being decorated: its name will mean the decorated
    function.
    """
    if call_of(fn) is not None or torch.compiler.is_compiling():
        return call_of(fn) is not None
    found: Any = sys.modules.get(getattr(fn, "__module__", None) or "")
    for name in getattr(fn, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is fn and fn is not None


def _knowing(made: Thing, call: Call) -> Thing:
    new: Any = Described(made) if isinstance(made, FunctionType) else _same(made)
    vars(new).update(made_by=call, made_of=call_of(made) or vars(new).get("made_of"))
    return new  # type: ignore[no-any-return]


def _same(made: Any) -> Any:
    # A copy with the same fields: the object without the call may be shared.
    kind = type(made)
    if isinstance(made, tuple):
        new = kind._make(made)
    else:
        new = object.__new__(kind)
    vars(new).update(vars(made))
    return new


def _made_again(
    make: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return make(*args, **kwargs)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple or hasattr(kind, "__next__"):
        return (tuple if kind is tuple else list)(map(_copied, value))
    if kind is dict:
        return {name: _copied(item) for name, item in value.items()}
    return value


def shown(value: Any) -> str:
    """An argument as it would be written: functions by name, tensors in short.

    >>> print(shown([sf.scores.magnitude, 0.5, sf.random.key(7), torch.zeros(3, 4)]))
    [magnitude, 0.5, tensor([0, 7]), tensor(shape=(3, 4), dtype=float32)]
    """
    kind = type(value)
    if kind in (list, tuple):
        text = ", ".join(map(shown, value))
        if kind is list:
            return f"[{text}]"
        return f"({text}{',' if len(value) == 1 else ''})"
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
        # `inf` is no name
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    text = repr(value)
    # an object that does not say what it is
    return kind.__name__ if " at 0x" in text else text


def _tensor(value: Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    try:
        numbers = None
        if value.ndim < 2 and value.numel() <= _MOST:
            numbers = value.reshape(-1).tolist()
    except RuntimeError:  # hidden by a transform, or on the meta device
        numbers = None
    if numbers is None:
        return f"tensor(shape={tuple(value.shape)}, dtype={kind})"
    text = ", ".join(map(_BRIEF.get(value.dtype, shown), numbers))
    plain = value.dtype in (torch.float32, torch.int64, torch.bool)
    values = f"[{text}]" if value.ndim else text
    return f"tensor({values})" if plain else f"tensor({values}, dtype={kind})"
