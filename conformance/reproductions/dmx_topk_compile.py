import torch
from dmx.compressor.sparse import TopK

torch.compile(TopK(density=0.5).get_mask, backend="eager", fullgraph=True)(torch.rand(10))
