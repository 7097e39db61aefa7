"""How far pruning moves the outputs of each layer, from statistics of its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from sparsefn._engine.numbers import as_matrix
from sparsefn.core.checks import aligned
from sparsefn.core.state import State, effective
from sparsefn.core.tree import Tree, flatten
from sparsefn.core.tree.where import matching
from sparsefn.masks.scores.data import Stats, check_stats


class OutputErrors(NamedTuple):
    """The result of `output_errors`; `str()` of it is a table.

    >>> sf.report.OutputErrors({"0.weight": 0.25}, {"0.*": 0.25}).blocks
    {'0.*': 0.25}

    Attributes:
        layers: Error of each leaf, by its path.
        blocks: Error of all leaves that a glob matches together, by the glob.
    """

    layers: dict[str, float]
    blocks: dict[str, float]

    def __str__(self) -> str:
        """Align the layers, with the blocks below."""
        lines = [
            (name, f"{error:.4f}")
            for name, error in (*self.layers.items(), *self.blocks.items())
        ]
        return aligned([("layer", "error"), *lines], left=1)


def output_errors(
    before: State | Tree,
    after: State | Tree,
    stats: Stats,
    blocks: Sequence[str] = (),
) -> OutputErrors:
    """How far the outputs of each layer move between two sets of weights.

    >>> layer, x = (
    ...     torch.nn.Linear(2, 1, bias=False),
    ...     torch.tensor([[3.0, 1.0], [0.0, 1.0]]),
    ... )
    >>> stats = sf.calibration.inputs(layer, None, x)
    >>> before, after = (
    ...     {"weight": torch.tensor([[1.0, 1.0]])},
    ...     {"weight": torch.tensor([[1.0, 0.0]])},
    ... )
    >>> print(sf.report.output_errors(before, after, stats))  # outputs 4, 1, then 3, 0
    layer    error
    weight  0.3430
    >>> (2 / 17) ** 0.5
    0.3429...

    Args:
        before: The weights W: a state, whose effective weights count, or a tree.
        after: The weights V, as `before`.
        stats: Statistics by path, from `sf.calibration.inputs`, with "gram". Its leaves
            have a row each.
        blocks: Globs, each for the leaves of a block.

    Returns:
        The error of each leaf by its path, and of each block by its glob. `str()` of it
        is a table. An error is ||X (W - V)'|| / ||X W'||, Frobenius norms, where X has
        a row for each input; in a block, the root of the sum of the squared changes of
        outputs over the sum of their squares. Where outputs were all zero it is 0.0, or
        inf if they no longer are.

    Raises:
        TypeError: A module is given in place of its weights, `stats` are not by path,
            or `blocks` is one glob in place of a sequence.
        ValueError: The weights lack a leaf of `stats` or have another shape, statistics
            lack "gram", "count" or "square" or no input reached them, each with its
            path; or a glob matches no leaf.

    With the gram G = X' X the error is sqrt(tr(D G D') / tr(W G W')) with D = W - V, in
    float64. A gram in float32 has errors of about 1e-7, so that an error below 1e-3 is
    not exact. Inputs are the same before and after. So errors of earlier layers do not
    add up here, as they do in the errors that `sf.calibration.by_block` and `stream`
    give. Biases do not count. Reading the values waits for the device.
    """
    check_stats("output_errors", stats)
    if isinstance(blocks, str):
        raise TypeError(
            "output_errors: expected blocks to be a sequence, with a glob a block, "
            f"got {blocks!r}"
        )
    for tree in (before, after):
        if isinstance(tree, nn.Module):
            kind = type(tree).__name__
            raise TypeError(
                f"output_errors: expected weights by path, got a {kind}: take "
                "sf.modules.params_of(model)"
            )
    old, new = (
        flatten(effective(tree) if isinstance(tree, State) else tree)[0]
        for tree in (before, after)
    )
    squares = {path: _squares(path, old, new, stats) for path in stats}
    layers = {path: _error([squares[path]]) for path in stats}
    seen = {path: old[path] for path in stats}
    together = {}
    for glob in blocks:
        block = matching("blocks", glob, seen)
        together[glob] = _error([squares[path] for path in block])
    return OutputErrors(layers, together)


def _squares(
    path: str,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    stats: Stats,
) -> tuple[float, float]:
    # Of the outputs of one layer, the square of their change and their own.
    for name, leaves in (("before", old), ("after", new)):
        if path not in leaves:
            raise ValueError(
                f"output_errors: expected a weight at {path!r} in {name}, as stats "
                "have, got none"
            )
    weight = old[path].detach()
    other = new[path].detach()
    of = stats[path]
    if weight.shape != other.shape:
        shapes = f"{tuple(weight.shape)} and {tuple(other.shape)}"
        raise ValueError(
            f"output_errors: expected weights of one shape at {path!r}, got {shapes}"
        )
    for name in ("gram", "count", "square"):
        if name not in of:
            got = ", ".join(of)
            raise ValueError(
                f"output_errors: expected {name!r} in the statistics at {path!r}, got "
                f"{got}: collect it"
            )
    if not of["count"].any():
        raise ValueError(
            f"output_errors: no data for {path!r}: no input of the calibration data "
            "reached it"
        )
    gram = of["gram"].double()
    try:
        matrices = [
            as_matrix(x, of)[0]
            for x in (weight.double() - other.double(), weight.double())
        ]
    except ValueError as error:
        raise ValueError(f"output_errors: at {path!r}, {error}") from None
    change, own = (float(((x @ gram) * x).sum()) for x in matrices)
    # rounding of the gram may leave less than nothing
    return max(change, 0.0), max(own, 0.0)


def _error(squares: Sequence[tuple[float, float]]) -> float:
    change, own = (math.fsum(part) for part in zip(*squares, strict=True))
    if not own:
        return math.inf if change else 0.0
    return math.sqrt(change / own)
