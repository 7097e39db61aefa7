"""`sequence` inside one update, `phases` over the steps, and the methods that alternate."""

import optree
import pytest
import torch

import sparsefn as sf


def row(*values):
    return {"w": torch.tensor([values], dtype=torch.float32)}


def kept(state, path="w"):
    return set(state.masks[path].flatten().nonzero().flatten().tolist())


# ---- sequence -----------------------------------------------------------------------------------


def granet(when, fraction, level, **options):
    prune = sf.gmp(level, when=when, init="dense", distribution=sf.budgets.global_(), **options)
    return sf.sequence(prune, sf.rigl("current", drop_fraction=fraction, when=when))


def test_granet_prunes_and_regrows_in_one_update():
    # Liu et al. 2021: the counts after the update are those after the pruning; a weight that was just
    # pruned comes back, at 0, if its gradient is the largest.
    algorithm = granet(sf.at([1]), 0.5, sf.schedules.piecewise({0: 0.0, 1: 0.5}))
    state = algorithm.init(row(8, 7, 6, 5, 4, 3, 2, 1))
    assert kept(state) == set(range(8))
    grads = row(0, 0, 0, 0, 1, 2, 9, 8)
    state = algorithm.update(state, grads, 0)
    assert kept(state) == set(range(8))
    state = algorithm.update(state, grads, 1)
    assert kept(state) == {0, 1, 6, 7}
    assert state.params["w"].tolist() == [[8.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    chained = sf.chain(sf.gmp(0.5, init="dense"), sf.rigl("current", drop_fraction=0.5, when=sf.always()))
    assert kept(chained.update(chained.init(row(8, 7, 6, 5, 4, 3, 2, 1)), grads, 1)) == {0, 1, 2, 3}


def test_granet_has_the_counts_of_its_cubic_in_every_leaf():
    # .5 -> .1 kept: at half time the sparsity is .9 - .4 / 8 = .85.
    level = sf.schedules.polynomial(0.5, 0.9, begin=0, end=8)
    params = {"a": torch.randn(10, 10), "b": 3 * torch.randn(10, 10)}
    prune = sf.gmp(level, distribution=sf.budgets.global_(), when=sf.every(2))
    algorithm = granet(sf.every(2), sf.schedules.cosine_decay(0.5, 8), level)
    state = algorithm.init(params)
    for step in range(9):
        pruned = prune.update(state._replace(scores=(), key=sf.random.key(0)), params, step)
        state = algorithm.update(state, optree.tree_map(torch.cos, params), step)
        assert [int(m.sum()) for m in state.masks.values()] == [int(m.sum()) for m in pruned.masks.values()]
        if step % 2 == 0:
            assert sf.masks.n_kept(state.masks) == 200 - round(200 * level(step))
        if step == 4:
            assert sf.masks.sparsity(state.masks) == pytest.approx(0.85)


def test_neuroregeneration_keeps_the_optimizer_in_step():
    algorithm = sf.with_optimizer(granet(sf.every(2), 0.5, 0.5), sf.optimizers.sgd(0.1, momentum=0.9))
    state = algorithm.init({"w": torch.randn(6, 6)})
    for step in range(6):
        state = algorithm.update(state, {"w": torch.cos(5 * sf.effective(state)["w"])}, step)
        off = ~state.masks["w"]
        assert not state.params["w"][off].any()
        assert not state.opt.momentum["w"][off].any()
    assert sf.masks.n_kept(state.masks) == 18


def test_each_part_of_a_sequence_keeps_its_memory_and_key():
    parts = [
        sf.gmp(0.5, score=sf.scores.momentum(0.5), when=sf.at([2])),
        sf.set("current", drop_fraction=0.5, key=sf.random.key(4), when=sf.at([2])),
    ]
    algorithm = sf.sequence(*parts)
    state = algorithm.init({"w": torch.randn(4, 4)})
    state = algorithm.update(state, {"w": torch.ones(4, 4)}, 0)
    assert state.scores["0"]["scores"]["score"]["w"].tolist() == [[0.5] * 4] * 4
    assert torch.equal(state.key["1"], sf.random.key(4))
    before = state.masks["w"]
    assert torch.equal(algorithm.update(state, {"w": torch.ones(4, 4)}, 1).masks["w"], before)
    after = algorithm.update(state, {"w": torch.ones(4, 4)}, 2).masks["w"]
    assert int(after.sum()) == 8
    assert not torch.equal(after, before)


def test_parts_of_a_sequence_may_sparsify_different_leaves():
    algorithm = sf.sequence(sf.gmp(0.5, where="a"), sf.gmp(0.75, where=["a", "b"], regrow=True))
    params = {"a": torch.tensor([[4.0, 3.0, 2.0, 1.0]]), "b": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "c": torch.ones(2)}
    state = algorithm.init(params)
    assert (kept(state, "a"), kept(state, "b"), state.masks["c"].ndim) == ({0, 1}, {3}, 0)
    state = algorithm.update(state, params, 0)
    assert (kept(state, "a"), kept(state, "b")) == ({0}, {3})


def test_the_same_pruning_twice_is_once():
    params = {"w": torch.randn(6, 6)}
    twice, once = sf.sequence(sf.gmp(0.5), sf.gmp(0.5)), sf.gmp(0.5)
    assert sf.checkpoint.tree_equal(twice.init(params).masks, once.init(params).masks)
    assert sf.checkpoint.tree_equal(
        twice.update(twice.init(params), params, 0).params, once.update(once.init(params), params, 0).params
    )


# ---- phases -------------------------------------------------------------------------------------


def test_sparse_pretraining_ends_in_dense_finetuning():
    # Thangarasa et al. 2023: at T the effective weights are the same and all masks True; the first dense
    # step moves what was pruned by exactly -lr * g, from a fresh optimizer.
    algorithm = sf.phases([(0, sf.static(0.75, init="magnitude")), (2, sf.dense())])
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.5, momentum=0.9), skip=sf.at([2]), reset=sf.at([2]))
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
    # Lu et al. 2023 (STEP): Adam as if alone until T, then 2 of 4 with every weight trained on.
    optimizer = sf.optimizers.adam(0.1)
    algorithm = sf.phases([(0, sf.dense()), (3, sf.ste(0.5, pattern=sf.patterns.nm(2, 4)))])
    algorithm, alone = sf.with_optimizer(algorithm, optimizer), sf.with_optimizer(sf.dense(), optimizer)
    state, dense = (a.init({"w": torch.randn(4, 8)}) for a in (algorithm, alone))
    dense = dense._replace(params=state.params)
    for step in range(6):
        grads = {"w": torch.sin(sf.effective(state)["w"]) + 0.3}
        before = state
        state = algorithm.update(state, grads, step)
        if step < 3:
            dense = alone.update(dense, grads, step)
            assert sf.checkpoint.tree_equal((state.params, state.opt), (dense.params, dense.opt))
        else:
            assert int(state.masks["w"].sum()) == 16
            assert (state.params["w"] != before.params["w"]).all()


def test_each_phase_begins_from_the_effective_weights():
    algorithm = sf.phases([(0, sf.static(0.5, init="magnitude", pruned="keep")), (1, sf.gmp(0.25))])
    state = algorithm.init(row(4, 3, 2, 1))
    assert state.params["w"].tolist() == [[4.0, 3.0, 2.0, 1.0]]
    state = algorithm.update(state, row(0, 0, 0, 0), 1)
    assert state.params["w"].tolist() == [[4.0, 3.0, 0.0, 0.0]]


def test_a_phase_keeps_its_own_memory_and_makes_it_afresh_at_its_begin():
    first = sf.snfs(0.5, decay=0.5, when=sf.never())
    algorithm = sf.phases([(0, first), (2, sf.rigl(0.5, grow=sf.scores.momentum(0.5), when=sf.never()))])
    state = algorithm.init(row(4, 3, 2, 1))
    for step in range(4):
        state = algorithm.update(state, row(1, 1, 1, 1), step)
    assert state.scores["0"]["scores"]["grow"]["w"][0, 0] == 0.75
    assert state.scores["1"]["scores"]["grow"]["w"][0, 0] == 0.75


def test_masks_keep_their_shapes_through_all_phases():
    params = {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "c": torch.randn(4)}
    algorithm = sf.phases([(0, sf.static(0.5, where="a")), (1, sf.static(0.5, where="b")), (2, sf.dense())])
    state = algorithm.init(params)
    for step in range(4):
        assert {path: mask.ndim for path, mask in state.masks.items()} == {"a": 2, "b": 2, "c": 0}
        state = algorithm.update(state, params, step)
        sparse = {path for path in ("a", "b") if not state.masks[path].all()}
        assert sparse == [{"a"}, {"b"}, set(), set()][step]


def test_tensor_steps_and_vmapped_steps_walk_the_same_phases():
    algorithm = sf.with_optimizer(
        sf.phases([(0, sf.static(0.5)), (2, sf.rigl(0.75, when=sf.every(2))), (5, sf.dense())]),
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
    assert all(sf.checkpoint.tree_equal(a, b) for a, b in zip(ints, tensors, strict=True))

    # Members that stand at different steps, and so in different phases.
    states = [algorithm.init(params), *ints[:-1]]
    grads = [optree.tree_map(lambda w: torch.cos(3 * w), sf.effective(state)) for state in states]
    batch = torch.func.vmap(algorithm.update)(sf.ensemble.stack(states), sf.ensemble.stack(grads), torch.arange(7))
    for i, expected in enumerate(ints):
        assert sf.checkpoint.tree_equal(sf.ensemble.member(batch, i), expected), f"step {i}"
