"""Laws on states: purity, the same bits however a run is made, and what lies off the masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import optree
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import sparsefn as sf
from property_tests.harness import assert_same, bits, leaves, sparse, updates
from property_tests.laws_masks import algorithm_of
from property_tests.meta import Row
from property_tests.strategies import Case, Tree


def states_keep_their_structure(row: Row, case: Case) -> None:
    """All leaves are plain tensors, masks are bool and fit, and no update changes a shape, a dtype or the tree."""
    states = list(updates(algorithm_of(row, case), case))
    first = leaves(states[0])
    for state in states:
        sf.apply_masks(state.params, state.masks)
        assert optree.tree_structure(state) == optree.tree_structure(states[0]), "an update changes the structure"
        assert optree.tree_structure(state.params) == optree.tree_structure(case.params), (
            "params have another structure"
        )
        for path, leaf in leaves(state).items():
            assert (leaf.shape, leaf.dtype) == (first[path].shape, first[path].dtype), f"an update changes {path}"
            assert leaf.is_contiguous(), f"{path} is a view with other strides: {leaf.stride()}"
        for path, leaf in leaves(case.params).items():
            assert sf.default_where(path, leaf) or path not in sparse(state), f"{path} is sparsified"
            assert leaves(state.params)[path].dtype == leaf.dtype, f"params have another dtype at {path}"


# ---- purity -----------------------------------------------------------------------------------------


def _generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(numpy.random.get_state()), random.getstate()]


def _place(x: Tensor) -> Any:
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype


def _watched(what: str, call: Callable[..., Tree], *inputs: Tree) -> Tree:
    """The result of a call that must change no input, no generator, and return no part of an input."""
    before = [(path, x, x.clone(), x._version) for tree in inputs for path, x in leaves(tree).items()]
    generators = _generators()
    result = call(*inputs)
    assert _generators() == generators, f"{what} reads or advances a global generator"
    for path, x, copy, version in before:
        assert torch.equal(bits(x), bits(copy)), f"{what} changes its input at {path}"
        assert x._version == version, f"{what} writes to its input at {path}"
    storages = {x.untyped_storage().data_ptr() for _, x, _, _ in before if x.numel()}
    whole = {_place(x) for _, x, _, _ in before}
    for path, x in leaves(result).items():
        shared = x.numel() and x.untyped_storage().data_ptr() in storages
        assert not shared or _place(x) in whole, f"{what} returns a part or a view of an input at {path}"
    return result


def functions_are_pure(row: Row, case: Case) -> None:
    """Inputs keep their bits and versions, global generators their states; outputs are new or inputs as a whole."""
    algorithm = algorithm_of(row, case)
    state = _watched("init", algorithm.init, case.params)
    for step, grads in enumerate(case.grads):
        state = _watched("update", lambda s, g, step=step: algorithm.update(s, g, step), state, grads)


# ---- the same bits ----------------------------------------------------------------------------------


def _reordered(tree: Tree) -> Tree:
    """The same tree, its dicts filled in the opposite order."""
    if type(tree) is dict:
        return {name: _reordered(tree[name]) for name in reversed(tree)}
    if isinstance(tree, list | tuple):
        parts = [_reordered(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def runs_repeat(row: Row, case: Case) -> None:
    """A run is the same again: with the same algorithm, a new one, other global seeds, dicts filled otherwise."""
    algorithm = algorithm_of(row, case)
    reordered = case._replace(params=_reordered(case.params), grads=tuple(map(_reordered, case.grads)))
    runs = [list(updates(algorithm, case)), list(updates(algorithm, case))]
    torch.manual_seed(case.seed + 1)
    runs += [list(updates(algorithm_of(row, case), case)), list(updates(algorithm_of(row, reordered), reordered))]
    for i, run in enumerate(runs[1:]):
        for step, (a, b) in enumerate(zip(runs[0], run, strict=True)):
            assert_same(f"run {i + 1}, state {step}", a, b)


def threads_do_not_matter(row: Row, case: Case) -> None:
    """One thread or two: the same bits."""
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        runs.append(list(updates(algorithm_of(row, case), case))[-1])
    assert_same("state", *runs)


def steps_may_be_tensors(row: Row, case: Case) -> None:
    """An int step and a 0-d int64 tensor give the same bits."""
    for i, (a, b) in enumerate(
        zip(updates(algorithm_of(row, case), case), updates(algorithm_of(row, case), case, torch.tensor), strict=True)
    ):
        assert_same(f"state {i}", a, b)


def _run(row: Row, case: Case, key: Tensor, sparsity: Any, params: Tree, start: Any) -> sf.State:
    algorithm = row.make(sparsity, key, case.params)
    state = algorithm.init(params)
    for i, grads in enumerate(case.grads):
        state = algorithm.update(state, grads, start + i)
    return state


def vmap_is_a_loop(row: Row, case: Case) -> None:
    """Members of a batch (keys, sparsities, weights, steps) are what single runs with Python numbers are."""
    keys = sf.random.split(sf.random.key(case.seed), 3)
    numbers = [case.sparsity, 1.0 - case.sparsity, 0.5] if row.meta.tensor else [case.sparsity] * 3
    params, starts = [case.params, *case.grads[-2:]], [0, 1, 0]
    sparsity = torch.tensor(numbers, dtype=torch.float64) if row.meta.tensor else case.sparsity
    mapped = torch.vmap(partial(_run, row, case), in_dims=(0, 0 if row.meta.tensor else None, 0, 0))
    stacked = mapped(keys, sparsity, sf.ensemble.stack(params), torch.tensor(starts))
    for i, member in enumerate(sf.ensemble.unstack(stacked)):
        assert_same(f"member {i}", _run(row, case, keys[i], numbers[i], params[i], starts[i]), member)


def nested_vmap_is_two_loops(row: Row, case: Case) -> None:
    """Keys in one batch and sparsities, or weights, in another one inside."""
    keys = sf.random.split(sf.random.key(case.seed), 2)
    numbers = [case.sparsity, 0.5] if row.meta.tensor else [case.sparsity] * 2
    params = [case.params, case.grads[-1]]
    sparsity = torch.tensor(numbers, dtype=torch.float64) if row.meta.tensor else case.sparsity
    inner = torch.vmap(partial(_run, row, case), in_dims=(None, 0 if row.meta.tensor else None, 0, None))
    grid = torch.vmap(inner, in_dims=(0, None, None, None))(keys, sparsity, sf.ensemble.stack(params), 0)
    for i, line in enumerate(sf.ensemble.unstack(grid)):
        for j, member in enumerate(sf.ensemble.unstack(line)):
            assert_same(f"member {i}, {j}", _run(row, case, keys[i], numbers[j], params[j], 0), member)


def compiling_changes_nothing(row: Row, case: Case) -> None:
    """Compiled updates have the bits of eager ones; one graph serves all tensor steps, and two all int steps."""
    for step, graphs in ((torch.tensor, 1), (int, 2)):
        counter = CompileCounter()
        algorithm = algorithm_of(row, case)
        update = torch.compile(algorithm.update, backend=counter, fullgraph=True)
        eager = state = algorithm.init(case.params)
        for i in range(8):
            grads = case.grads[i % len(case.grads)]
            eager, state = algorithm.update(eager, grads, i), update(state, grads, step(i))
            assert_same(f"state {i}", eager, state)
            assert counter.frame_count <= graphs, f"{counter.frame_count} graphs up to step {i}"
        torch._dynamo.reset()


def runs_resume(row: Row, case: Case) -> None:
    """Saved, loaded into a fresh algorithm and continued at any step: as if never interrupted."""
    cut = 1 + case.seed % (len(case.grads) - 1)
    states = list(updates(algorithm_of(row, case), case))
    saved = {path: leaf.clone() for path, leaf in sf.checkpoint.state_dict(states[cut]).items()}
    algorithm = algorithm_of(row, case)
    state = sf.checkpoint.load_state_dict(algorithm.init(case.params), saved)
    for step in range(cut, len(case.grads)):
        state = algorithm.update(state, case.grads[step], step)
    assert_same(f"resumed at {cut}", states[-1], state)


# ---- off the masks, and at the ends -----------------------------------------------------------------


def pruned_weights_are_zero(row: Row, case: Case) -> None:
    """Off the mask weights are +0.0 in `effective`, in `params` where they are pruned to zero, and so are moments."""
    algorithm = algorithm_of(row, case)
    for state in updates(algorithm, case):
        trees = [sf.effective(state), *([state.params] if row.meta.pruned == "zero" else [])]
        for path, mask in sparse(state).items():
            for tree in trees:
                leaf = leaves(tree)[path]
                assert not bits(leaf)[~mask].any(), f"{path} is not zero off its mask"
        if state.opt == ():
            continue
        for path, mask in leaves(algorithm.view.support(state)).items():
            for name, moment in leaves(state.opt).items():
                if mask.ndim and name.endswith("." + path) and moment.shape == mask.shape:
                    assert (moment[~mask] == 0).all(), f"the moment {name} is not zero where nothing trains"


def outside_optimizers_cannot_revive(row: Row, case: Case) -> None:
    """Weights put in from outside arrive on the mask alone, and what was off it changes nothing later."""
    algorithm = algorithm_of(row, case)
    state = algorithm.init(case.params)
    for step, grads in enumerate(case.grads):
        moved = optree.tree_map(lambda p, g: p + g, state.params, grads)
        wild = optree.tree_map(lambda p, m: torch.where(m, p, 9.0) if m.ndim else p, moved, state.masks)
        calm, stirred = sf.with_params(state, moved), sf.with_params(state, wild)
        assert_same(f"with_params at step {step}", calm, stirred)
        for path, mask in sparse(state).items():
            old, new, on = leaves(state.params)[path], leaves(calm.params)[path], leaves(moved)[path]
            assert torch.equal(bits(torch.where(mask, on, old)), bits(new)), f"{path}: not the weights that were put in"
        state = algorithm.update(calm, grads, step)


def sparsity_zero_is_dense(row: Row, case: Case) -> None:
    """At sparsity 0 a trained network has the bits of the dense one."""
    assert row.meta.baseline is not None
    algorithms = [row.make(0.0, sf.random.key(case.seed), case.params), row.meta.baseline()]
    if not row.meta.optimizer:
        algorithms = [sf.with_optimizer(algorithm, sf.optimizers.adam(0.1)) for algorithm in algorithms]
    for step, (a, b) in enumerate(zip(*(updates(algorithm, case) for algorithm in algorithms), strict=True)):
        assert all(mask.all() for mask in sparse(a).values()), f"state {step}: something is pruned"
        assert_same(f"weights in state {step}", sf.effective(b), sf.effective(a))


def sparsity_one_is_empty(row: Row, case: Case) -> None:
    """At sparsity 1 nothing is left in the end."""
    last = list(updates(row.make(1.0, sf.random.key(case.seed), case.params), case))[-1]
    assert not any(mask.any() for mask in sparse(last).values()), "something is kept"
