import torch
from adapters.cerebras_functions import make

mask = make(torch.rand(200), torch.tensor(0.93))
assert int(mask.sum()) == 14, int(mask.sum())
