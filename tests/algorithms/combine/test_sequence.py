"""Sequences: algorithms one after another in one update."""

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing.harness import Operations


def row(*values):
    return {"w": torch.tensor([values], dtype=torch.float32)}


def kept(state, path="w"):
    return set(state.masks[path].flatten().nonzero().flatten().tolist())


def granet(when, fraction, level, **options):
    prune = sf.gmp(
        level, when=when, init="dense", distribution=sf.budgets.global_(), **options
    )
    return sf.sequence(prune, sf.rigl("current", drop_fraction=fraction, when=when))


def test_granet_prunes_and_regrows_in_one_update():
    # Liu et al. 2021: the counts after the update are those after the pruning; a weight
    # that was just pruned comes back, at 0, if its gradient is the largest.
    algorithm = granet(sf.at([1]), 0.5, sf.schedules.piecewise({0: 0.0, 1: 0.5}))
    state = algorithm.init(row(8, 7, 6, 5, 4, 3, 2, 1))
    assert kept(state) == set(range(8))
    grads = row(0, 0, 0, 0, 1, 2, 9, 8)
    state = algorithm.update(state, grads, 0)
    assert kept(state) == set(range(8))
    state = algorithm.update(state, grads, 1)
    assert kept(state) == {0, 1, 6, 7}
    assert state.params["w"].tolist() == [[8.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    chained = sf.chain(
        sf.gmp(0.5, init="dense"),
        sf.rigl("current", drop_fraction=0.5, when=sf.always()),
    )
    assert kept(
        chained.update(chained.init(row(8, 7, 6, 5, 4, 3, 2, 1)), grads, 1)
    ) == {0, 1, 2, 3}


def test_granet_has_the_counts_of_its_cubic_in_every_leaf():
    # .5 -> .1 kept: at half time the sparsity is .9 - .4 / 8 = .85.
    level = sf.schedules.polynomial(0.5, 0.9, begin=0, end=8)
    params = {"a": torch.randn(10, 10), "b": 3 * torch.randn(10, 10)}
    prune = sf.gmp(level, distribution=sf.budgets.global_(), when=sf.every(2))
    algorithm = granet(sf.every(2), sf.schedules.cosine_decay(0.5, 8), level)
    state = algorithm.init(params)
    for step in range(9):
        pruned = prune.update(
            state._replace(scores=(), key=sf.random.key(0)), params, step
        )
        state = algorithm.update(state, optree.tree_map(torch.cos, params), step)
        assert [int(m.sum()) for m in state.masks.values()] == [
            int(m.sum()) for m in pruned.masks.values()
        ]
        if step % 2 == 0:
            assert sf.masks.n_kept(state.masks) == 200 - round(200 * level(step))
        if step == 4:
            assert sf.masks.sparsity(state.masks) == pytest.approx(0.85)


def test_neuroregeneration_keeps_the_optimizer_in_step():
    algorithm = sf.with_optimizer(
        granet(sf.every(2), 0.5, 0.5), sf.optimizers.sgd(0.1, momentum=0.9)
    )
    state = algorithm.init({"w": torch.randn(6, 6)})
    for step in range(6):
        state = algorithm.update(
            state, {"w": torch.cos(5 * sf.effective(state)["w"])}, step
        )
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
    assert state.parts[0].scores["score"]["w"].tolist() == [[0.5] * 4] * 4
    assert torch.equal(state.parts[1].key, sf.random.key(4))
    before = state.masks["w"]
    assert torch.equal(
        algorithm.update(state, {"w": torch.ones(4, 4)}, 1).masks["w"], before
    )
    after = algorithm.update(state, {"w": torch.ones(4, 4)}, 2).masks["w"]
    assert int(after.sum()) == 8
    assert not torch.equal(after, before)


def test_parts_of_a_sequence_may_sparsify_different_leaves():
    algorithm = sf.sequence(
        sf.gmp(0.5, where="a"), sf.gmp(0.75, where=["a", "b"], regrow=True)
    )
    params = {
        "a": torch.tensor([[4.0, 3.0, 2.0, 1.0]]),
        "b": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        "c": torch.ones(2),
    }
    state = algorithm.init(params)
    assert (kept(state, "a"), kept(state, "b"), state.masks["c"].ndim) == (
        {0, 1},
        {3},
        0,
    )
    state = algorithm.update(state, params, 0)
    assert (kept(state, "a"), kept(state, "b")) == ({0}, {3})


def test_the_same_pruning_twice_is_once():
    params = {"w": torch.randn(6, 6)}
    twice, once = sf.sequence(sf.gmp(0.5), sf.gmp(0.5)), sf.gmp(0.5)
    assert sf.checkpoint.tree_equal(twice.init(params).masks, once.init(params).masks)
    assert sf.checkpoint.tree_equal(
        twice.update(twice.init(params), params, 0).params,
        once.update(once.init(params), params, 0).params,
    )


class TestInsideAChain:
    def test_every_part_chooses_among_what_is_left(self):
        w = torch.arange(1.0, 25.0).reshape(4, 6)
        grads = {"w": w.flip(1)}
        rows = sf.one_shot(0.5, pattern=sf.patterns.channel(0))
        inside = sf.sequence(
            sf.gmp(0.875, init="dense"),
            sf.rigl(
                0.75,
                pattern=sf.patterns.row_balanced(),
                drop_fraction=0.0,
                when=sf.always(),
            ),
        )
        algorithm = sf.chain(rows, inside)
        state = algorithm.update(algorithm.init({"w": w}), grads, 0)
        assert state.masks["w"].sum(1).tolist() == [0, 0, 3, 3]
        # The best three by magnitude stay, the rest grows where the gradient is
        # largest.
        assert state.masks["w"][3].tolist() == [False, False, False, True, True, True]
        assert state.masks["w"][2].tolist() == [True, True, True, False, False, False]
        assert torch.equal(state.params["w"] != 0, torch.arange(24).reshape(4, 6) >= 21)

    def test_parts_without_within_are_intersected(self):
        w = torch.arange(1.0, 9.0).reshape(2, 4)
        given = {"w": torch.tensor([[True, False] * 2] * 2)}
        inside = sf.sequence(sf.from_masks(given), sf.one_shot(0.5))
        algorithm = sf.chain(sf.one_shot(0.5, pattern=sf.patterns.channel(0)), inside)
        state = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0)
        assert state.masks["w"].tolist() == [[False] * 4, [True, False, True, False]]

    def test_is_the_same_alone(self):
        assert sf.sequence(sf.gmp(0.5)).within is not None
        w = {"w": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
        parts = (sf.gmp(0.5), sf.rigl("current", drop_fraction=0.5, when=sf.always()))
        everything = {"w": torch.ones(4, 6, dtype=torch.bool)}
        plain, within = sf.sequence(*parts), sf.sequence(*parts).within(everything)
        states = [a.update(a.init(w), w, 0) for a in (plain, within)]
        assert torch.equal(states[0].masks["w"], states[1].masks["w"])

    @pytest.mark.deep
    def test_srigl_with_ablation_under_vmap_and_compile(self):
        rows = sf.patterns.channel(0, norm=float("inf"))

        @sf.scores.leafwise
        def salient(weight, grad, mask):
            return (
                sf.masks.topk_mask(weight.abs(), 8) | sf.masks.topk_mask(grad.abs(), 3)
            ).float()

        per_row = sf.scores.by_unit(salient, rows, lambda scores: scores.sum(-1))
        refill = sf.rigl(
            0.75,
            pattern=sf.patterns.row_balanced(),
            drop_fraction=0.0,
            when=sf.always(),
        )
        algorithm = sf.chain(
            sf.gmp(
                sf.counts.above(1.5, at_least=2),
                score=per_row,
                pattern=rows,
                regrow=True,
            ),
            sf.sequence(sf.gmp(0.8), refill),
        )
        w, g = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0))

        def run(w, g):
            return algorithm.update(algorithm.init({"w": w}), {"w": g}, 0)

        states = [run(*pair) for pair in zip(w, g, strict=True)]
        for state in states:
            fans = state.masks["w"].sum(1)
            assert (
                int(fans.sum()) == 12
                and int(fans[fans > 0].max() - fans[fans > 0].min()) <= 1
            )
        # rows are gone
        assert any(int((state.masks["w"].sum(1) == 0).sum()) for state in states)
        batched = torch.vmap(run)(w, g)
        assert torch.equal(
            batched.masks["w"], torch.stack([state.masks["w"] for state in states])
        )
        update = torch.compile(algorithm.update, backend="aot_eager", fullgraph=True)
        compiled = update(algorithm.init({"w": w[0]}), {"w": g[0]}, 0)
        assert torch.equal(compiled.masks["w"], states[0].masks["w"])


def test_between_triggers_a_sequence_inside_a_chain_does_no_work():
    when = sf.every(2)
    algorithm = sf.chain(
        sf.gmp(0.25, when=when),
        sf.sequence(sf.gmp(0.5, when=when), sf.rigl("current", when=when)),
    )
    state = algorithm.init({"w": torch.randn(4, 4)})
    state = algorithm.update(state, state.params, 0)
    with Operations() as work:
        assert algorithm.update(state, state.params, 1).masks is state.masks
    assert not work.operations
