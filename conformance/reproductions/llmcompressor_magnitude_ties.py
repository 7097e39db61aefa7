import torch
from llmcompressor.core import State
from llmcompressor.modifiers.pruning import MagnitudePruningModifier

model = torch.nn.Sequential(torch.nn.Linear(10, 10))
torch.nn.init.ones_(model[0].weight)
modifier = MagnitudePruningModifier(
    targets=["Linear"], init_sparsity=0.5, final_sparsity=0.5, start=0, end=1
)
modifier.initialize(State(model=model))
assert int(model[0].mask.sum()) == 50, int(model[0].mask.sum())
