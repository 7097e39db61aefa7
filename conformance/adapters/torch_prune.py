"""torch.nn.utils.prune: a hook before each forward multiplies."""

from typing import Any

from in_torch import layers_of
from torch import Tensor, nn
from torch.nn.utils import prune


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, None]:
    for layer in layers_of(model):
        prune.l1_unstructured(layer, "weight", amount=sparsity)
    return model, None


def masks(model: nn.Module, handle: None) -> list[Tensor]:
    return [layer.weight_mask for layer in layers_of(model)]


def again(model: nn.Module, handle: None, sparsity: float) -> None:
    for layer in layers_of(model):  # an amount is a share of what remains
        kept = float(layer.weight_mask.sum()) / layer.weight_mask.numel()
        prune.l1_unstructured(layer, "weight", amount=1 - (1 - sparsity) / kept)
