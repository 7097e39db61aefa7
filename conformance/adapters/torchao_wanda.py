"""torchao.sparsity: WandaSparsifier, which weighs weights by the norms of their inputs,
here of ones.
"""

from typing import Any

import torch
from in_torch import layers_of
from torch import nn
from torchao.sparsity import WandaSparsifier

from adapters import torch_ao

masks, again, save, load = torch_ao.masks, torch_ao.again, torch_ao.save, torch_ao.load


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, WandaSparsifier]:
    sparsifier = WandaSparsifier(sparsity_level=sparsity)
    sparsifier.prepare(model, None)
    with torch.no_grad():
        model(torch.ones(8, layers_of(model)[0].in_features))
    sparsifier.step()
    return model, sparsifier
