"""Which parameters of a module are weights of matrix products, by the types of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from sparsefn.modules.wrappers import own_tensors
from sparsefn.state import Where
from sparsefn.tree import check_globs, glob_match
from sparsefn.where import as_globs, is_magnitude

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
_LAYERS = (nn.Linear, nn.Bilinear, *CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def weights_of(
    module: nn.Module, types: type[nn.Module] | Sequence[type[nn.Module]] | None = None, skip: str | Sequence[str] = ()
) -> Where:
    """The `where` that chooses the weights of a module by the types of its layers, not by name.

    >>> net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.LSTM(4, 4), torch.nn.Linear(4, 5))
    >>> where, params = sf.modules.weights_of(net, skip=["2"]), sf.modules.params_of(net)
    >>> [path for path, leaf in params.items() if where(path, leaf)]
    ['1.weight_ih_l0', '1.weight_hh_l0']

    Pass it to an algorithm: `sf.rigl(0.9, where=where)`. It looks at names only. By default it chooses the weights of
    linear and bilinear layers, convolutions, transposed ones too, recurrent layers and cells, projections inside of
    attention, and `Conv1D` of transformers; with `types` those of instances of these classes, where the weights of a
    class of your own are its parameters of two dimensions or more. It never chooses biases, norms, the magnitudes of
    weight norm, embeddings or weights tied to one. `skip` are globs of parameters, or of modules, all of whose
    weights stay dense. Raises ValueError where no layer of the types has a weight and for a glob that matches
    nothing, TypeError for types that are not classes.
    """
    kinds = None if types is None else _classes(types)
    named = own_tensors(module, "parameters", tied=True)
    embeddings = {
        id(param)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        for param in part.parameters()
    }
    found = {
        id(param)
        for path, param in named.values()
        if id(param) not in embeddings and is_weight(module, path, param, kinds)
    }
    if not found:
        layers = sorted({type(part).__name__ for part in module.modules()})
        wanted = "linear, convolution and recurrent" if kinds is None else ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"weights_of: no {wanted} layer has a weight that is no embedding; there are {layers}")
    globs = as_globs(skip, "skip", "a glob or a sequence of globs")
    check_globs("skip", globs, list(dict.fromkeys(part for name in named for part in _parents(name))))
    skipped = {
        id(param)
        for name, (_, param) in named.items()
        if any(glob_match(part, glob) for part in _parents(name) for glob in globs)
    }
    chosen = frozenset(
        name for name, (_, param) in own_tensors(module, "parameters").items() if id(param) in found - skipped
    )
    return lambda path, leaf: path in chosen


def is_weight(module: nn.Module, path: str, param: Tensor, types: tuple[type[nn.Module], ...] | None = None) -> bool:
    """Whether a parameter, at its path in the module, is the weight of a layer of these types.

    >>> layer = torch.nn.Linear(2, 3)
    >>> [is_weight(layer, path, param) for path, param in layer.named_parameters()]
    [True, False]
    """
    layer, name = layer_of(module, path)
    known = isinstance(layer, _LAYERS) or is_conv1d(layer) if types is None else isinstance(layer, types)
    return known and param.ndim >= 2 and "bias" not in name and not is_magnitude(path, param)


def layer_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The layer that a parameter belongs to, and its name there without parametrizations.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3))
    >>> layer_of(layer, "parametrizations.weight.original1")[1]
    'weight'
    """
    owner, _, name = path.rpartition(".")
    layer = module.get_submodule(owner)
    if not isinstance(layer, ParametrizationList):
        return layer, name
    *parents, _, name = owner.split(".")
    return module.get_submodule(".".join(parents)), name


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is a `Conv1D` of transformers, `x @ weight + bias`, told by the name of its class.

    >>> is_conv1d(torch.nn.Conv1d(1, 1, 1))
    False
    """
    return any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def _classes(types: type[nn.Module] | Sequence[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    kinds = (types,) if isinstance(types, type) else tuple(types)
    for kind in kinds:
        if not isinstance(kind, type):
            raise TypeError(f"expected types to be classes of layers, such as torch.nn.Linear, got {kind!r}")
    return kinds


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
