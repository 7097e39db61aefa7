"""Laws on states: their structure, purity, and the same bits in every setting."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import optree
import torch
from torch import Tensor

from sparsefn.algorithms import static
from sparsefn.core.state import apply_masks
from sparsefn.nn.checkpoint import load_state_dict, state_dict
from sparsefn.testing import harness
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import (
    algorithm_of,
    assert_same,
    equal,
    leaves,
    mapped,
    states_of,
    updates,
)
from sparsefn.testing.meta import Row, imported, row_of
from sparsefn.typing import Tree


def structure_of(tree: Tree) -> optree.PyTreeSpec:
    return optree.tree_structure(tree)


def states_keep_their_structure(row: Row, case: Case) -> None:
    """All leaves are plain tensors, masks are bool and fit, and no update changes a
    shape, a dtype or the tree.
    """
    states = states_of(row, case)
    first = leaves(states[0])
    structure = structure_of(states[0])
    params = structure_of(case.params)
    chosen = harness.sparse(static(0.0, where=row.meta.where).init(case.params))
    for state in states:
        apply_masks(state.params, state.masks)
        assert structure_of(state) == structure, "an update changes the structure"
        assert structure_of(state.params) == params, "params have another structure"
        for path, leaf in leaves(state).items():
            assert (leaf.shape, leaf.dtype) == (first[path].shape, first[path].dtype), (
                f"an update changes {path}"
            )
            assert leaf.is_contiguous(), (
                f"{path} is a view with other strides: {leaf.stride()}"
            )
        for path, leaf in leaves(case.params).items():
            assert path in chosen or path not in harness.sparse(state), (
                f"{path} is sparsified"
            )
            assert leaves(state.params)[path].dtype == leaf.dtype, (
                f"params have another dtype at {path}"
            )


# ---- purity --------------------------------------------------------------------------


def _watched(what: str, call: Callable[..., Tree], *inputs: Tree) -> Tree:
    """The result of a call, checked to change no input and no generator, and to return
    no part of an input.
    """
    before = [
        (path, x, x.clone(), x._version)
        for tree in inputs
        for path, x in leaves(tree).items()
    ]
    random_states = harness.generators()
    result = call(*inputs)
    assert harness.generators() == random_states, (
        f"{what} reads or advances a global generator"
    )
    for path, x, copy, version in before:
        assert equal(x, copy), f"{what} changes its input at {path}"
        assert x._version == version, f"{what} writes to its input at {path}"
    storages = {x.untyped_storage().data_ptr() for _, x, _, _ in before if x.numel()}
    whole = {harness.memory_of(x) for _, x, _, _ in before}
    for path, x in leaves(result).items():
        shared = x.numel() and x.untyped_storage().data_ptr() in storages
        assert not shared or harness.memory_of(x) in whole, (
            f"{what} returns a part or a view of an input at {path}"
        )
    return result


def functions_are_pure(row: Row, case: Case) -> None:
    """Inputs keep their bits and versions, global generators their states; outputs are
    new or inputs as a whole.
    """
    algorithm = algorithm_of(row, case)
    state = _watched("init", algorithm.init, case.params)
    for step, grads in enumerate(case.grads):
        state = _watched(
            "update", lambda s, g, step=step: algorithm.update(s, g, step), state, grads
        )


def _spoil(tree: Tree) -> None:
    for leaf in leaves(tree).values():
        leaf.add_(1) if leaf.is_floating_point() else leaf.logical_not_()


def inputs_may_change_later(row: Row, case: Case) -> None:
    """Changing params and gradients in place after a call does not change the state
    that it returned.
    """
    algorithm = algorithm_of(row, case)
    params = optree.tree_map(torch.clone, case.params)
    state: Tree = algorithm.init(params)
    before = optree.tree_map(torch.clone, state)
    _spoil(params)
    assert_same("the state from init", before, state)
    for step, grads in enumerate(case.grads):
        given = optree.tree_map(torch.clone, grads)
        state = algorithm.update(state, given, step)
        before = optree.tree_map(torch.clone, state)
        _spoil(given)
        assert_same(f"the state from update {step}", before, state)


# ---- the same bits -------------------------------------------------------------------


def turned(tree: Tree) -> Tree:
    """The same leaves, their memory from the last dimension to the first."""

    def turn(x: Tensor) -> Tensor:
        back = tuple(range(x.ndim))[::-1]
        return x.permute(back).contiguous().permute(back)

    return optree.tree_map(turn, tree)


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """So many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reordered(tree: Tree) -> Tree:
    """The same tree, its dicts filled in the opposite order."""
    if type(tree) is dict:
        return {name: _reordered(tree[name]) for name in reversed(tree)}
    if isinstance(tree, list | tuple):
        parts = [_reordered(part) for part in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    return tree


def runs_repeat(row: Row, case: Case) -> None:
    """A run is the same again: with the same algorithm, a new one, other global seeds,
    dicts filled otherwise.
    """
    algorithm = algorithm_of(row, case)
    reordered = mapped(case, _reordered)
    first, *runs = (list(updates(algorithm, case)) for _ in range(2))
    with torch.random.fork_rng():
        torch.manual_seed(case.seed + 1)
        runs += [states_of(row, case), states_of(row, reordered)]
    for i, run in enumerate(runs):
        for step, (a, b) in enumerate(zip(first, run, strict=True)):
            assert_same(f"run {i + 1}, state {step}", a, b)


def threads_do_not_matter(row: Row, case: Case) -> None:
    """One thread to four: the same bits."""
    with threads(1):
        alone = states_of(row, case)[-1]
    for n in (2, 3, 4):
        with threads(n):
            assert_same(f"state with {n} threads", alone, states_of(row, case)[-1])


def modes_and_settings_do_not_matter(row: Row, case: Case) -> None:
    """Another default device, inference mode or no gradients at all: the same bits."""
    algorithm = algorithm_of(row, case)
    plain = list(updates(algorithm, case))[-1]
    meta = torch.device("meta")
    inference = torch.inference_mode()
    without = torch.no_grad()
    for name, around in (
        ("the default device meta", meta),
        ("inference mode", inference),
        ("no_grad", without),
    ):
        with around:
            other = list(updates(algorithm, case))[-1]
        assert_same(f"state under {name}", plain, other)


def memory_does_not_matter(row: Row, case: Case) -> None:
    """Leaves with their strides in another order: the same bits."""
    other = mapped(case, turned)
    for step, (a, b) in enumerate(
        zip(states_of(row, case), states_of(row, other), strict=True)
    ):
        assert_same(f"state {step}", a, b)


def steps_may_be_tensors(row: Row, case: Case) -> None:
    """An int step and a 0-d int64 tensor give the same bits, in what is trained,
    too.
    """
    runs = (
        updates(harness.trained_of(row, case), case, step)
        for step in (int, torch.tensor)
    )
    for i, (a, b) in enumerate(zip(*runs, strict=True)):
        assert_same(f"state {i}", a, b)


def runs_resume(row: Row, case: Case) -> None:
    """Saved, loaded into a fresh algorithm and continued at any step: as if never
    interrupted.
    """
    cut = 1 + case.seed % (len(case.grads) - 1)
    states = states_of(row, case)
    algorithm = algorithm_of(row, case)
    state = load_state_dict(algorithm.init(case.params), state_dict(states[cut]))
    for step in range(cut, len(case.grads)):
        state = algorithm.update(state, case.grads[step], step)
    assert_same(f"resumed at {cut}", states[-1], state)


# ---- another process -----------------------------------------------------------------

_CHILD = (
    "import sys; from sparsefn.testing.laws_states import answer; answer(*sys.argv[1:])"
)


def answer(target: str, file: str) -> None:
    """Run a saved case and print the digest of its last state."""
    print(
        harness.hash_of(
            states_of(row_of(imported(target)), torch.load(file, weights_only=False))[
                -1
            ]
        )
    )


def processes_do_not_matter(row: Row, case: Case) -> None:
    """Another process, with another hash seed and one thread, gives the same bits (for
    functions it can import).
    """
    if row.reference is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.pt"
        torch.save(case, file)
        env = {
            **os.environ,
            "PYTHONHASHSEED": "1234",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", _CHILD, row.reference, str(file)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, f"another process fails:\n{done.stderr}"
    assert done.stdout.split()[-1] == harness.hash_of(states_of(row, case)[-1]), (
        "another process gives other bits"
    )
