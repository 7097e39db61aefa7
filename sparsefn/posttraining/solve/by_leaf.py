"""Solvers of one layer at the leaves of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn._engine.numbers import as_matrix, flags_of
from sparsefn.core.checks import check_call, described
from sparsefn.core.state import Step
from sparsefn.masks.scores.data import UNREACHED, Stats, check_stats


@described
def layerwise(
    stats: Stats, fn: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Callable[[str, Tensor, Tensor, Step], tuple[Tensor, Tensor]]:
    """What `sf.rewrite` takes, out of a solver of one layer and the statistics of all.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> stats = sf.calibration.inputs(
    ...     layer, None, torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    ... )
    >>> fn = sf.solve.layerwise(
    ...     stats,
    ...     lambda weight, gram, mask: sf.solve.obs(weight, gram, keep=1, damp=0.0),
    ... )
    >>> algorithm = sf.rewrite(fn, when=sf.at([0]))
    >>> state = algorithm.init({"weight": torch.tensor([[1.0, 2.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'weight': tensor([[0.0000, 2.5000]])}

    Args:
        stats: Statistics from `sf.calibration.inputs`, with "gram".
        fn: The solver, `fn(weight, gram, mask)`. For each leaf it gets the weight and
            the mask as matrices of (outputs, inputs), and the gram of the inputs,
            (inputs, inputs); it returns the new weight and mask. Where parts of the
            outputs read other inputs, as in a convolution with groups, it is called for
            each.

    Returns:
        A function of (path, weight, mask, step). Leaves of another form, such as
        convolutions and the Conv1D of transformers, get their form back.

    Raises:
        ValueError: On a call, the leaf has no statistics, or has statistics of no input
            or without "gram" or "square", or `fn` raises it. The text names the path.
        TypeError: `stats` are no statistics by path, or `fn` is no function of three
            arguments.
    """
    check_call("fn", fn, "weight", "gram", "mask")
    check_stats("layerwise", stats)
    counts = {path: of["count"] for path, of in stats.items() if "count" in of}
    reached = flags_of([(count > 0).all() for count in counts.values()])
    unreached = {path for path, flag in zip(counts, reached, strict=True) if not flag}

    def rewritten(
        path: str, weight: Tensor, mask: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        if path not in stats:
            raise ValueError(
                f"layerwise: no data for the leaf {path!r}, but for {len(stats)} others"
            )
        for name in ("gram", "square"):
            if name not in stats[path]:
                raise ValueError(
                    f"layerwise: expected {name!r} in the statistics at {path!r}, got "
                    f"{', '.join(stats[path])}"
                )
        if path in unreached:
            raise ValueError(f"layerwise: no data for the leaf {path!r}: {UNREACHED}")
        try:
            matrix, restore = as_matrix(weight, stats[path])
            kept = as_matrix(mask, stats[path])[0]
            gram = stats[path]["gram"]
            if matrix.ndim == 2:
                new, masks = fn(matrix, gram, kept)
            else:
                parts = [fn(*part) for part in zip(matrix, gram, kept, strict=True)]
                new, masks = (
                    torch.stack(tensors) for tensors in zip(*parts, strict=True)
                )
        except ValueError as error:
            raise ValueError(f"at {path!r}, {error}") from None
        return restore(new), restore(masks)

    return rewritten
