import nncf
import torch

model = torch.nn.Linear(10, 10)
nncf.prune(
    model,
    nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL,
    ratio=0.5,
    examples_inputs=torch.ones(1, 10),
)
torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 10))
