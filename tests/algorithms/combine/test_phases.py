"""Phases: algorithms one after another over the steps."""

import warnings

import optree
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import sparsefn as sf


def row(*values):
    return {"w": torch.tensor([values], dtype=torch.float32)}


def kept(state, path="w"):
    return set(state.masks[path].flatten().nonzero().flatten().tolist())


def test_sparse_pretraining_ends_in_dense_finetuning():
    # Thangarasa et al. 2023: at T the effective weights are the same and all masks
    # True; the first dense step moves what was pruned by exactly -lr * g, from a fresh
    # optimizer.
    algorithm = sf.phases([(0, sf.static(0.75, init="magnitude")), (2, sf.dense())])
    algorithm = sf.with_optimizer(
        algorithm,
        sf.optimizers.sgd(0.5, momentum=0.9),
        skip=sf.at([2]),
        reset=sf.at([2]),
    )
    state, grads = algorithm.init(row(1, 2, 3, 4)), row(0.5, -1, 2, 1)
    for step in range(2):
        state = algorithm.update(state, grads, step)
        assert kept(state) == {3}
    before = sf.effective(state)
    state = algorithm.update(state, grads, 2)
    assert sf.checkpoint.tree_equal(sf.effective(state), before)
    assert kept(state) == {0, 1, 2, 3}
    assert not state.opt.momentum["w"].any()
    state = algorithm.update(state, grads, 3)
    assert state.params["w"][0, :3].tolist() == [-0.25, 0.5, -1.0]


def test_dense_sparse_dense_restores_zeros():
    # Han et al. 2017: dense, then half by magnitude, then dense again.
    algorithm = sf.phases([(0, sf.dense()), (1, sf.gmp(0.5)), (3, sf.dense())])
    params = row(4, 3, 2, 1)
    state, seen = algorithm.init(params), []
    for step in range(4):
        state = algorithm.update(state, params, step)
        seen.append((kept(state), state.params["w"].tolist()[0]))
    assert seen == [
        ({0, 1, 2, 3}, [4.0, 3.0, 2.0, 1.0]),
        ({0, 1}, [4.0, 3.0, 0.0, 0.0]),
        ({0, 1}, [4.0, 3.0, 0.0, 0.0]),
        ({0, 1, 2, 3}, [4.0, 3.0, 0.0, 0.0]),
    ]


def test_mask_learning_after_a_dense_phase_trains_all_weights():
    # Lu et al. 2023 (STEP): Adam as if alone until T, then 2 of 4 with every weight
    # trained on.
    optimizer = sf.optimizers.adam(0.1)
    algorithm = sf.phases(
        [(0, sf.dense()), (3, sf.ste(0.5, pattern=sf.patterns.nm(2, 4)))]
    )
    algorithm, alone = (
        sf.with_optimizer(algorithm, optimizer),
        sf.with_optimizer(sf.dense(), optimizer),
    )
    state, dense = (a.init({"w": torch.randn(4, 8)}) for a in (algorithm, alone))
    dense = dense._replace(params=state.params)
    for step in range(6):
        grads = {"w": torch.sin(sf.effective(state)["w"]) + 0.3}
        before = state
        state = algorithm.update(state, grads, step)
        if step < 3:
            dense = alone.update(dense, grads, step)
            assert sf.checkpoint.tree_equal(
                (state.params, state.opt), (dense.params, dense.opt)
            )
        else:
            assert int(state.masks["w"].sum()) == 16
            assert (state.params["w"] != before.params["w"]).all()


def test_each_phase_begins_from_the_effective_weights():
    algorithm = sf.phases(
        [(0, sf.static(0.5, init="magnitude", pruned="keep")), (1, sf.gmp(0.25))]
    )
    state = algorithm.init(row(4, 3, 2, 1))
    assert state.params["w"].tolist() == [[4.0, 3.0, 2.0, 1.0]]
    state = algorithm.update(state, row(0, 0, 0, 0), 1)
    assert state.params["w"].tolist() == [[4.0, 3.0, 0.0, 0.0]]


def test_a_phase_keeps_its_own_memory_and_makes_it_afresh_at_its_begin():
    first = sf.snfs(0.5, grow=sf.scores.momentum(0.5), when=sf.never())
    algorithm = sf.phases(
        [(0, first), (2, sf.rigl(0.5, grow=sf.scores.momentum(0.5), when=sf.never()))]
    )
    state = algorithm.init(row(4, 3, 2, 1))
    for step in range(4):
        state = algorithm.update(state, row(1, 1, 1, 1), step)
    assert state.parts[0].scores["grow"]["w"][0, 0] == 0.75
    assert state.parts[1].scores["grow"]["w"][0, 0] == 0.75


def test_masks_keep_their_shapes_through_all_phases():
    params = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "c": torch.randn(4)}
    algorithm = sf.phases(
        [
            (0, sf.static(0.5, where="a")),
            (1, sf.static(0.5, where="b")),
            (2, sf.dense()),
        ]
    )
    state = algorithm.init(params)
    for step in range(4):
        assert {path: mask.ndim for path, mask in state.masks.items()} == {
            "a": 2,
            "b": 2,
            "c": 0,
        }
        state = algorithm.update(state, params, step)
        sparse = {path for path in ("a", "b") if not state.masks[path].all()}
        assert sparse == [{"a"}, {"b"}, set(), set()][step]


def test_tensor_steps_and_vmapped_steps_walk_the_same_phases():
    algorithm = sf.with_optimizer(
        sf.phases(
            [(0, sf.static(0.5)), (2, sf.rigl(0.75, when=sf.every(2))), (5, sf.dense())]
        ),
        sf.optimizers.sgd(0.1, momentum=0.9),
    )
    params = {"w": torch.randn(4, 6), "b": torch.randn(4)}

    def walk(as_step):
        state, seen = algorithm.init(params), []
        for step in range(7):
            grads = optree.tree_map(lambda w: torch.cos(3 * w), sf.effective(state))
            state = algorithm.update(state, grads, as_step(step))
            seen.append(state)
        return seen

    ints, tensors = walk(int), walk(torch.tensor)
    assert all(
        sf.checkpoint.tree_equal(a, b) for a, b in zip(ints, tensors, strict=True)
    )

    # Members that stand at different steps, and so in different phases.
    states = [algorithm.init(params), *ints[:-1]]
    grads = [
        optree.tree_map(lambda w: torch.cos(3 * w), sf.effective(state))
        for state in states
    ]
    batch = torch.func.vmap(algorithm.update)(
        sf.ensemble.stack(states), sf.ensemble.stack(grads), torch.arange(7)
    )
    for i, expected in enumerate(ints):
        assert sf.checkpoint.tree_equal(sf.ensemble.member(batch, i), expected), (
            f"step {i}"
        )


@pytest.mark.deep
def test_a_phase_without_a_leaf_to_sparsify_compiles():
    algorithm = sf.phases([(0, sf.ste(0.5)), (1, sf.static(0.5, init="magnitude"))])
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        eager = state = algorithm.init({"w": torch.tensor(1.0)})
    update = torch.compile(algorithm.update, backend="eager", fullgraph=True)
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager = algorithm.update(eager, eager.params, torch.tensor(step))
        state = update(state, state.params, torch.tensor(step))
    assert sf.checkpoint.tree_equal(state, eager)


@pytest.mark.deep
def test_leaves_that_no_phase_sparsifies_cost_no_second_graph():
    algorithm, counter = (
        sf.phases([(0, sf.ste(0.5)), (2, sf.static(0.5, init="magnitude"))]),
        CompileCounter(),
    )
    state = algorithm.init({"w": torch.randn(2, 3), "b": torch.ones(2)})
    update = torch.compile(algorithm.update, backend=counter, fullgraph=True)
    for step in range(4):
        state = update(state, state.params, torch.tensor(step))
    assert counter.frame_count == 1
