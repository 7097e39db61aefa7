"""Which Python numbers and tensor values are known in compiled code and under transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def concrete(value: Any) -> Any:
    """The Python number in a 0-d tensor, or None where a transform hides it.

    >>> concrete(torch.tensor(3)), concrete(2.5)
    (3, 2.5)
    """
    if not isinstance(value, Tensor):
        return value
    if torch.compiler.is_compiling():
        return None
    try:
        return value.item()
    except RuntimeError:  # batched by vmap, or fake
        return None


def constant(fn: Function) -> Function:
    """Mark a function of Python values: compiled code calls it while it is traced and keeps the result.

    >>> constant(lambda word: len(word))("four")
    4

    As `torch.compiler.assume_constant_result`, which imports the compiler, and that takes a second.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def known(value: Any) -> Any:
    """The number itself; compiled code then knows its value, and no longer computes with it.

    >>> known(0.1), known(3)
    (0.1, 3)
    """
    if not torch.compiler.is_compiling():
        return value
    return float.fromhex(value.hex()) if isinstance(value, float) else len(range(value))
