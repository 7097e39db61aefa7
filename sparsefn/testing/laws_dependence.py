"""Laws on dependence: of masks on steps, gradients, keys, other leaves, names."""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch

from sparsefn.core.state import has_optimizer, with_params
from sparsefn.masks import difference, intersect, n_kept
from sparsefn.nn.checkpoint import tree_equal
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import (
    Operations,
    algorithm_of,
    assert_same,
    mapped,
    states_of,
)
from sparsefn.testing.introspection import learned
from sparsefn.testing.laws_states import threads, turned
from sparsefn.testing.meta import Row
from sparsefn.testing.oracle import unit_groups
from sparsefn.typing import Tree


def levels_stay_in_bounds(row: Row, case: Case) -> None:
    """The level is a number in [0, 1] at every step, the same for an int and for a
    tensor; triggers fire alike.
    """
    meta = row.meta
    level = meta.level(case.sparsity)
    for step in (0, 1, 2, 3, 10, 1000, 2**40):
        value = level(step)
        hidden = level(torch.tensor(step, device="cpu"))
        assert 0.0 <= float(value) <= 1.0, f"the level at step {step} is {value}"
        assert float(hidden) == float(value), (
            f"the level at step {step} is {value}, but {hidden} for a tensor"
        )
        fires = meta.when(step)
        hidden = meta.when(torch.tensor(step, device="cpu"))
        assert bool(fires) == bool(hidden), (
            f"the trigger says {fires} at step {step}, but {hidden} for a tensor"
        )


def nothing_happens_between_triggers(row: Row, case: Case) -> None:
    """Masks change at triggers only; without an optimizer or memory inside, other steps
    do no tensor work.
    """
    algorithm = algorithm_of(row, case)
    state = algorithm.init(case.params)
    for step, grads in enumerate(case.grads):
        with Operations() as work:
            after = algorithm.update(state, grads, step)
        if not row.meta.when(step):
            assert_same(f"masks at step {step}", state.masks, after.masks)
            if (
                row.meta.idle
                and not has_optimizer(state)
                and "latent" not in learned(state)
            ):
                assert_same(f"state at step {step}", state, after)
                assert not work.operations, f"step {step} ran {work.operations}"
        state = after


def _final_masks(row: Row, case: Case) -> Tree:
    return states_of(row, case)[-1].masks


def gradients_matter_where_declared(row: Row, case: Case) -> None:
    """Other gradients give the same masks, unless the row says that it needs them."""
    other = case._replace(
        grads=tuple(
            optree.tree_map(lambda g: g.flip(0) if g.ndim else -g, t)
            for t in case.grads[::-1]
        )
    )
    assert_same("masks", _final_masks(row, case), _final_masks(row, other))


def keys_matter_where_declared(row: Row, case: Case) -> None:
    """Another key gives the same masks, unless the row says that it draws."""
    assert_same(
        "masks",
        _final_masks(row, case),
        _final_masks(row, case._replace(seed=case.seed + 1)),
    )


def declared_dependence_is_real(row: Row, case: Case) -> None:
    """On large leaves another key, other gradients and another step give other masks,
    where the row says so.
    """
    meta = row.meta
    masks = _final_masks(row, case)
    if meta.stochastic:
        assert not tree_equal(
            masks, _final_masks(row, case._replace(seed=case.seed + 1))
        ), "the key does not matter"
    if meta.needs_grads:
        other = case._replace(
            grads=tuple(optree.tree_map(lambda g: g.flip(0), t) for t in case.grads)
        )
        assert not tree_equal(masks, _final_masks(row, other)), (
            "the gradients do not matter"
        )
    if meta.stochastic == "anew":
        algorithm = algorithm_of(row, case)
        state = algorithm.init(case.params)
        fires = [*(step for step in range(100) if meta.when(step)), 0, 1][:2]
        first, second = (
            algorithm.update(state, case.grads[0], step).masks for step in fires
        )
        fresh = [
            difference(masks, state.masks, state.params) for masks in (first, second)
        ]
        shared = n_kept(intersect(*fresh))
        grown = n_kept(fresh[1])
        # Where nothing grows, as in pruning, draws show in the masks themselves.
        assert shared < grown if grown else not tree_equal(first, second), (
            "every step draws the same"
        )


def leaves_are_independent(row: Row, case: Case) -> None:
    """Another leaf in front changes nothing for the leaves after it."""
    alone = mapped(case, lambda tree: {"t": tree})
    beside = mapped(
        case, lambda tree: {"t": tree, "a": torch.ones((4, 4), device="cpu")}
    )
    assert_same("masks", _final_masks(row, alone)["t"], _final_masks(row, beside)["t"])


def scale_does_not_matter(row: Row, case: Case) -> None:
    """Weights and gradients times a power of two give the same masks."""

    def times(factor: float) -> Callable[[Tree], Tree]:
        return lambda tree: optree.tree_map(lambda x: factor * x, tree)

    scaled = mapped(case, times(4.0), times(0.5))
    assert_same("masks", _final_masks(row, case), _final_masks(row, scaled))


def names_do_not_matter(row: Row, case: Case) -> None:
    """Where nothing is drawn, paths can be renamed."""
    renamed = mapped(case, lambda tree: {"x": tree})
    assert_same("masks", _final_masks(row, case), _final_masks(row, renamed)["x"])


def permutations_commute(row: Row, case: Case) -> None:
    """Weights in another order have masks in that order (drawn without ties, and
    weights move at every step).
    """

    def flipped(tree: Tree) -> Tree:
        return optree.tree_map(lambda x: x.flip(tuple(range(x.ndim))), tree)

    def masks(turn: Callable[[Tree], Tree]) -> Tree:
        algorithm = algorithm_of(row, case)
        state = algorithm.init(turn(case.params))
        for step, grads in enumerate(case.grads):
            state = algorithm.update(state, turn(grads), step)
            if not learned(state):
                state = with_params(state, turn(grads))
        return state.masks

    assert_same("masks", flipped(masks(lambda tree: tree)), masks(flipped))


def order_of_sums_is_fixed(row: Row, case: Case) -> None:
    """Units that hold the same numbers in other orders: threads, the layout of memory
    and a batch change no mask.
    """
    near = mapped(case, lambda tree: _permuted(row, tree))
    other = mapped(near, turned)
    want = _final_masks(row, near)
    for n in (1, 2, 3, 4):
        with threads(n):
            assert_same(f"masks with {n} threads", want, _final_masks(row, near))
            assert_same(
                f"masks of turned leaves with {n} threads",
                want,
                _final_masks(row, other),
            )

    def masks(params: Tree, grads: Tree) -> Tree:
        return _final_masks(row, near._replace(params=params, grads=grads))

    members: Tree = (other.params, other.grads)
    batch = torch.vmap(masks)(*optree.tree_map(lambda x: x[None], members))
    assert_same(
        "masks of a batch",
        want,
        optree.tree_map(lambda x: x[0] if x.ndim else x, batch),
    )


def _permuted(row: Row, tree: Tree) -> Tree:
    # Each unit of a leaf holds the first numbers of one list, in a different order.
    generator = torch.Generator().manual_seed(5)

    def leaf(x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 2 or not x.numel():
            return x
        values = torch.rand(x.numel(), generator=generator, device="cpu")
        new = torch.empty(x.numel(), device="cpu")
        for group in unit_groups(row.meta.layout, tuple(x.shape)):
            for unit in group:
                new[unit] = values[
                    torch.randperm(len(unit), generator=generator, device="cpu")
                ]
        return new.to(x.dtype).reshape(x.shape)

    return optree.tree_map(leaf, tree)
