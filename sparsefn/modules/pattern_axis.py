"""The axes of a weight that are a layer's inputs and outputs, and whether a pattern fits them."""

from __future__ import annotations

from torch import Tensor, nn

from sparsefn.modules.weights import TRANSPOSED, is_conv1d, is_weight, layer_of
from sparsefn.modules.wrappers import own_tensors
from sparsefn.patterns.kinds import Box, Pattern


def pattern_axis(module: nn.Module, path: str) -> int:
    """The axis of a weight that the layer's product sums over, for `sf.patterns.nm` and `block`.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ConvTranspose2d(4, 8, 2))
    >>> [sf.modules.pattern_axis(net, path) for path in ("0.weight", "1.weight")]
    [1, 0]

    `path` is the name of a parameter in `params_of(module)`. Patterns count axes in the tensor as it is, and hardware
    that skips zeros wants N:M runs along the inputs: axis 1 for Linear, recurrent and attention weights and
    convolutions, 0 for transposed convolutions and transformers' Conv1D, and the last, 2, for Bilinear, which sums
    over 1 as well. Layers of two kinds take two patterns:

    >>> where, params = sf.modules.weights_of(net), sf.modules.params_of(net)
    >>> axes = {path: sf.modules.pattern_axis(net, path) for path, leaf in params.items() if where(path, leaf)}
    >>> parts = []
    >>> for axis in sorted({*axes.values()}):
    ...     paths = [path for path in axes if axes[path] == axis]
    ...     parts.append((paths, sf.ste(None, pattern=sf.patterns.nm(2, 4, axis=axis), where=paths)))
    >>> masks = sf.partition(parts).init(params).masks
    >>> masks["0.weight"].sum(1), masks["1.weight"].sum(0).unique()
    (tensor([4, 4, 4, 4]), tensor([2]))

    Raises ValueError for a path that is not a parameter, and for a parameter that no product sums over.
    """
    return _axes(module, path)[0]


def channel_axis(module: nn.Module, path: str) -> int:
    """The axis of a weight that the layer's outputs lie along, for `sf.patterns.channel`.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ConvTranspose2d(4, 8, 2))
    >>> [sf.modules.channel_axis(net, path) for path in ("0.weight", "1.weight")]
    [0, 1]

    Axis 1 for transposed convolutions (with groups: the outputs of one group) and transformers' Conv1D, else 0;
    in recurrent and in-projection weights the gates or projections follow each other along it, which is
    `channel(..., groups=)`. Raises as `pattern_axis` does.
    """
    return _axes(module, path)[1]


def check_pattern_axis(module: nn.Module, path: str, pattern: Pattern) -> bool:
    """Whether the runs or blocks of a pattern lie along the input channels of a weight.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> [sf.modules.check_pattern_axis(net, "0.weight", sf.patterns.nm(2, 4, axis=a)) for a in (1, -1, 0)]
    [True, True, False]

    `path` is the name of a parameter, and the axis the one that `pattern_axis` gives; either of Bilinear's is right.
    Patterns without runs or blocks of a fixed length pass, and so do weights that no product sums over
    (embeddings, biases, norms). Raises ValueError for a path that is not a parameter, and for a shape that the
    pattern does not divide.
    """
    layer, param = _parameter(module, path)
    runs = run_axes(pattern, tuple(param.shape))
    if layer is None or not runs:
        return True
    return any(axis in runs for axis in ((1, 2) if isinstance(layer, nn.Bilinear) else (_axes(module, path)[0],)))


def run_axes(pattern: Pattern, shape: Box) -> set[int]:
    """The dimensions along which units or competing groups have a fixed length above 1.

    >>> run_axes(sf.patterns.nm(2, 4, axis=-1), (8, 8)), run_axes(sf.patterns.channel(0), (8, 8))
    ({1}, set())

    A length is fixed if it does not grow with the tensor.
    """
    twice = tuple(2 * size for size in shape)
    boxes = [(pattern.unit(shape), pattern.unit(twice))]
    if set(boxes[0][0]) <= {1}:  # units are elements, so that the grid of units is the tensor
        boxes.append((pattern.group(shape), pattern.group(twice)))
    return {axis for box, larger in boxes for axis, (a, b) in enumerate(zip(box, larger, strict=True)) if a == b > 1}


def _parameter(module: nn.Module, path: str) -> tuple[nn.Module | None, Tensor]:
    # The layer is None where no product sums over the parameter, as far as the layer's type tells.
    named = own_tensors(module, "parameters", tied=True)
    if path not in named:
        raise ValueError(f"expected the path of a parameter, got {path!r}; they are {', '.join(map(repr, named))}")
    inside, param = named[path]
    return layer_of(module, inside)[0] if is_weight(module, inside, param) else None, param


def _axes(module: nn.Module, path: str) -> tuple[int, int]:
    layer, _ = _parameter(module, path)
    if layer is None:
        raise ValueError(f"expected the weight of a layer that multiplies with it, got {path!r}")
    if isinstance(layer, nn.Bilinear):
        return 2, 0
    return (0, 1) if isinstance(layer, TRANSPOSED) or is_conv1d(layer) else (1, 0)
