"""Work on DTensors that torch does otherwise: elementwise on the parts of this process, and constants inside a vjp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsefn.engine.shards import any_sharded, here, is_sharded, like
from sparsefn.engine.transforms import temporarily_clear_interpreter_stack, unwrapped

OnLists = TypeVar("OnLists", bound=Callable[..., list[Tensor]])
Out = TypeVar("Out")
Rebuild = Callable[[Sequence[Tensor]], Out]


def each_local(fn: OnLists) -> OnLists:
    """Let an elementwise function of lists of tensors see the local tensors of DTensors; results are laid out alike.

    >>> from sparsefn.engine.local import each_local
    >>> each_local(lambda a, b: [x + y for x, y in zip(a, b)])([torch.ones(1)], [torch.ones(1)])
    [tensor([2.])]

    A result is laid out as the last of its arguments, which are laid out alike or 0-d. Keywords are handed on.
    """

    @functools.wraps(fn)
    def run(*lists: Sequence[Tensor], **options: bool) -> list[Tensor]:
        if not any_sharded(lists[-1]):
            return fn(*lists, **options)
        parts = [[here(x) for x in tensors] for tensors in lists]
        rows = zip(fn(*parts, **options), parts[-1], lists[-1], strict=True)
        return [x if new is old else like(new, x) for new, old, x in rows]

    return run  # type: ignore[return-value]


def localized(rows: Sequence[tuple[Any, ...]], rebuild: Rebuild[Out]) -> tuple[Sequence[tuple[Any, ...]], Rebuild[Out]]:
    """Rows of tensors as local ones, and the function that rebuilds a tree of results laid out as their first tensors.

    >>> from sparsefn.engine.local import localized
    >>> rows, rebuild = localized([(torch.ones(2),)], list)
    >>> rebuild([x + 1 for (x,) in rows])
    [tensor([2., 2.])]
    """
    if not any_sharded([row[0] for row in rows]):
        return rows, rebuild
    firsts = [row[0] for row in rows]
    parts = [tuple(map(here, row)) for row in rows]
    return parts, lambda results: rebuild([like(*pair) for pair in zip(results, firsts, strict=True)])


def outside(fn: Callable[[Tensor], Out], x: Tensor) -> Out:
    """What a function makes of a tensor, for constants: of a DTensor inside `torch.func.vjp`, as if it were outside.

    >>> from sparsefn.engine.local import outside
    >>> outside(torch.zeros_like, torch.ones(1))
    tensor([0.])

    Inside, nobody sees that it is one, and what is drawn or selected for it would be a plain tensor.
    """
    inner = x if torch.compiler.is_compiling() else unwrapped(x)
    if inner is x or not is_sharded(inner):
        return fn(x)
    with temporarily_clear_interpreter_stack():
        return fn(inner)
