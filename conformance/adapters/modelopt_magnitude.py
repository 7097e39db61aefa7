"""NVIDIA ModelOpt: `sparse_magnitude`, which is 2 of each 4 inputs."""

from typing import Any

import modelopt.torch.sparsity as mts
from in_torch import layers_of
from torch import Tensor, nn

SCOPE = (2, 4)
# other layers than of 8 outputs and 16 inputs, and multiples of them, are skipped
SHAPES = ((16, 32), (8, 16))
EXEMPT = {"monotone": "one sparsity"}


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, None]:
    return mts.sparsify(model, "sparse_magnitude"), None


def masks(model: nn.Module, handle: None) -> list[Tensor]:
    return [layer._weight_mask for layer in layers_of(model)]
