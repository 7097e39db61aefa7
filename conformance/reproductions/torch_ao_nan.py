import torch
from torch.ao.pruning import WeightNormSparsifier

model = torch.nn.Sequential(torch.nn.Linear(2, 1))
model[0].weight.data = torch.tensor([[float("nan"), 1.0]])
sparsifier = WeightNormSparsifier(
    sparsity_level=0.5, sparse_block_shape=(1, 1), zeros_per_block=1
)
sparsifier.prepare(model, None), sparsifier.step()
assert torch.equal(model[0].weight, torch.tensor([[0.0, 1.0]])), model[
    0
].weight.tolist()
