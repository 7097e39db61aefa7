import torch
from dmx.compressor.sparse import TopK

torch.func.vmap(TopK(density=0.5).get_mask)(torch.rand(3, 10))
