"""dmx-compressor: `TopK`, the function of scores that makes a mask."""

from dmx.compressor.sparse import TopK
from laws import SPARSITIES
from torch import Tensor

RULES = {sparsity: TopK(density=round(1 - sparsity, 6)) for sparsity in SPARSITIES}


def mask(weight: Tensor, sparsity: float) -> Tensor:
    return RULES[sparsity].get_mask(weight.abs())
