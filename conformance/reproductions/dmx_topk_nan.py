import torch
from dmx.compressor.sparse import TopK

mask = TopK(density=0.5).get_mask(torch.tensor([float("nan"), 1.0]))
assert mask.tolist() == [0, 1], mask.tolist()
