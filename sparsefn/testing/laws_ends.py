"""Laws on pruned weights, and on extremes: sparsity 0 and 1, nothing to sparsify."""

from __future__ import annotations

import contextlib
import warnings

import optree
import torch
from torch import Tensor

from sparsefn.core.state import effective, has_optimizer, with_params
from sparsefn.core.tree import map_with_path
from sparsefn.optim import adam
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import (
    algorithm_of,
    assert_same,
    equal,
    leaves,
    sparse,
    states_of,
    trained_of,
    updates,
)
from sparsefn.testing.introspection import learned
from sparsefn.testing.laws_masks import counts_of, goals_of
from sparsefn.testing.meta import Row
from sparsefn.typing import Tree


def pruned_weights_are_zero(row: Row, case: Case) -> None:
    """Pruned weights are +0.0 in `effective`, and in `params` if the algorithm zeroes
    them; so are their moments.
    """
    algorithm = algorithm_of(row, case)
    for state in updates(algorithm, case):
        trees = [effective(state)]
        if row.meta.zeroes:
            trees.append(state.params)
        for path, mask in sparse(state).items():
            for tree in trees:
                off = leaves(tree)[path][~mask]
                assert equal(off, torch.zeros_like(off)), (
                    f"{path} is not zero off its mask"
                )
        if not has_optimizer(state):
            continue
        moments = leaves((state.opt, *(part.opt for part in state.parts)))
        for path, mask in leaves(algorithm.view.support(state)).items():
            if not mask.ndim:
                continue
            for name, moment in moments.items():
                if name.endswith("." + path) and moment.shape == mask.shape:
                    assert (moment[~mask] == 0).all(), (
                        f"the moment {name} is not zero where nothing trains"
                    )


def nothing_moves_off_the_support(row: Row, case: Case) -> None:
    """The support has a count of its own and holds the mask; off it no weight changes,
    whatever an optimizer does.
    """
    assert row.meta.support is not None
    trained = trained_of(row, case, adam(0.1))
    level = row.meta.support(case.sparsity)
    frozen: dict[str, Tensor] = {}
    old: dict[str, Tensor] = {}
    expected: list[int] = []
    for i, state in enumerate(updates(trained, case)):
        flags = leaves(trained.view.support(state))
        support = {path: mask for path, mask in flags.items() if mask.ndim}
        assert support.keys() == sparse(state).keys(), (
            f"state {i}: {sorted(support)} have a support"
        )
        for path, mask in sparse(state).items():
            assert not (mask & ~support[path]).any(), (
                f"state {i}: {path} is kept where it does not train"
            )
        masks = map_with_path(
            lambda path, mask, support=support: support.get(path, mask), state.masks
        )
        whole = state._replace(masks=masks)
        if not i or row.meta.when(i - 1):
            wanted = level(max(i - 1, 0))
            expected = goals_of(row.meta, whole, float(wanted))
        counted = counts_of(row.meta, whole)
        assert counted == expected, (
            f"state {i}: {counted} weights may move, expected {expected}"
        )
        new = leaves(state.params)
        for path, mask in frozen.items():
            assert equal(new[path][mask], old[path][mask]), (
                f"state {i}: {path} has changed where it does not train"
            )
        frozen = {path: ~mask for path, mask in support.items()}
        old = new


def outside_optimizers_cannot_revive(row: Row, case: Case) -> None:
    """Weights put in from outside arrive on the mask only, and values given off the
    mask change nothing later.

    They are refused where something else trains, of which they say nothing.
    """
    algorithm = algorithm_of(row, case)
    state = algorithm.init(case.params)
    if learned(state):
        with contextlib.suppress(ValueError):
            with_params(state, case.params)
            raise AssertionError(
                f"with_params takes weights, but {sorted(learned(state))} train"
            )
        return
    for step, grads in enumerate(case.grads):
        moved = optree.tree_map(lambda p, g: p + g, state.params, grads)
        wild = optree.tree_map(
            lambda p, m: torch.where(m, p, 9.0) if m.ndim else p, moved, state.masks
        )
        calm = with_params(state, moved)
        stirred = with_params(state, wild)
        assert_same(f"with_params at step {step}", calm, stirred)
        for path, mask in sparse(state).items():
            old = leaves(state.params)[path]
            new = leaves(calm.params)[path]
            on = leaves(moved)[path]
            assert equal(torch.where(mask, on, old), new), (
                f"{path}: not the weights that were put in"
            )
        state = algorithm.update(calm, grads, step)


def sparsity_zero_is_dense(row: Row, case: Case) -> None:
    """At sparsity 0 a trained network has the bits of the dense network."""
    assert row.meta.baseline is not None
    baseline = row.meta.baseline()
    case = case._replace(sparsity=0.0)
    rows = (row, row._replace(make=lambda sparsity, key, params: baseline))
    runs = (updates(trained_of(one, case, adam(0.1)), case) for one in rows)
    for step, (a, b) in enumerate(zip(*runs, strict=True)):
        assert all(mask.all() for mask in sparse(a).values()), (
            f"state {step}: something is pruned"
        )
        assert_same(f"weights in state {step}", effective(b), effective(a))


def sparsity_one_is_empty(row: Row, case: Case) -> None:
    """At sparsity 1 nothing is kept after the last update."""
    last = states_of(row, case._replace(sparsity=1.0))[-1]
    assert not any(mask.any() for mask in sparse(last).values()), "something is kept"


def nothing_to_sparsify_is_dense(row: Row, case: Case) -> None:
    """Where no leaf is sparsified, every mask is the 0-d True and weights keep their
    bits.
    """
    params: Tree = {
        "bias": torch.arange(3.0, device="cpu"),
        "norm": torch.ones(2, 2, device="cpu"),
    }
    grads = optree.tree_map(torch.ones_like, params)
    bare = case._replace(params=params, grads=(grads,) * len(case.grads))
    with warnings.catch_warnings():
        # the warning that nothing is selected is expected
        warnings.simplefilter("ignore", UserWarning)
        state = states_of(row, bare)[-1]
    assert not sparse(state), f"{sorted(sparse(state))} is sparsified"
    if not has_optimizer(state):
        assert_same("weights", params, effective(state))
