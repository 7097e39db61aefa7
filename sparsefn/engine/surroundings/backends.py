"""Backends: whoever computes for a kind of device what this library computes, in a way
of its own with the same bits.

A backend is registered by `BACKENDS[name, device type] = function`. The function gets
what stands here; it returns None for what it leaves to this library. The CPU's steps of
optimizers are in `leaves/steps.py`.

- `winners(entries, counts, spans, joint)`: the masks of `selection/dispatch.py`'s
  operator.
- `draws(key, index, n, kind, dtype, domain, digits)`: those of `threefry.py`'s
  operator. `kind` is "words", "pairs", "uniform" or "normal", `domain` what the key is
  xored with, `digits` are those of the significand of the dtype.
- `draws_of_leaves(keys, sizes, kind, dtype, domain, digits)`: draws of keys (leaves,
  2), a tensor of each size.
- `coins(key, chances, places, n)`: those of `draws.flips`.
- `adam(rows, numbers, betas, eps, decay, decoupled)`: a step under masks. A row is a
  param, its mask, gradient and moments; `numbers` are the count, the powers of the
  betas and the rate. Gives the new param and moments of each row, and the new count and
  powers. None in place of a row's leaves it to this library.
- `adam_updates(rows, numbers, betas, eps, decay, decoupled)`: without masks. A row is
  the moments, the gradient and the param; gives its update and new moments.
- `sgd(rows, numbers, momentum, nesterov, decay)`: the same; `numbers` are the count and
  the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BACKENDS: dict[tuple[str, str], Callable[..., Any]] = {}


def has_backend(name: str, device: str) -> bool:
    """Whether a backend is there for a kind of device.

    >>> from sparsefn.engine.surroundings import backends
    >>> backends.has_backend("winners", "meta")
    False
    """
    return (name, device) in BACKENDS


def asked(name: str, device: str, *args: Any) -> Any:
    """What the backend of a kind of device makes of some arguments; None where there is
    none, or it declines.

    >>> from sparsefn.engine.surroundings import backends
    >>> backends.asked("winners", "meta", [], torch.tensor([]), [], False)
    """
    return BACKENDS[name, device](*args) if has_backend(name, device) else None
