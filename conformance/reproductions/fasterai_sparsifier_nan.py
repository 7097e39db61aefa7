import torch
from fasterai.core.criteria import large_final
from fasterai.sparse.sparsifier import Sparsifier

model = torch.nn.Sequential(torch.nn.Linear(8, 1))
model[0].weight.data = torch.tensor([[float("nan")] * 4 + [1.0, 2.0, 3.0, 4.0]])
Sparsifier(
    model, "weight", "local", large_final, layer_type=torch.nn.Linear
).sparsify_model(0.5)
assert model[0]._mask[0, 4:].tolist() == [1, 1, 1, 1], model[0]._mask.tolist()
