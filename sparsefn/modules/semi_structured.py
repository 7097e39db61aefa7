"""Linear layers whose weights are torch's semi-structured tensors: 2 of every 4 inputs,
skipped by the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_DTYPES = (torch.float16, torch.bfloat16)
# rows and columns come in blocks: the smallest side that torch's table has for these
# dtypes
_SIDE = 16
_CAPABILITY = (8, 0)


def make_semi_structured(
    layers: Mapping[str, nn.Linear], masks: Mapping[str, Tensor]
) -> None:
    """Put semi-structured weights into linear layers, given with their masks by the
    path of the weight.

    >>> layer = torch.nn.Linear(16, 16).half()
    >>> make_semi_structured({"0.weight": layer}, {"0.weight": torch.ones(16, 16) > 0})
    Traceback (most recent call last):
        ...
    ValueError: layout='semi': expected a mask that keeps at most 2 of every 4 weights
    along axis 1 at '0.weight', got 4

    No layer is changed unless all of them can be. Raises ValueError for weights that
    torch or the device does not take, RuntimeError where torch itself refuses; all name
    the path.
    """
    faults = [
        fault
        for path, layer in layers.items()
        if (fault := _fault(layer.weight, masks[path], path))
    ]
    if faults:
        raise ValueError(f"layout='semi': {'; '.join(faults)}")
    made = {path: _made(path, layer.weight) for path, layer in layers.items()}
    for path, layer in layers.items():
        layer.weight = nn.Parameter(made[path], requires_grad=False)


def _fault(weight: Tensor, mask: Tensor, path: str) -> str:
    # Why torch or the device does not take a weight; "" where it does.
    def told(expected: str, got: object) -> str:
        return f"expected {expected} at {path!r}, got {got}"

    if weight.dtype not in _DTYPES:
        return told("torch.float16 or torch.bfloat16 weights", weight.dtype)
    if any(size % _SIDE or not size for size in weight.shape):
        return told(
            f"rows and columns in multiples of {_SIDE}", f"shape {tuple(weight.shape)}"
        )
    most = int(mask.unflatten(1, (mask.shape[1] // 4, 4)).sum(-1).max())  # type: ignore[no-untyped-call]
    if most > 2:
        return told("a mask that keeps at most 2 of every 4 weights along axis 1", most)
    lacking = without_sparse_cores(weight.device)
    return (
        told("a CUDA device of compute capability 8.0 or higher", lacking)
        if lacking
        else ""
    )


def without_sparse_cores(device: torch.device) -> str:
    """What a device is, if it cannot multiply by semi-structured weights.

    It is empty if it can.

    >>> without_sparse_cores(torch.device("cpu"))
    'cpu'
    """
    if device.type != "cuda":
        return str(device)
    capability = torch.cuda.get_device_capability(device)
    return (
        ""
        if capability >= _CAPABILITY
        else f"{device} of capability {'.'.join(map(str, capability))}"
    )


def _made(path: str, weight: Tensor) -> Tensor:
    # torch says once in a process that the class is a prototype
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "The PyTorch API of SparseSemiStructuredTensor is in prototype",
            UserWarning,
        )
        try:
            return torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
        except RuntimeError as error:
            raise RuntimeError(
                f"layout='semi': torch makes no semi-structured tensor of {path!r}: "
                f"{error}"
            ) from error
