"""What one release of torch does otherwise than the others, set right."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

OLD = torch.__version__ < "2.12"


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`; in compiled code torch 2.11 always says yes.

    >>> from sparsefn.engine.surroundings.older import is_exporting
    >>> is_exporting()
    False
    """
    return torch.compiler._is_exporting_flag if OLD else torch.compiler.is_exporting()


def replaceable(cls: Class) -> Class:
    """Mark a named tuple that compiled code returns: what `_replace` made comes out of
    the compiler of 2.11 empty.

    >>> from typing import NamedTuple
    >>> from sparsefn.engine.surroundings.older import replaceable
    >>> Pair = replaceable(NamedTuple("Pair", [("a", int), ("b", int)]))
    >>> Pair(1, 2)._replace(b=3)
    Pair(a=1, b=3)
    """
    if OLD:
        setattr(cls, "_replace", _replace)  # noqa: B010 (types know of no such name)
    return cls


def _replace(self: Any, **fields: Any) -> Any:
    values = [
        fields.pop(name) if name in fields else value
        for name, value in zip(self._fields, self, strict=True)
    ]
    if fields:
        raise ValueError(f"Got unexpected field names: {list(fields)!r}")
    return type(self)(*values)


def differentiating(fn: Function) -> Function:
    """Mark a function that asks torch.func for derivatives: in inference mode those of
    2.11 are zeros, so it is left.

    >>> from sparsefn.engine.surroundings.older import differentiating
    >>> with torch.inference_mode():
    ...     differentiating(torch.func.grad(torch.sin))(torch.tensor(0.0))
    tensor(1.)
    """
    if not OLD:
        return fn

    @functools.wraps(fn)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return outside  # type: ignore[return-value]


def guards_by_name(program: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """The program, whose checks of inputs find what its model takes as `**kwargs`.

    torch 2.14 writes `L['kwargs']['x']` for an input that the program itself names `x`,
    and `program.module()` then fails with "name 'L' is not defined". Other releases
    write `L['x']`.

    >>> from sparsefn.engine.surroundings.older import guards_by_name
    >>> program = torch.export.export(nn.ReLU(), (torch.ones(1),))
    >>> guards_by_name(program, nn.ReLU()) is program
    True
    """
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            guards = [
                guard.replace(f"L['{name}'][", "L[") for guard in program._guards_code
            ]
            program._guards_code = guards
    return program
