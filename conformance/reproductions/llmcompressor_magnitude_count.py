import torch
from llmcompressor.core import State
from llmcompressor.modifiers.pruning import MagnitudePruningModifier

model = torch.nn.Sequential(torch.nn.Linear(10, 10))
modifier = MagnitudePruningModifier(
    targets=["Linear"], init_sparsity=0.29, final_sparsity=0.29, start=0, end=1
)
modifier.initialize(State(model=model))
assert int(model[0].mask.sum()) == 71, int(model[0].mask.sum())
