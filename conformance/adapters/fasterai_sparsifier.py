"""fasterai: `Sparsifier` by weights of a layer; after each step what its callback for
fastai does.
"""

from typing import Any

from fasterai.core.criteria import large_final
from fasterai.sparse.sparsifier import Sparsifier
from in_torch import layers_of
from torch import Tensor, nn


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, Sparsifier]:
    sparsifier = Sparsifier(model, "weight", "local", large_final, layer_type=nn.Linear)
    sparsifier.sparsify_model(sparsity)
    return model, sparsifier


def masks(model: nn.Module, sparsifier: Sparsifier) -> list[Tensor]:
    return [layer._mask for layer in layers_of(model)]


def again(model: nn.Module, sparsifier: Sparsifier, sparsity: float) -> None:
    sparsifier.sparsify_model(sparsity)


def step(model: nn.Module, sparsifier: Sparsifier, optimizer: Any) -> None:
    optimizer.step()
    sparsifier._apply_masks()
