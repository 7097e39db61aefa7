"""Backends: functions of other packages that compute, for a kind of device, what this
library computes, with the same bits.

A backend is registered by `BACKENDS[name, device type] = function`. The function gets
what stands here; it returns None for what it leaves to this library. The CPU's steps of
optimizers are in `leaves/steps.py`.

A package that is installed may register its own without an import: an entry point of
the group "sparsefn.backends", whose name is the kind of device, such as "cuda". It is
a function of that name that gives entries of `BACKENDS`, and is called when a backend
of that kind is first asked for. `SPARSEFN_KERNELS=0` in the environment leaves all such
packages out.

- `winners(entries, counts, spans, joint)`: the masks of `selection/dispatch.py`'s
  operator.
- `draws(key, index, n, kind, dtype, domain, digits)`: the draws of `threefry.py`'s
  operator. `kind` is "words", "pairs", "uniform" or "normal", `domain` is xored with
  the key, and `digits` counts the bits of the dtype's significand.
- `draws_of_leaves(keys, sizes, kind, dtype, domain, digits)`: draws of keys (leaves,
  2), a tensor of each size.
- `coins(key, chances, places, n)`: the coins of `draws.flips`.
- `adam(rows, numbers, betas, eps, decay, decoupled, clear)`: a step under masks. A row
  is a param, its mask, gradient and moments; `numbers` are the count, the powers of the
  betas and the rate. With `clear`, moments are +0.0 off the masks. Gives the new param
  and moments of each row, and the new count and powers. None in place of a row's leaves
  it to this library.
- `adam_updates(rows, numbers, betas, eps, decay, decoupled)`: without masks. A row is
  the moments, the gradient and the param; gives its update and new moments.
- `sgd(rows, numbers, momentum, nesterov, decay, clear)`: as `adam`; `numbers` are the
  count and the rate.
- `sweep(due, changes, mask, factor, scale, rounding, span, best)`: writes the changes
  and the mask of some columns of SparseGPT, as `sweep_by_sums` of
  `posttraining/solve/sweep.py` does. `best` of each `span` columns are kept; None where
  the mask is given. False in place of True leaves them to this library.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from sparsefn._engine.transforms import at_compile_time

BACKENDS: dict[tuple[str, str], Callable[..., Any]] = {}

GROUP = "sparsefn.backends"
SWITCH = "SPARSEFN_KERNELS"
# kinds of devices whose entry points have been looked for; these have none
LOOKED = {"cpu": True, "meta": True}


def backend_of(name: str, device: str) -> Callable[..., Any] | None:
    """The backend of a name for a kind of device, or None.

    >>> from sparsefn._engine import backends
    >>> backends.backend_of("winners", "meta")
    """
    _register_installed(device)
    return BACKENDS.get((name, device))


def has_backend(name: str, device: str) -> bool:
    """Whether a backend is there for a kind of device.

    >>> from sparsefn._engine import backends
    >>> backends.has_backend("winners", "meta")
    False
    """
    return backend_of(name, device) is not None


def call_backend(name: str, device: str, *args: Any) -> Any:
    """What the backend of a kind of device makes of some arguments; None where there is
    none, or it declines.

    >>> from sparsefn._engine import backends
    >>> backends.call_backend("winners", "meta", [], torch.tensor([]), [], False)
    """
    backend = backend_of(name, device)
    return None if backend is None else backend(*args)


@at_compile_time
def _register_installed(device: str) -> None:
    # What was registered by hand stays.
    if device in LOOKED:
        return
    LOOKED[device] = True
    if os.environ.get(SWITCH) == "0":
        return
    # takes some milliseconds
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=device):
        try:
            made = point.load()(device)
        except Exception as error:
            warnings.warn(
                f"sparsefn: the kernels of {point.value!r} do not load, so torch alone "
                f"computes on {device!r}: {type(error).__name__}: {error}. With "
                f"{SWITCH}=0 in the environment they are left out",
                stacklevel=2,
            )
            continue
        for key, backend in made.items():
            BACKENDS.setdefault(key, backend)
