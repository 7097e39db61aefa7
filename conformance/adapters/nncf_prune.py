"""NNCF: `prune` by local magnitudes, with masks in hooks on the parameters."""

from typing import Any

import nncf
import torch
from in_torch import layers_of
from nncf.torch.function_hook.pruning.magnitude.algo import (
    get_pruned_modules,
    update_pruning_ratio,
)
from torch import Tensor, nn

MODE = nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, None]:
    example = torch.ones(8, layers_of(model)[0].in_features)
    return nncf.prune(model, MODE, ratio=sparsity, examples_inputs=example), None


def masks(model: nn.Module, handle: None) -> list[Tensor]:
    return [hook.binary_mask for _, hook in sorted(get_pruned_modules(model).items())]


def again(model: nn.Module, handle: None, sparsity: float) -> None:
    update_pruning_ratio(model, MODE, sparsity)  # what its schedulers call


def weights(model: nn.Module) -> list[Tensor]:
    return [
        layer.weight * mask
        for layer, mask in zip(layers_of(model), masks(model, None), strict=True)
    ]
