"""The edge to `torch.optim`: masks in a module that its own optimizer trains."""

from sparsefn.attached.attach import attach as attach
from sparsefn.attached.attached import Attached as Attached
