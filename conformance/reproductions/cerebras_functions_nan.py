import torch
from adapters.cerebras_functions import make

mask = make(torch.tensor([float("nan"), 1.0]), torch.tensor(0.5))
assert mask.tolist() == [False, True], mask
