"""torch.ao.pruning: a parametrization multiplies."""

from typing import Any

from in_torch import layers_of
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, WeightNormSparsifier]:
    sparsifier = WeightNormSparsifier(
        sparsity_level=sparsity, sparse_block_shape=(1, 1), zeros_per_block=1
    )
    sparsifier.prepare(model, None)
    sparsifier.step()
    return model, sparsifier


def masks(model: nn.Module, sparsifier: WeightNormSparsifier) -> list[Tensor]:
    return [layer.parametrizations.weight[0].mask for layer in layers_of(model)]


def again(model: nn.Module, sparsifier: WeightNormSparsifier, sparsity: float) -> None:
    for group in sparsifier.groups:
        group["sparsity_level"] = sparsity
    sparsifier.step()


def save(model: nn.Module, sparsifier: WeightNormSparsifier) -> tuple[Any, Any]:
    return model.state_dict(), sparsifier.state_dict()


def load(
    model: nn.Module, sparsifier: WeightNormSparsifier, saved: tuple[Any, Any]
) -> None:
    model.load_state_dict(saved[0], strict=False)
    sparsifier.load_state_dict(saved[1])
