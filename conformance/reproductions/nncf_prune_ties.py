import nncf
import torch

model = torch.nn.Linear(10, 10)
torch.nn.init.ones_(model.weight)
nncf.prune(model, nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL, ratio=0.5, examples_inputs=torch.ones(1, 10))
mask = next(buffer for name, buffer in model.named_buffers() if "mask" in name)
assert int(mask.sum()) == 50, int(mask.sum())
