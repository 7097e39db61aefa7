"""SGD, Adam and AdamW as pure functions, equal to torch.optim's, and mixtures of them."""

from sparsefn.optimizers.adam import AdamState as AdamState
from sparsefn.optimizers.adam import adam as adam
from sparsefn.optimizers.adam import adamw as adamw
from sparsefn.optimizers.base import Optimizer as Optimizer
from sparsefn.optimizers.by_path import by_path as by_path
from sparsefn.optimizers.by_path import parts as parts
from sparsefn.optimizers.sgd import SgdState as SgdState
from sparsefn.optimizers.sgd import sgd as sgd
