import torch
from torchao.sparsity import WandaSparsifier

model, sparsifier = (
    torch.nn.Sequential(torch.nn.Linear(10, 10)),
    WandaSparsifier(sparsity_level=0.29),
)
sparsifier.prepare(model, None)
model(torch.ones(1, 10))
sparsifier.step()
assert int((model[0].weight == 0).sum()) == 29, int((model[0].weight == 0).sum())
