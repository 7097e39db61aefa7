import torch
from fasterai.core.criteria import large_final
from fasterai.sparse.sparsifier import Sparsifier

model = torch.nn.Sequential(torch.nn.Linear(10, 10))
Sparsifier(
    model, "weight", "local", large_final, layer_type=torch.nn.Linear
).sparsify_model(0.5)
assert int(model[0]._mask.sum()) == 50, int(model[0]._mask.sum())
