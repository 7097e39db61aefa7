import torch
from llmcompressor.core import State
from llmcompressor.modifiers.pruning import MagnitudePruningModifier

model = torch.nn.Sequential(torch.nn.Linear(4, 1))
model[0].weight.data = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]])
modifier = MagnitudePruningModifier(
    targets=["Linear"], init_sparsity=0.25, final_sparsity=0.25, start=0, end=1
)
modifier.initialize(State(model=model))
assert model[0].mask.tolist() == [[False, True, True, True]], model[0].mask.tolist()
