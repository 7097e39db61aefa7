import torch
from torchao.sparsity import WandaSparsifier

model = torch.nn.Sequential(torch.nn.Linear(4, 4))
WandaSparsifier().prepare(model, None)
torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4))
