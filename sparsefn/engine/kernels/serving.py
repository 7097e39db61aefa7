"""Where kernels serve, and why they do not: the one place that decides."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import torch

from sparsefn.engine.transforms import at_compile_time

SWITCH = "SPARSEFN_TRITON"


@at_compile_time
def why_not(device: str) -> str:
    """Why no kernel takes tensors of a kind of device: one clause, empty where kernels do.

    >>> from sparsefn.engine.kernels import serving
    >>> serving.why_not("meta")
    'kernels run on cuda, and this is meta'

    Kernels take CUDA tensors where triton is installed and `SPARSEFN_TRITON=1` is in the environment. With
    `TRITON_INTERPRET=1`, too, they take CPU tensors: Triton then runs them in Python, slowly, for tests.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != ("cpu" if interpreted else "cuda"):
        return f"kernels run on {'the cpu, interpreted,' if interpreted else 'cuda,'} and this is {device}"
    if os.environ.get(SWITCH) != "1":
        return f"{SWITCH}=1 is not set: no GPU has shown yet that they are exact"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def serves(device: str) -> bool:
    """Whether kernels take tensors of a kind of device.

    >>> from sparsefn.engine.kernels import serving
    >>> serving.serves("meta")
    False
    """
    return not why_not(device)


def has_own_way(device: str) -> bool:
    """Whether this library reads the memory of a kind of device itself: the CPU's, and a GPU's where kernels serve.

    >>> from sparsefn.engine.kernels import serving
    >>> serving.has_own_way("cpu"), serving.has_own_way("meta")
    (True, False)
    """
    return device == "cpu" or serves(device)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on a device: Triton launches on the current one.

    >>> from sparsefn.engine.kernels import serving
    >>> with serving.on(torch.device("cpu")):
    ...     torch.zeros(1)
    tensor([0.])
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
