"""The floating-point numbers that the library computes with."""

from __future__ import annotations

import torch
from torch import Tensor

# What is computed with. The 8-bit floats of torch only store numbers: hardly any
# operation takes them.
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def check_float(what: str, value: object, path: str | None = None) -> None:
    """Raise TypeError unless it is a tensor of one of the `FLOATS`.

    >>> from sparsefn._engine.numbers import floats
    >>> floats.check_float("params", torch.zeros(1, dtype=torch.float8_e5m2), "w")
    Traceback (most recent call last):
        ...
    TypeError: expected floating-point params, got torch.float8_e5m2 at 'w'; float16,
    bfloat16, float32 and float64 ...
    """
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        at = "" if path is None else f" at {path!r}"
        narrow = isinstance(value, Tensor) and value.is_floating_point()
        taken = "; float16, bfloat16, float32 and float64 are taken" if narrow else ""
        raise TypeError(f"expected floating-point {what}, got {got}{at}{taken}")
