"""SGD, Adam and AdamW as pure functions equal to torch.optim's, and mixtures."""

from sparsefn.optimizers.adam import AdamState as AdamState
from sparsefn.optimizers.adam import adam, adamw
from sparsefn.optimizers.averages import ema
from sparsefn.optimizers.base import Optimizer
from sparsefn.optimizers.by_path import by_path, parts
from sparsefn.optimizers.clipping import clip_norm
from sparsefn.optimizers.sgd import SgdState as SgdState
from sparsefn.optimizers.sgd import sgd

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
