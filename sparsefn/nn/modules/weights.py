"""Which parameters of a module are weights of matrix products, by the types of its
layers, and along which axes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sparsefn.core.state import Where
from sparsefn.core.tree import check_globs, glob_match
from sparsefn.core.tree.originals import Computed, is_magnitude
from sparsefn.core.tree.where import as_globs
from sparsefn.masks.patterns.kinds import Box, Pattern
from sparsefn.nn.modules.originals import computed_from, layer_of
from sparsefn.nn.modules.wrappers import own_tensors, tensors_by_name

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    *CONVOLUTIONS,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)


def weights_of(
    module: nn.Module,
    types: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    skip: str | Sequence[str] = (),
) -> Where:
    """The `where` that chooses a module's weights by the types of its layers.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Embedding(5, 4), torch.nn.LSTM(4, 4), torch.nn.Linear(4, 5)
    ... )
    >>> where, params = (
    ...     sf.modules.weights_of(net, skip=["2"]),
    ...     sf.modules.params_of(net),
    ... )
    >>> [path for path, leaf in params.items() if where(path, leaf)]
    ['1.weight_ih_l0', '1.weight_hh_l0']

    Args:
        module: The module.
        types: Class of layers, or several. Their weights are their parameters of two
            dimensions or more. Default: linear and bilinear layers, convolutions,
            transposed ones too, recurrent layers and cells, projections inside of
            attention, and `Conv1D` of transformers.
        skip: Globs of parameters, or of modules, all of whose weights stay dense.

    Returns:
        A function of (path, leaf) to pass to an algorithm, `sf.rigl(0.9, where=where)`.
        It looks at names only.

    Raises:
        TypeError: `types` are not classes, or `skip` is neither a glob nor a sequence
            of globs.
        ValueError: No layer of the types has a weight, or a glob matches nothing.

    It never chooses biases, norms, embeddings or weights tied to one, nor what a weight
    is computed from, as weight norm does: a UserWarning names such a weight.
    """
    kinds = None if types is None else _classes(types)
    named = own_tensors(module, "parameters", tied=True)
    embeddings = [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    found = {
        id(param)
        for path, param in named.values()
        if is_weight(module, path, param, kinds)
    }
    found -= {id(param) for part in embeddings for param in part.parameters()}
    computed = _computed_weights(module, named, kinds)
    if not found:
        layers = sorted({type(part).__name__ for part in module.modules()})
        if kinds is None:
            wanted = "linear, convolution and recurrent"
        else:
            wanted = ", ".join(kind.__name__ for kind in kinds)
        why = next(
            (f": {weight.dense()}" for weight in computed.values()),
            f"; there are {layers}",
        )
        raise ValueError(
            f"weights_of: no {wanted} layer has a weight that is no embedding{why}"
        )
    globs = as_globs(skip, "skip", "a glob or a sequence of globs")
    check_globs(
        "skip",
        globs,
        list(dict.fromkeys(part for name in named for part in _parents(name))),
    )
    for name, (_, param) in named.items():
        if any(glob_match(part, glob) for part in _parents(name) for glob in globs):
            found.discard(id(param))
            computed.pop(name, None)
    if computed:
        warnings.warn(
            f"weights_of: {next(iter(computed.values())).dense()}",
            UserWarning,
            stacklevel=2,
        )
    chosen = frozenset(
        name for name, param in tensors_by_name(module).items() if id(param) in found
    )
    return lambda path, leaf: path in chosen


def pattern_axis(module: nn.Module, path: str) -> int:
    """The axis of a weight that a product sums over, for `sf.patterns.nm` and `block`.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 4), torch.nn.ConvTranspose2d(4, 8, 2)
    ... )
    >>> [sf.modules.pattern_axis(net, path) for path in ("0.weight", "1.weight")]
    [1, 0]

    Args:
        module: The module.
        path: Name of a parameter in `params_of(module)`.

    Returns:
        Axis of the stored tensor, as patterns count axes. It is 1 for Linear, recurrent
        and attention weights and convolutions, 0 for transposed convolutions and
        transformers' Conv1D, and the last, 2, for Bilinear, which sums over 1 as well.
        For experts in one leaf, as transformers has them, 2, or 1 where they are stored
        as [experts, in, out], as in gpt-oss.

    Raises:
        ValueError: `path` is not a parameter, or no product sums over the parameter.

    Hardware that skips zeros wants N:M runs along the inputs. Layers of two kinds take
    two patterns:

    >>> where, params = sf.modules.weights_of(net), sf.modules.params_of(net)
    >>> axes = {
    ...     path: sf.modules.pattern_axis(net, path)
    ...     for path, leaf in params.items()
    ...     if where(path, leaf)
    ... }
    >>> parts = []
    >>> for axis in sorted({*axes.values()}):
    ...     paths = [path for path in axes if axes[path] == axis]
    ...     parts.append(
    ...         (
    ...             paths,
    ...             sf.ste(None, pattern=sf.patterns.nm(2, 4, axis=axis), where=paths),
    ...         )
    ...     )
    >>> masks = sf.partition(parts).init(params).masks
    >>> masks["0.weight"].sum(1), masks["1.weight"].sum(0).unique()
    (tensor([4, 4, 4, 4]), tensor([2]))
    """
    return _axes(module, path)[0]


def channel_axis(module: nn.Module, path: str) -> int:
    """The axis of a weight that outputs lie along, for `sf.patterns.channel`.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 4), torch.nn.ConvTranspose2d(4, 8, 2)
    ... )
    >>> [sf.modules.channel_axis(net, path) for path in ("0.weight", "1.weight")]
    [0, 1]

    Args:
        module: The module.
        path: Name of a parameter in `params_of(module)`.

    Returns:
        Axis 1 for transposed convolutions (with groups, the outputs of one group) and
        transformers' Conv1D, 1 or 2 for experts in one leaf, else 0. In recurrent and
        in-projection weights the gates or projections follow each other along it, which
        is `channel(..., groups=)`.

    Raises:
        ValueError: As in `pattern_axis`.
    """
    return _axes(module, path)[1]


def check_pattern_axis(module: nn.Module, path: str, pattern: Pattern) -> bool:
    """Whether the runs or blocks of a pattern lie along the input channels of a weight.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> [
    ...     sf.modules.check_pattern_axis(net, "0.weight", sf.patterns.nm(2, 4, axis=a))
    ...     for a in (1, -1, 0)
    ... ]
    [True, True, False]

    Args:
        module: The module.
        path: Name of a parameter in `params_of(module)`.
        pattern: The pattern.

    Returns:
        True where the pattern has runs or blocks along the result of `pattern_axis`,
        or, for Bilinear, along one of its two input axes. Patterns without runs or
        blocks of a fixed length pass, and so do weights that no product sums over
        (embeddings, biases, norms).

    Raises:
        ValueError: `path` is not a parameter, or the pattern does not divide its shape.
    """
    layer, param = _parameter(module, path)
    runs = run_axes(pattern, tuple(param.shape))
    if layer is None or not runs:
        return True
    return any(
        axis in runs
        for axis in (
            (1, 2) if isinstance(layer, nn.Bilinear) else (_axes(module, path)[0],)
        )
    )


def is_weight(
    module: nn.Module,
    path: str,
    param: Tensor,
    types: tuple[type[nn.Module], ...] | None = None,
) -> bool:
    """Whether a parameter, at its path in the module, is the weight of a layer of these
    types.

    >>> layer = torch.nn.Linear(2, 3)
    >>> [is_weight(layer, path, param) for path, param in layer.named_parameters()]
    [True, False]
    """
    if computed_from(module, path):
        return False
    is_other = "bias" in path.rpartition(".")[2] or is_magnitude(path, param)
    return _is_of(layer_of(module, path), types) and param.ndim >= 2 and not is_other


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is a `Conv1D` of transformers, `x @ weight + bias`, known by the
    name of its class.

    >>> is_conv1d(torch.nn.Conv1d(1, 1, 1))
    False
    """
    return any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def _is_of(layer: nn.Module, types: tuple[type[nn.Module], ...] | None) -> bool:
    if types is None:
        return isinstance(layer, _LAYERS) or is_conv1d(layer)
    return isinstance(layer, types)


def _computed_weights(
    module: nn.Module,
    named: Mapping[str, tuple[str, Tensor]],
    types: tuple[type[nn.Module], ...] | None,
) -> dict[str, Computed]:
    # The weights of layers of these types that are computed, by the name of a parameter
    # that they are computed from.
    found = {}
    for name, (path, param) in named.items():
        computed = None
        if param.ndim >= 2:
            computed = computed_from(module, path)
        if computed is not None and _is_of(layer_of(module, computed.path), types):
            found[name] = computed
    return found


def are_experts(layer: nn.Module) -> bool:
    """Whether a layer has the weights of experts in one leaf, as transformers says of
    them from 5.0 on.

    >>> are_experts(torch.nn.Linear(1, 1))
    False
    """
    return isinstance(getattr(layer, "is_transposed", None), bool)


def _classes(
    types: type[nn.Module] | Sequence[type[nn.Module]],
) -> tuple[type[nn.Module], ...]:
    kinds = (types,) if isinstance(types, type) else tuple(types)
    for kind in kinds:
        if not isinstance(kind, type):
            raise TypeError(
                "expected types to be classes of layers, such as torch.nn.Linear, "
                f"got {kind!r}"
            )
    return kinds


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def run_axes(pattern: Pattern, shape: Box) -> set[int]:
    """The dimensions along which units or competing groups have a fixed length above 1.

    >>> (
    ...     run_axes(sf.patterns.nm(2, 4, axis=-1), (8, 8)),
    ...     run_axes(sf.patterns.channel(0), (8, 8)),
    ... )
    ({1}, set())

    A length is fixed if it does not grow with the tensor.
    """
    twice = tuple(2 * size for size in shape)
    boxes = [(pattern.unit(shape), pattern.unit(twice))]
    # units are elements, so that the grid of units is the tensor
    if set(boxes[0][0]) <= {1}:
        boxes.append((pattern.group(shape), pattern.group(twice)))
    return {
        axis
        for box, larger in boxes
        for axis, (a, b) in enumerate(zip(box, larger, strict=True))
        if a == b > 1
    }


def _parameter(module: nn.Module, path: str) -> tuple[nn.Module | None, Tensor]:
    # The layer is None where no product sums over the parameter, as far as the layer's
    # type tells.
    named = own_tensors(module, "parameters", tied=True)
    if path not in named:
        raise ValueError(
            f"expected the path of a parameter, got {path!r}; they are "
            f"{', '.join(map(repr, named))}"
        )
    inside, param = named[path]
    layer = layer_of(module, inside)
    name = inside.rpartition(".")[2]
    known = is_weight(module, inside, param) or (
        are_experts(layer) and param.ndim == 3 and "bias" not in name
    )
    return layer if known else None, param


def _axes(module: nn.Module, path: str) -> tuple[int, int]:
    layer, _ = _parameter(module, path)
    if layer is None:
        raise ValueError(
            f"expected the weight of a layer that multiplies with it, got {path!r}"
        )
    if isinstance(layer, nn.Bilinear):
        return 2, 0
    if are_experts(layer):
        if layer.is_transposed:
            return (1, 2)
        return (2, 1)
    if isinstance(layer, TRANSPOSED) or is_conv1d(layer):
        return (0, 1)
    return (1, 0)
