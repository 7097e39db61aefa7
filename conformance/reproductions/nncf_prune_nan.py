import nncf
import torch

model = torch.nn.Linear(4, 1)
model.weight.data = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]])
nncf.prune(
    model,
    nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL,
    ratio=0.25,
    examples_inputs=torch.ones(1, 4),
)
mask = next(buffer for name, buffer in model.named_buffers() if "mask" in name)
assert mask.tolist() == [[False, True, True, True]], mask.tolist()
