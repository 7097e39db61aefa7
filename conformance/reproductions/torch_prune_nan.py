import torch
from torch.nn.utils import prune

layer = torch.nn.Linear(2, 1)
layer.weight.data = torch.tensor([[float("nan"), 1.0]])
prune.l1_unstructured(layer, "weight", amount=1)
assert layer.weight_mask.tolist() == [[0, 1]], layer.weight_mask
