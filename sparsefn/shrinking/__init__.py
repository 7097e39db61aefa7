"""Physically smaller modules: groups of units that a model's code ties together, and
models without pruned units.

The files, in the order in which `sf.shrink` needs them:

- `trace`: a model, or submodules of it, as a graph of ATen operations.
- `analysis`: which dimensions of all its tensors lose entries together, in a union-find
  (`channels`) over what is known of each tensor (`values`). Operations have their rules
  in `products`, `reindexing` and `norms`; `probe` runs any other to see what it does.
- `groups`: the units that compete, and the pattern that prunes them.
- `plan`: which channels go, what stays of each tensor, and what the rest costs.
- `rebuild`: the smaller model, of the same class, whose modules keep fitting sizes
  (`layers`, `attributes`), or as a program of smaller operations (`rewrites`).
- `proof`: whether it gives the outputs of the masked model.
- `shrink`: all of this in turn, and how training goes on; `experts` for experts.
- `permute`: the same groups in another order of channels, for N:M masks.
"""

from sparsefn.shrinking.experts import without_experts
from sparsefn.shrinking.groups import Groups, groups
from sparsefn.shrinking.permute import Permuted, permute
from sparsefn.shrinking.plan import weights
from sparsefn.shrinking.shrink import Smaller, carry, carry_optimizer, shrink, smaller

__all__ = [
    "Groups",
    "Permuted",
    "Smaller",
    "carry",
    "carry_optimizer",
    "groups",
    "permute",
    "shrink",
    "smaller",
    "weights",
    "without_experts",
]
__dir__ = __all__.copy
