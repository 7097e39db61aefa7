"""dmx-compressor: `TopK`, the function of scores that makes a mask."""

from dmx.compressor.sparse import TopK
from torch import Tensor


def mask(weight: Tensor, sparsity: float) -> Tensor:
    return TopK(density=round(1 - sparsity, 6)).get_mask(weight.abs())
