import torch
from torch.ao.pruning import WeightNormSparsifier

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
WeightNormSparsifier().prepare(model, None)
torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4))
