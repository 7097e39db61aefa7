"""Algorithms that change the kept weights, too: SparseGPT, OBS, proximal steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn.algorithms.frame import (
    check_pruned,
    fired,
    framed,
    own_params,
    sparse_leaves,
    with_masks,
)
from sparsefn.algorithms.memory import Pruned
from sparsefn.algorithms.processes import refuse_shards
from sparsefn.core.checks import check_call, check_trigger, described
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    Trigger,
    Where,
    everywhere,
    masks_tree,
)
from sparsefn.core.tree import Tree, with_leaves
from sparsefn.core.tree.where import default_where, select_leaves
from sparsefn.core.triggers import always

Rewriting = Callable[[str, Tensor, Tensor, Step], tuple[Tensor, Tensor]]


@described
def rewrite(
    fn: Rewriting,
    *,
    when: Trigger = always(),
    where: Where = default_where,
    pruned: Pruned = "zero",
) -> Algorithm:
    """An algorithm from a function that writes both the weights and the mask of a leaf.

    >>> grams = {"w": torch.tensor([[2.0, 1.0], [1.0, 2.0]])}
    >>> def sparsegpt(path, weight, mask, step):
    ...     return sf.solve.obs(weight, grams[path], keep=0.5)
    >>> algorithm = sf.rewrite(sparsegpt, when=sf.at([0]))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0]]), "b": torch.ones(1)})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[0.0000, 2.4950]]), 'b': tensor([1.])}

    Args:
        fn: Function of (path, weight, mask, step) that returns the new weight and mask
            of a leaf, of the same shapes and dtypes, as new tensors. At each trigger it
            is called for every sparsified leaf, with its weights in `state.params` and
            its mask.
        when: Trigger at which `fn` is called.
        where: Which leaves are sparsified: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers.
        pruned: What becomes of weights off the mask: with "zero" they become +0.0 and
            do not train; with "keep" they are what `fn` returns; with "train" an
            optimizer moves them, as proximal steps need it, whose masks may grow again.

    Returns:
        Algorithm that starts dense. Its counts are what `fn` decides.

    Raises:
        TypeError: An argument is of another kind; or, in an update, a result is no pair
            of tensors or has another dtype. The text names the path.
        ValueError: `pruned` is unknown; in an update, a result has another shape or
            device; or, in the algorithm's `init`, a leaf is a DTensor: `fn` needs whole
            leaves. The text names the path.

    Inside `vmap` and compiled code `fn` runs at every step, and its results are taken
    where the trigger fires.
    """
    check_call("fn", fn, "path", "weight", "mask", "step")
    check_trigger("when", when)
    check_pruned(pruned)

    def init(params: Tree) -> State:
        params = own_params(params)
        leaves = select_leaves(params, where)
        refuse_shards(
            "rewrite", leaves, "; gather the leaf, rewrite it, and shard it again"
        )
        masks = {
            path: torch.ones_like(leaf, dtype=torch.bool)
            for path, leaf in leaves.items()
        }
        return State(
            params,
            masks_tree(params, masks),
            support=everywhere(params) if pruned == "train" else (),
        )

    def update(state: State, grads: Tree, step: Step) -> State:
        def run(now: State) -> State:
            weights, masks = sparse_leaves(now)
            new = {
                path: _result(path, fn(path, leaf, masks[path], step), leaf)
                for path, leaf in weights.items()
            }
            params = with_leaves(
                now.params, {path: weight for path, (weight, _) in new.items()}
            )
            return with_masks(
                now._replace(params=params),
                {path: mask for path, (_, mask) in new.items()},
                pruned,
            )

        return fired(when, run, state, step)

    return framed(init, update)


def _result(path: str, result: object, leaf: Tensor) -> tuple[Tensor, Tensor]:
    # What the function returned, checked, as tensors that nobody else holds.
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not all(isinstance(x, Tensor) for x in result)
    ):
        raise TypeError(
            f"rewrite: expected fn to return a tuple (weight, mask) for {path!r}, got "
            f"{_kind(result)}"
        )
    for name, x, dtype in zip(
        ("weight", "mask"), result, (leaf.dtype, torch.bool), strict=True
    ):
        if x.dtype != dtype:
            raise TypeError(
                f"rewrite: expected {name} of {dtype} at {path!r}, got {x.dtype}"
            )
        if x.shape != leaf.shape:
            raise ValueError(
                f"rewrite: expected {name} of shape {tuple(leaf.shape)} at {path!r}, "
                f"got {tuple(x.shape)}"
            )
        if x.device != leaf.device:
            raise ValueError(
                f"rewrite: expected {name} on {leaf.device} at {path!r}, got {x.device}"
            )
    weight, mask = result
    return weight.clone(memory_format=torch.contiguous_format), mask.clone(
        memory_format=torch.contiguous_format
    )


def _kind(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(x).__name__ for x in result)})"
    return type(result).__name__
