"""Which kernels take the place of what, and for which kind of device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sparsefn_kernels import step
from sparsefn_kernels.draw import coins, draws, draws_of_leaves
from sparsefn_kernels.select import winners
from sparsefn_kernels.sweep import sweep

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
_SEAMS: dict[str, Callable[..., Any]] = {
    "winners": winners,
    "draws": draws,
    "draws_of_leaves": draws_of_leaves,
    "coins": coins,
    "adam": step.adam,
    "sgd": step.sgd,
    "sweep": sweep,
}


def installed(device: str) -> dict[tuple[str, str], Callable[..., Any]]:
    """What serves a kind of device where this package is: all kernels on `DEVICE`, and
    none on AMD's GPUs, where nobody has run them.
    """
    served = torch.version.hip is None and device == DEVICE
    return backends_for(device) if served else {}


def backends_for(device: str) -> dict[tuple[str, str], Callable[..., Any]]:
    """The entries of `sparsefn._engine.backends.BACKENDS` for a kind of
    device.

    For the meta device nothing is launched, and launches can be counted.
    """
    return {(name, device): fn for name, fn in _SEAMS.items()}
