"""Tools for planting bugs: algorithms gone wrong in one way, made of public parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import sparsefn as sf
from property_tests.registry import EVEN, ROWS, ramp, swap
from sparsefn.core.tree import Tree
from sparsefn.testing.harness import leaves
from sparsefn.testing.meta import Row

HEALTHY = {row.name: row for row in ROWS}
MAGNITUDE, GRADIENT = sf.scores.magnitude, sf.scores.gradient


class Mutant(NamedTuple):
    """`law` must fail on `row`, and hold on the healthy row of that name."""

    bug: str
    law: str
    row: Row
    raises: type[Exception] = AssertionError

    @property
    def healthy(self) -> Row:
        return HEALTHY[self.row.name]


def mutant(
    bug: str,
    law: str,
    base: str,
    make: Callable[[Any, Tensor, Tree], sf.Algorithm],
    **options: Any,
) -> Mutant:
    return Mutant(bug, law, HEALTHY[base]._replace(make=make), **options)


def after_update(
    algorithm: sf.Algorithm, change: Callable[[sf.State, sf.State, Tree, Any], sf.State]
) -> sf.Algorithm:
    """`change(before, after, grads, step)` has the last word in every update."""

    def update(state: sf.State, grads: Tree, step: Any) -> sf.State:
        return change(state, algorithm.update(state, grads, step), grads, step)

    return algorithm._replace(update=update, within=None)


def masks_by(rule: Callable[[str, Tensor], Tensor]) -> Callable[[Tree], Tree]:
    """An `init` that makes the masks of the sparsified leaves by hand."""

    def init(params: Tree) -> Tree:
        true = torch.ones((), dtype=torch.bool)
        made = [
            rule(p, x) if sf.default_where(p, x) else true
            for p, x in leaves(params).items()
        ]
        return optree.tree_unflatten(optree.tree_structure(params), made)

    return init


def magnitude_masks(
    choose: Callable[[Tensor, Any], Tensor],
) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    """`static magnitude keep` with masks made by `choose(scores, sparsity)`."""
    return lambda s, key, _: sf.static(
        None, init=masks_by(lambda path, leaf: choose(leaf.abs(), s)), pruned="keep"
    )


def kept(scores: Tensor, sparsity: Any) -> Any:
    return sf.budgets.n_kept(scores.numel(), sparsity)


def drawn_by(sparsity: Any, key: Tensor, number: Callable[[str], int]) -> sf.Algorithm:
    """`static` with draws that each leaf makes by a number for its path."""

    def mask(path: str, leaf: Tensor) -> Tensor:
        draws = sf.random.uniform(sf.random.fold_in(key, number(path)), leaf.shape)
        return sf.masks.topk_mask(draws, kept(leaf, sparsity))

    return sf.static(None, init=masks_by(mask), key=key)


def by_threshold(scores: Tensor, count: Any) -> Tensor:
    """As in many libraries: everything at least as large as the k-th largest."""
    if int(count) == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    return scores >= scores.reshape(-1).sort(descending=True).values[int(count) - 1]


def per_leaf(
    fn: Callable[[str, Tensor], Tensor],
) -> Callable[[sf.State, Tree, Any], Tree]:
    """A score that sees the path of a leaf."""

    def score(state: sf.State, grads: Tree, step: Any) -> Tree:
        made = [fn(path, leaf) for path, leaf in leaves(state.params).items()]
        return optree.tree_unflatten(optree.tree_structure(state.params), made)

    return score


def gmp(
    score: Any = MAGNITUDE, **options: Any
) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    return lambda s, key, _: sf.gmp(
        ramp(s), score=score, **{"when": EVEN, "key": key, **options}
    )


def rigl(**options: Any) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    return lambda s, key, _: sf.rigl(s, key=key, **{**swap, **options})


def each(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    return optree.tree_map(lambda *x: fn(*x) if x[0].ndim else x[0], *trees)
