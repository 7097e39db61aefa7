import torch
from torchao.sparsity import WandaSparsifier

model, sparsifier = (
    torch.nn.Sequential(torch.nn.Linear(2, 1)),
    WandaSparsifier(sparsity_level=0.5),
)
model[0].weight.data = torch.tensor([[float("nan"), 1.0]])
sparsifier.prepare(model, None)
model(torch.ones(1, 2)), sparsifier.step()
assert model[0].parametrizations.weight[0].mask.tolist() == [[0, 1]], (
    model[0].parametrizations.weight[0].mask
)
