import modelopt.torch.sparsity as mts
import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 8))
model[0].weight.data.fill_diagonal_(float("nan"))
mts.sparsify(model, "sparse_magnitude")
kept = int((model[0].weight.isnan() & model[0]._weight_mask).sum())
assert kept == 0, f"{kept} of 8 NaN are kept"
