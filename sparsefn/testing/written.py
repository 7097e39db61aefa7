"""Trees, cases, numbers, functions of the library and promises as Python code."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparsefn.engine.checks import Call, call_of
from sparsefn.testing.meta import Exchange, Meta
from sparsefn.testing.oracle import Layout


def code_of(value: object) -> str | None:
    """An expression that gives the value, with `sf` and `torch` imported.

    It is None where there is none.

    >>> code_of(sf.every(2)), code_of(sf.scores.magnitude), code_of(lambda: 0)
    ('sf.every(2)', 'sf.scores.magnitude', None)
    """
    call = call_of(value)
    if call is not None:
        return _of_call(call)
    if isinstance(value, Tensor):
        return tensor_code(value)
    if isinstance(value, Layout):
        return code_of(value.pattern)
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        known: dict[str, Any] = getattr(type(value), "_field_defaults", {})
        named = {
            name: x
            for name, x in zip(value._fields, value, strict=True)
            if x is not known.get(name, value)
        }
        module = "sf.testing" if isinstance(value, Exchange) else "sf.testing.values"
        return _with_names(f"{module}.{type(value).__name__}", named)
    if isinstance(value, dict | list | tuple):
        return _of_container(value)
    # a trigger shows the call, and does not know it
    head = repr(value).partition("(")[0]
    if (
        type(value).__module__.startswith("sparsefn.")
        and f"sf.{head}" in _public().values()
    ):
        return f"sf.{value!r}"
    return _public().get(id(value))


def declarations(meta: Meta, base: Meta | None = None) -> tuple[str, dict[str, str]]:
    """The function that makes a `Meta`, and the code of each field that differs from
    its default.

    >>> declarations(sf.testing.Meta(start="dense", when=sf.every(2)))
    ('sf.testing.Meta', {'when': 'sf.every(2)', 'start': '"dense"'})

    Where one has no code, these are changes of a `meta` that is `base`.
    """

    def codes(old: Meta) -> dict[str, str | None]:
        other = [
            name
            for name in Meta._fields
            if not same(getattr(meta, name), getattr(old, name))
        ]
        return {name: code_of(getattr(meta, name)) for name in other}

    found = codes(Meta())
    head = "meta._replace" if None in found.values() else "sf.testing.Meta"
    found = codes(base or meta) if None in found.values() else found
    return head, {name: code or "..." for name, code in found.items()}


def meta_code(meta: Meta) -> str:
    """A `Meta` as one line of code, or the name `meta` where there is none.

    >>> (
    ...     meta_code(sf.testing.Meta(start="dense")),
    ...     meta_code(sf.testing.Meta(level=lambda s: s)),
    ... )
    ('sf.testing.Meta(start="dense")', 'meta')
    """
    head, codes = declarations(meta)
    inside = ", ".join(f"{name}={code}" for name, code in codes.items())
    return f"{head}({inside})" if head == "sf.testing.Meta" else "meta"


def same(a: object, b: object) -> bool:
    """Whether two declarations say the same.

    >>> same(sf.budgets.uniform(), sf.budgets.uniform())
    True
    """
    a, b = (x.pattern if isinstance(x, Layout) else x for x in (a, b))
    return repr(a) == repr(b) if call_of(a) is not None else a == b


def tensor_code(x: Tensor) -> str:
    """A tensor as a call of torch."""
    dtype = (
        ""
        if x.dtype in (torch.float32, torch.bool, torch.int64)
        else f", dtype={x.dtype}"
    )
    for name, filled in (("zeros", torch.zeros_like(x)), ("ones", torch.ones_like(x))):
        if (
            x.is_floating_point()
            and x.ndim
            and x.tolist() == filled.tolist()
            and not torch.signbit(x).any()
        ):
            return f"torch.{name}({', '.join(map(str, x.shape))}{dtype})"
    text = (
        repr(x.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    )
    return f"torch.tensor({text}{dtype})"


def _with_names(head: str, values: dict[str, Any]) -> str | None:
    codes = {name: code_of(value) for name, value in values.items()}
    return (
        None
        if None in codes.values()
        else f"{head}({', '.join(f'{name}={code}' for name, code in codes.items())})"
    )


def _of_call(call: Call) -> str | None:
    make = _public().get(id(call.make))
    args = [code_of(value) for value in call.args]
    named = _with_names("", dict(call.kwargs))
    if make is None or named is None or None in args:
        return None
    given = [code for code in args if code is not None]
    if named[1:-1]:
        given.append(named[1:-1])
    return f"{make}({', '.join(given)})"


def _of_container(value: dict[str, Any] | list[Any] | tuple[Any, ...]) -> str | None:
    if isinstance(value, dict):
        pairs = [(code_of(name), code_of(item)) for name, item in value.items()]
        text = (
            None
            if any(None in pair for pair in pairs)
            else ", ".join(f"{name}: {item}" for name, item in pairs)
        )
        inside = None if text is None else f"{{{text}}}"
        return (
            f"collections.OrderedDict({inside})"
            if inside and type(value) is OrderedDict
            else inside
        )
    codes = [code_of(item) for item in value]
    if None in codes:
        return None
    text = ", ".join(code for code in codes if code is not None)
    return (
        f"[{text}]"
        if isinstance(value, list)
        else f"({text}{',' if len(value) == 1 else ''})"
    )


@functools.cache
def _public() -> dict[int, str]:
    """The names of what the library makes public, by identity."""
    found = sorted(_walk("sf", sys.modules["sparsefn"]), key=lambda pair: -len(pair[0]))
    return {id(value): name for name, value in found}  # the shortest name is the last


def _walk(name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    for own in getattr(module, "__all__", ()):
        value = getattr(module, own)
        if isinstance(value, ModuleType):
            yield from _walk(f"{name}.{own}", value)
        elif callable(value):
            yield f"{name}.{own}", value
