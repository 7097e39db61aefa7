import copy

import torch
from torch.nn.utils import prune

layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
layer(torch.ones(1, 4))
copy.deepcopy(layer)
