"""Parameters of a module that a weight is computed from: by a parametrization, or by a hook of torch's older kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsefn.tree.originals import no_weight, stays_dense, submodule, without_parametrizations

# What makes a weight a parameter again, by the file of torch that has the hook which computes it.
_REMOVE = {
    "torch.nn.utils.weight_norm": "torch.nn.utils.remove_weight_norm",
    "torch.nn.utils.spectral_norm": "torch.nn.utils.remove_spectral_norm",
    "torch.nn.utils.prune": "torch.nn.utils.prune.remove",
}


class Computed(NamedTuple):
    """A weight that a layer computes from parameters: its path, and the call that makes it a parameter."""

    path: str
    mend: str

    def dense(self) -> str:
        """That it stays dense, and what to do.

        >>> Computed("weight", "torch.nn.utils.remove_weight_norm(model, 'weight')").dense()[:39]
        "'weight' is computed, so it stays dense"
        """
        return stays_dense(self.path, self.mend)


def computed_from(module: nn.Module, path: str) -> Computed | None:
    """The weight that a layer computes from the parameter at this path of the module; None for other parameters.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3))
    >>> computed_from(layer, "parametrizations.weight.original1")
    Computed(path='weight', mend="torch.nn.utils.parametrize.remove_parametrizations(model, 'weight')")
    >>> computed_from(layer, "bias")
    """
    return _by_parametrization(module, path) or _by_hook(module, path)


def _by_parametrization(module: nn.Module, path: str) -> Computed | None:
    layer, found, rest = f".{path}".partition(".parametrizations.")
    if not found or not is_parametrized(module.get_submodule(layer[1:])):
        return None
    weight = f"{layer}.{rest.split('.')[0]}"[1:]
    return Computed(weight, without_parametrizations(weight))


def _by_hook(module: nn.Module, path: str) -> Computed | None:
    # Such a hook puts the weight that it computes into an attribute of the layer. The parameters have the name of the
    # attribute with an end: weight_orig, or weight_g and weight_v.
    owner, _, name = path.rpartition(".")
    layer = module.get_submodule(owner)
    shape = layer.get_parameter(name).shape
    hooks = {_hooked(hook): _REMOVE.get(type(hook).__module__) for hook in layer._forward_pre_hooks.values()}
    ends = [place for place, letter in enumerate(name) if letter == "_"]
    for attribute in (name[:end] for end in reversed(ends)):
        held, remove = vars(layer).get(attribute), hooks.get(attribute)
        if not isinstance(held, Tensor) or not (remove or held.shape == shape):
            continue
        mend = f"{remove}({submodule(owner)}, {attribute!r})" if remove else "the call that takes its hook away"
        return Computed(f"{owner}.{attribute}".lstrip("."), mend)
    return None


def _hooked(hook: object) -> object:
    # The attribute that a hook of torch.nn.utils writes.
    return getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)


def check_masked(what: str, module: nn.Module, places: Mapping[str, str], masks: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a mask, not 0-d, of a parameter that a weight is computed from.

    >>> layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(2, 2, bias=False))
    >>> path = "parametrizations.weight.original"
    >>> check_masked("call", layer, {path: path}, {path: torch.tensor(True)})

    `places` are the paths of the parameters in the module by name.
    """
    for name, mask in masks.items():
        found = computed_from(module, places[name]) if mask.ndim and name in places else None
        if found is not None:
            raise ValueError(f"{what}: {no_weight(name, found.path, found.mend)}")
