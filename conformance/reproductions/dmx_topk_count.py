import torch
from dmx.compressor.sparse import TopK

mask = TopK(density=0.93).get_mask(torch.rand(200))
assert int(mask.sum()) == 186, int(mask.sum())
