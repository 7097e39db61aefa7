import nncf
import torch

x, mode = torch.ones(1, 10), nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL
models = [
    nncf.prune(torch.nn.Linear(10, 10), mode, ratio=0.5, examples_inputs=x)
    for _ in "ab"
]
stacked = torch.func.stack_module_state(models)
together = torch.func.vmap(
    lambda *state: torch.func.functional_call(models[0], state, (x,))
)(*stacked)
assert torch.allclose(together[1], models[1](x), atol=1e-5), float(
    (together[1] - models[1](x)).abs().max()
)
