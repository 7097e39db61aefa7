"""Rows: an algorithm, its promises, and the name by which another process imports it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor

from sparsefn.state import Algorithm, Level
from sparsefn.testing.meta import Meta, Row
from sparsefn.tree import Tree


def row_of(make_algorithm: Callable[..., Algorithm], meta: Meta = Meta()) -> Row:
    """The row of an algorithm as `check_laws` takes it.

    >>> row_of(lambda sparsity, key: sf.static(sparsity)).name
    '<lambda>'
    """
    if not isinstance(meta, Meta):
        raise TypeError(f"expected meta to be a sf.testing.Meta, got {type(meta).__name__}")
    meta = meta._replace(pattern=meta.layout)  # computing a layout takes a while
    return Row(_name(make_algorithm), _with_params(make_algorithm), meta, reference(make_algorithm))


def reference(make: Callable[..., object]) -> str | None:
    """`module:name` of a function that another process can import; None for a lambda or one made inside another.

    >>> reference(sf.static), reference(lambda: None)
    ('sparsefn.algorithms.static:static', None)
    """
    module, name = getattr(make, "__module__", "__main__"), getattr(make, "__qualname__", "<lambda>")
    return None if module == "__main__" or "<" in name else f"{module}:{name}"


def _name(make: object) -> str:
    return str(getattr(make, "__name__", type(make).__name__))


def _with_params(make: Callable[..., Algorithm]) -> Callable[[Level, Tensor, Tree], Algorithm]:
    if not callable(make):
        raise TypeError(f"expected make_algorithm(sparsity, key), got {type(make).__name__}")
    signature = inspect.signature(make)
    free = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in free if p.default is p.empty]
    if len(needed) > 3 or len(free) < 2:
        expected = "expected make_algorithm to take (sparsity, key) or (sparsity, key, params)"
        raise TypeError(f"{expected}, got {_name(make)}{signature}")
    return make if len(needed) == 3 else lambda sparsity, key, params: make(sparsity, key)
