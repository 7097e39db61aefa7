"""Parameters of a module that a weight is computed from: by a parametrization, or by a
hook of torch's older kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsefn.core.tree.originals import Computed, computed_name, remove

# What makes a weight a parameter again, by the file of torch that has the hook which
# computes it.
_REMOVE = {
    "torch.nn.utils.weight_norm": "torch.nn.utils.remove_weight_norm",
    "torch.nn.utils.spectral_norm": "torch.nn.utils.remove_spectral_norm",
    "torch.nn.utils.prune": "torch.nn.utils.prune.remove",
}


def computed_from(module: nn.Module, path: str) -> Computed | None:
    """The weight that a layer of the module computes from a parameter.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3))
    >>> sf.modules.computed_from(layer, "parametrizations.weight.original1")
    Computed(path='weight',
    mend="torch.nn.utils.parametrize.remove_parametrizations(model, 'weight')")
    >>> sf.modules.computed_from(layer, "bias")

    Args:
        module: The module that the path begins at.
        path: Dotted path of a parameter.

    Returns:
        A named tuple with `path` of the weight, and `mend`, the call that makes the
        weight a parameter; its method `dense()` says both in a sentence. None for a
        parameter that no weight is computed from.

    It knows the parametrizations of torch, and the older hooks of `torch.nn.utils`.
    """
    return _by_parametrization(module, path) or _by_hook(module, path)


def _by_parametrization(module: nn.Module, path: str) -> Computed | None:
    weight = computed_name(path)
    if not weight or not is_parametrized(layer_of(module, weight)):
        return None
    return Computed(
        weight, remove("torch.nn.utils.parametrize.remove_parametrizations", weight)
    )


def _by_hook(module: nn.Module, path: str) -> Computed | None:
    # Such a hook puts the weight that it computes into an attribute of the layer. The
    # parameters have the name of the attribute with an end: weight_orig, or weight_g
    # and weight_v.
    owner, dot, name = path.rpartition(".")
    attributes = [name[:place] for place, letter in enumerate(name) if letter == "_"]
    if not attributes:
        return None
    layer = layer_of(module, path)
    shape = getattr(layer, name).shape
    calls = {
        _hooked(hook): _REMOVE.get(type(hook).__module__)
        for hook in layer._forward_pre_hooks.values()
    }
    for attribute in reversed(attributes):
        held = vars(layer).get(attribute)
        call = calls.get(attribute)
        if not isinstance(held, Tensor) or not (call or held.shape == shape):
            continue
        weight = f"{owner}{dot}{attribute}"
        return Computed(
            weight,
            remove(call, weight) if call else "the call that takes its hook away",
        )
    return None


def _hooked(hook: object) -> object:
    # The attribute that a hook of torch.nn.utils writes.
    return getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)


def check_masked(
    what: str,
    module: nn.Module,
    places: Mapping[str, str],
    masks: Mapping[str, Tensor],
) -> None:
    """Raise ValueError for a mask, not 0-d, of a parameter that a weight is computed
    from.

    >>> layer = torch.nn.utils.parametrizations.orthogonal(
    ...     torch.nn.Linear(2, 2, bias=False)
    ... )
    >>> path = "parametrizations.weight.original"
    >>> check_masked("call", layer, {path: path}, {path: torch.tensor(True)})

    `places` are the paths of the parameters in the module by name.
    """
    for name, mask in masks.items():
        found = None
        if mask.ndim and name in places:
            found = computed_from(module, places[name])
        if found is not None:
            raise ValueError(f"{what}: {found.refused(name)}")


def layer_of(module: nn.Module, path: str) -> nn.Module:
    """The layer that the parameter at a path belongs to.

    >>> layer_of(
    ...     torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 3)), "1.weight"
    ... )
    Linear(in_features=2, out_features=3, bias=True)
    """
    return module.get_submodule(path.rpartition(".")[0])
