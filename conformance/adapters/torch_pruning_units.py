"""Torch-Pruning removes channels; a mask here says which of the first layer stay."""

from typing import Any

import numpy as np
import torch
import torch_pruning as tp
from in_torch import layers_of
from torch import Tensor, nn

SHAPES = ((100, 20), (10, 100))  # the 100 hidden units compete
EXEMPT = {"zeros": "removes them"}
NEW_OPTIMIZER = True


def spoil(weights: list[np.ndarray]) -> None:
    weights[0][::4] = np.nan


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, dict[str, Any]]:
    first = layers_of(model)[0]
    handle = {"left": torch.arange(first.out_features), "units": first.out_features}
    again(model, handle, sparsity)
    return model, handle


def masks(model: nn.Module, handle: dict[str, Any]) -> list[Tensor]:
    left = torch.isin(torch.arange(handle["units"]), handle["left"])
    return [left[:, None].expand(SHAPES[0]), left.expand(SHAPES[1])]


def again(model: nn.Module, handle: dict[str, Any], sparsity: float) -> None:
    first, last = layers_of(model)
    # a share of what is there
    ratio = 1 - (1 - sparsity) * handle["units"] / first.out_features
    ratio = ratio if first.out_features < handle["units"] else sparsity
    pruner = tp.pruner.BasePruner(
        model,
        torch.ones(1, 20),
        tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=ratio,
        ignored_layers=[last],
    )
    for group in pruner.step(interactive=True):
        gone = group[0].idxs
        group.prune()
        stay = [i for i in range(len(handle["left"])) if i not in set(gone)]
        handle["left"] = handle["left"][stay]


def save(model: nn.Module, handle: dict[str, Any]) -> tuple[Any, Tensor]:
    return tp.state_dict(model), handle["left"]


def load(model: nn.Module, handle: dict[str, Any], saved: tuple[Any, Tensor]) -> None:
    tp.load_state_dict(model, saved[0])
    handle["left"] = saved[1]
