import torch
import torch_pruning as tp

model = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False), torch.nn.Linear(2, 1))
model[0].weight.data = torch.tensor([[1.0], [float("nan")]])
importance, ignored = tp.importance.MagnitudeImportance(), [model[1]]
tp.pruner.BasePruner(
    model, torch.ones(1, 1), importance, pruning_ratio=0.5, ignored_layers=ignored
).step()
assert not model[0].weight.isnan().any(), model[0].weight.tolist()
