"""The edge to `torch.optim`: masks in a module that its own optimizer trains."""

from sparsefn.nn.attach.attach import attach
from sparsefn.nn.attach.handle import Attached

__all__ = ["Attached", "attach"]
__dir__ = __all__.copy
