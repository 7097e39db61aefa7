"""SGD, Adam and AdamW as pure functions equal to torch.optim's, and mixtures."""

from sparsefn.optim.adam import AdamState as AdamState
from sparsefn.optim.adam import adam, adamw
from sparsefn.optim.averages import ema
from sparsefn.optim.base import Optimizer
from sparsefn.optim.by_path import by_path, parts
from sparsefn.optim.clipping import clip_norm
from sparsefn.optim.sgd import SgdState as SgdState
from sparsefn.optim.sgd import sgd

__all__ = [
    "Optimizer",
    "adam",
    "adamw",
    "by_path",
    "clip_norm",
    "ema",
    "parts",
    "sgd",
]
__dir__ = __all__.copy
