"""Physically smaller modules: groups of units that a model's code ties together, and
models without pruned units.

The files, in the order in which `sf.shrink` needs them:

- `trace`: a model, or submodules of it, as a graph of ATen operations.
- `analysis`: which dimensions of all its tensors lose entries together, in a union-find
  (`channels`) over what is known of each tensor (`values`). Operations have their rules
  in `products`, `reindexing` and `norms`; `probe` runs any other to see what it does.
- `groups`: the units that compete, and the pattern that prunes them.
- `residuals`, `depth`: the sums x + f(x) of a program, and these layers as units,
  with scores (`depth_scores`).
- `plan`: which channels go, what stays of each tensor, and what the rest costs.
- `removal`: the model with shorter lists of modules, without layers that are zero.
- `rebuild`: the smaller model, of the same class, whose modules and configs keep
  fitting sizes (`small_layers`, `attributes`, `config_numbers`), or as a program of
  smaller operations (`rewrites`).
- `proof`: whether it gives the outputs of the masked model.
- `shrink`: all of this in turn, `experts` for experts; `carry`: how training goes on.
- `permute`: the same groups in another order of channels, for N:M masks.
"""

from sparsefn.shrinking.carry import carry, carry_optimizer
from sparsefn.shrinking.depth import Layers, layers
from sparsefn.shrinking.depth_scores import angular_distance, influence, loss_without
from sparsefn.shrinking.experts import without_experts
from sparsefn.shrinking.groups import Groups, groups
from sparsefn.shrinking.permute import Permuted, permute
from sparsefn.shrinking.plan import weights
from sparsefn.shrinking.shrink import Smaller, shrink, smaller

__all__ = [
    "Groups",
    "Layers",
    "Permuted",
    "Smaller",
    "angular_distance",
    "carry",
    "carry_optimizer",
    "groups",
    "influence",
    "layers",
    "loss_without",
    "permute",
    "shrink",
    "smaller",
    "weights",
    "without_experts",
]
__dir__ = __all__.copy
