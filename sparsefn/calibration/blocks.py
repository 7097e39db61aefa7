"""Pruning block after block, and how unequal the blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sparsefn.algorithms import dense
from sparsefn.calibration.carried import prune_block
from sparsefn.calibration.inputs import names_of, weights_of_call
from sparsefn.calibration.sums import Stats
from sparsefn.engine.checks import check_int
from sparsefn.modules.params import params_of
from sparsefn.scores.data import wanda_of
from sparsefn.state import Algorithm, State, Where, effective
from sparsefn.tree import Tree, flatten, opened
from sparsefn.tree.chosen import matching


def in_order(
    module: nn.Module,
    state: State | None,
    blocks: Sequence[Where],
    prune: Callable[[Stats], Algorithm],
    *args: Tree,
    of: str | Sequence[str] = ("count", "square", "gram"),
    chunk_size: int | None = None,
    **kwargs: Tree,
) -> State:
    """Prune the blocks of a module in turn, each with the inputs that come from the pruned blocks before it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> def prune(stats):
    ...     return sf.one_shot(0.5, sf.scores.wanda(stats), pattern=sf.patterns.row_balanced())
    >>> x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    >>> state = sf.calibration.in_order(model, None, ["0.*", "2.*"], prune, x, of="square")
    >>> state.masks["0.weight"].sum(1).tolist(), state.masks["2.weight"].sum(1).tolist()
    ([2, 2, 2, 2, 2, 2, 2, 2], [4, 4])

    For each block the module runs once, with the weights as they are by then, and the statistics of the block's leaves
    are collected as `inputs` does. `prune` gets them, and gives the algorithm that prunes the block: its `init` takes
    the effective weights of these leaves, a dict by path, then its `update` runs at step 0, with gradients of zero. The
    block's params and masks are taken from the result. Nothing else of the state changes.

    `blocks` are globs, sequences of globs or functions of (path, leaf) each, in the order in which data passes them.
    `state` is where to begin, or None for the module's own weights without masks. `args`, `kwargs` and `of` are those
    of `inputs`. With `chunk_size` the module gets so many examples at a time, split along the first axis of every
    tensor in `args` and `kwargs`, which bounds the memory of activations. ValueError names the path and the layer of a
    weight that no input reached, and as `inputs`; TypeError for a `prune` that gives no Algorithm.

    Frantar & Alistarh 2023, arXiv 2301.00774, sec. 4; Sun et al. 2023, arXiv 2306.11695, sec. 3.
    """
    state = dense().init(params_of(module)) if state is None else state
    names, chunks = names_of(of), list(_chunks(args, kwargs, chunk_size))
    own = {name: name for name in params_of(module)}
    for block in blocks:
        weights = weights_of_call(module, state)
        chosen = [path for path, leaf in matching("blocks", block, weights).items() if leaf.ndim > 1]
        pruned, _ = prune_block(
            *(module, own, state, [(block, chosen)], prune, lambda: chunks, names),
            inputs_from="dense",
            keep=lambda out: None,
        )
        state = pruned[-1].state
    return state


def _chunks(
    args: tuple[Tree, ...], kwargs: dict[str, Tree], size: int | None
) -> Iterator[tuple[tuple[Tree, ...], dict[str, Tree]]]:
    if size is None:
        yield args, kwargs
        return
    check_int("in_order", "chunk_size", size, 1)
    leaves, rebuild = opened((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    lengths = {len(x) if x.ndim else 0 for x in tensors}
    if len(lengths) != 1 or 0 in lengths:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"in_order: expected tensors with one number of examples to split, got shapes {shapes}")
    for first in range(0, lengths.pop(), size):
        yield rebuild([x[first : first + size] if isinstance(x, Tensor) else x for x in leaves])


def outlier_ratios(state: State, stats: Stats, blocks: Sequence[str], multiple: float = 5.0) -> dict[str, float]:
    """How many of the Wanda scores of each block are above `multiple` times their mean: a share for each glob.

    >>> state = sf.dense().init({"0": torch.tensor([[1.0, 1.0, 1.0, 9.0]]), "1": torch.ones(1, 4)})
    >>> stats = {path: {"count": torch.tensor(2), "square": torch.ones(4)} for path in "01"}
    >>> sf.calibration.outlier_ratios(state, stats, ["0", "1"], multiple=2.0)
    {'0': 0.25, '1': 0.0}

    `blocks` are globs; a block's leaves are those that its glob matches and `stats` has. For `sf.budgets.owl`. Yin et
    al. 2023, arXiv 2310.05175, sec. 3.
    """
    leaves, ratios = flatten(effective(state))[0], {}
    for block in blocks:
        chosen = [path for path in matching("blocks", block, leaves) if path in stats]
        if not chosen:
            raise ValueError(f"outlier_ratios: expected statistics of a leaf of the block {block!r}, got none")
        total = sum(leaves[path].numel() for path in chosen)
        # Computed twice, so that the scores of one leaf are in memory at a time.
        mean = sum(wanda_of(path, stats[path], leaves[path]).sum(dtype=torch.float64) for path in chosen) / total
        above = sum((wanda_of(path, stats[path], leaves[path]) > multiple * mean).sum() for path in chosen)
        ratios[block] = int(above) / total
    return ratios
