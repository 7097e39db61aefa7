import torch
import torch_pruning as tp

model = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.Linear(100, 10))
importance, ignored = tp.importance.MagnitudeImportance(), [model[1]]
tp.pruner.BasePruner(
    model, torch.ones(1, 20), importance, pruning_ratio=0.93, ignored_layers=ignored
).step()
assert model[0].out_features == 7, model[0].out_features
