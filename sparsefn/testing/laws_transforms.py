"""Laws on transforms: `vmap` is a loop, and a compiled update is an eager one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn.core.random import key as new_key
from sparsefn.core.random import split
from sparsefn.core.state import Algorithm, State
from sparsefn.nn.ensemble import stack, unstack
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import algorithm_of, assert_same, mapped, updates
from sparsefn.testing.introspection import takes_tensor
from sparsefn.testing.meta import Row
from sparsefn.typing import Level, Tree


def _run(
    row: Row,
    case: Case,
    key: Tensor,
    sparsity: Level,
    params: Tree,
    grads: Tree,
    start: Tree,
) -> State:
    algorithm = row.make(sparsity, key, case.params)
    state = algorithm.init(params)
    for i, tree in enumerate(grads):
        state = algorithm.update(state, tree, start + i)
    return state


def _sparsities(
    row: Row, case: Case, *numbers: float
) -> tuple[Sequence[float], float | Tensor, int | None]:
    """A sparsity for each member, and what `vmap` gets of them: one for all where a row
    takes no tensor.
    """
    if takes_tensor(row, case):
        return numbers, torch.tensor(numbers, dtype=torch.float64, device="cpu"), 0
    return numbers[:1] * len(numbers), numbers[0], None


def vmap_is_a_loop(row: Row, case: Case) -> None:
    """Members of a batch (keys, sparsities, weights, gradients, steps) have the bits of
    single runs.
    """
    keys = split(new_key(case.seed), 3)
    params = [case.params, *case.grads[-2:]]
    starts = [0, 1, 0]
    grads = [case.grads, case.grads[::-1], case.grads[1:] + case.grads[:1]]
    numbers, sparsity, axis = _sparsities(
        row, case, case.sparsity, 1.0 - case.sparsity, 0.5
    )
    mapped = torch.vmap(partial(_run, row, case), in_dims=(0, axis, 0, 0, 0))
    stacked = mapped(
        keys, sparsity, stack(params), stack(grads), torch.tensor(starts, device="cpu")
    )
    for i, member in enumerate(unstack(stacked)):
        single = _run(row, case, keys[i], numbers[i], params[i], grads[i], starts[i])
        assert_same(f"member {i}", single, member)


def nested_vmap_is_two_loops(row: Row, case: Case) -> None:
    """Keys in one batch and sparsities, or weights, in another one inside."""
    keys = split(new_key(case.seed), 2)
    params = [case.params, case.grads[-1]]
    numbers, sparsity, axis = _sparsities(row, case, case.sparsity, 0.5)
    inner = torch.vmap(partial(_run, row, case), in_dims=(None, axis, 0, None, None))
    outer = torch.vmap(inner, in_dims=(0, None, None, None, None))
    grid = outer(keys, sparsity, stack(params), case.grads, 0)
    for i, line in enumerate(unstack(grid)):
        for j, member in enumerate(unstack(line)):
            single = _run(row, case, keys[i], numbers[j], params[j], case.grads, 0)
            assert_same(f"member {i}, {j}", single, member)


def compiling_changes_nothing(row: Row, case: Case) -> None:
    """Compiled updates have the bits of eager ones; one graph serves all tensor steps,
    and two all int steps.
    """
    # it brings half of torch's test tools along
    from torch._dynamo.testing import CompileCounter

    for step, graphs in ((torch.tensor, 1), (int, 2)):
        counter = CompileCounter()
        algorithm = algorithm_of(row, case)
        eager = state = algorithm.init(case.params)
        with _compiled(algorithm, counter) as update:
            for i in range(8):
                grads = case.grads[i % len(case.grads)]
                eager = algorithm.update(eager, grads, i)
                state = update(state, grads, step(i))
                assert_same(f"state {i}", eager, state)
                made = counter.frame_count
                assert made <= graphs, (
                    f"{made} graphs up to step {i}, not {graphs}: see "
                    "sf.triggers.check_step"
                )


def one_compiled_update_serves_two_models(row: Row, case: Case) -> None:
    """Compiled for one model, then called with the state of a larger one: the bits of
    eager updates.
    """
    larger = mapped(case, _doubled)
    made = algorithm_of(row, case)
    try:
        list(updates(made, larger))
    except Exception:
        # an algorithm that is made of the params of one model may not run on the params
        # of another
        return
    with _compiled(made, "eager") as update:
        for model in (case, larger, case):
            algorithm = algorithm_of(row, model)
            eager = state = algorithm.init(model.params)
            for i, grads in enumerate(model.grads):
                eager = algorithm.update(eager, grads, i)
                state = update(state, grads, torch.tensor(i, device="cpu"))
                assert_same(f"state {i}", eager, state)


@contextlib.contextmanager
def _compiled(algorithm: Algorithm, backend: Any) -> Iterator[Callable[..., State]]:
    try:
        yield torch.compile(algorithm.update, backend=backend, fullgraph=True)
    finally:  # else what is compiled next counts these graphs
        torch._dynamo.reset()


def _doubled(tree: Tree) -> Tree:
    return optree.tree_map(lambda x: torch.cat([x, 2 * x]) if x.ndim else x, tree)
