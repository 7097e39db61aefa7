"""Parameters that a weight is computed from, which torch calls originals.

Here their names tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from sparsefn._engine.transforms import at_compile_time


class Computed(NamedTuple):
    """A weight that a layer computes: its path, and the call that makes it a parameter.

    >>> Computed(
    ...     "0.weight", "torch.nn.utils.remove_weight_norm(model[0], 'weight')"
    ... ).dense()[:41]
    "'0.weight' is computed, so it stays dense"

    Attributes:
        path: Dotted path of the weight.
        mend: The call, as a line of Python, that makes the weight a parameter.
    """

    path: str
    mend: str

    def dense(self) -> str:
        """That it stays dense, and what to do."""
        return (
            f"{self.path!r} is computed, so it stays dense: to sparsify it make it a "
            f"parameter, before the optimizer is made, with {self.mend}"
        )

    def refused(self, original: str) -> str:
        """That a parameter which it is computed from gets no mask, and what to do."""
        return (
            f"{original!r} is no weight: {self.path!r} is computed from it, and zeros "
            f"in it need not be zeros in {self.path!r}. Make {self.path!r} a "
            f"parameter, before the optimizer is made, with {self.mend}, or leave "
            f"{original!r} out of `where`"
        )


@at_compile_time
def computed_name(path: str) -> str:
    """The path of the weight that a parametrization of torch computes from a parameter;
    empty for other parameters.

    >>> computed_name("0.parametrizations.weight.original1"), computed_name("0.weight")
    ('0.weight', '')
    """
    layer, found, rest = f".{path}".partition(".parametrizations.")
    return f"{layer}.{rest.split('.')[0]}"[1:] if found else ""


def computed_by_name(path: str, leaves: Mapping[str, Tensor]) -> Computed | None:
    """The weight that is computed from one of these leaves, as far as their names tell.

    >>> leaves = {
    ...     "0.weight_g": torch.ones(3, 1),
    ...     "0.weight_v": torch.ones(3, 2),
    ...     "0.bias": torch.ones(3),
    ... }
    >>> computed_by_name("0.weight_v", leaves)
    Computed(path='0.weight',
    mend="torch.nn.utils.remove_weight_norm(model.get_submodule('0'), 'weight')")
    >>> computed_by_name("0.bias", leaves)

    It knows the names of parametrizations, and of the older
    `torch.nn.utils.weight_norm` (`weight_g` and `weight_v`), `spectral_norm` and
    `prune` (`weight_orig`), which leave no leaf of the weight's own name.
    """
    if name := computed_name(path):
        return Computed(
            name, remove("torch.nn.utils.parametrize.remove_parametrizations", name)
        )
    name, _, end = path.rpartition("_")
    if name in leaves:
        return None
    if (
        end == "v"
        and f"{name}_g" in leaves
        and is_magnitude(f"{name}_g", leaves[f"{name}_g"])
    ):
        return Computed(name, remove("torch.nn.utils.remove_weight_norm", name))
    if end == "orig":
        norm = remove("torch.nn.utils.remove_spectral_norm", name)
        return Computed(
            name, f"{norm} or {remove('torch.nn.utils.prune.remove', name)}"
        )
    return None


def is_magnitude(path: str, leaf: Tensor) -> bool:
    """Whether a leaf is the magnitudes that weight norm keeps beside the directions of
    a weight.

    >>> (
    ...     is_magnitude("weight_g", torch.ones(4, 1)),
    ...     is_magnitude("weight_v", torch.ones(4, 4)),
    ... )
    (True, False)
    """
    return path.endswith("_g") and sum(size > 1 for size in leaf.shape) <= 1


def check_weights(
    what: str, paths: Iterable[str], leaves: Mapping[str, Tensor]
) -> None:
    """Raise ValueError for the first of these leaves that a weight is computed from.

    >>> check_weights("where", ["weight"], {"weight": torch.ones(2, 2)})
    """
    for path in paths:
        computed = computed_by_name(path, leaves)
        if computed is not None:
            raise ValueError(f"{what}: {computed.refused(path)}")


def remove(call: str, weight: str) -> str:
    """How to write a call that takes away what computes a weight of a model.

    >>> remove("torch.nn.utils.prune.remove", "0.a.weight")
    "torch.nn.utils.prune.remove(model.get_submodule('0.a'), 'weight')"
    >>> remove("torch.nn.utils.prune.remove", "weight")
    "torch.nn.utils.prune.remove(model, 'weight')"
    """
    layer, _, name = weight.rpartition(".")
    where = f"model.get_submodule({layer!r})" if layer else "model"
    return f"{call}({where}, {name!r})"
