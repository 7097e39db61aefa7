"""Whether a pattern lies along the axis that a layer sums over."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsefn.patterns import Box, Pattern


def check_pattern_axis(module: nn.Module, path: str, pattern: Pattern) -> bool:
    """Whether the runs or blocks of a pattern lie along the input channels of a weight.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> [sf.modules.check_pattern_axis(net, "0.weight", sf.patterns.nm(2, 4, axis=a)) for a in (1, -1, 0)]
    [True, True, False]

    `path` is the dotted name of a parameter. Hardware that skips zeros wants N:M runs and blocks along the axis
    that the product sums over: 1 for Linear, recurrent and attention weights and convolutions, 0 for transposed
    convolutions and transformers' Conv1D, 1 or 2 for Bilinear. Patterns without runs or blocks of a fixed
    length pass, and so do weights that no product sums over (embeddings, biases, norms). Raises ValueError
    for a path that is no parameter, and for a shape that the pattern does not divide.
    """
    owner, _, name = path.rpartition(".")
    params = dict(module.named_parameters(remove_duplicate=False))
    if path not in params:
        raise ValueError(f"expected the path of a parameter, got {path!r}; they are {', '.join(map(repr, params))}")
    shape = tuple(params[path].shape)
    inputs, runs = _inputs(module.get_submodule(owner), name, shape), run_axes(pattern, shape)
    return not inputs or not runs or any(axis in inputs for axis in runs)


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


def _inputs(owner: nn.Module, name: str, shape: Box) -> tuple[int, ...]:
    # The axes of a parameter that the layer's product sums over; none is known for what is not listed.
    if len(shape) < 2:
        return ()
    if isinstance(owner, nn.Bilinear):
        return (1, 2)
    if isinstance(owner, _ConvTransposeNd) or type(owner).__name__ == "Conv1D":
        return (0,)
    if isinstance(owner, nn.Linear | _ConvNd | nn.RNNBase | nn.RNNCellBase):
        return (1,)
    if isinstance(owner, nn.MultiheadAttention) and name.endswith("proj_weight"):
        return (1,)
    return ()
