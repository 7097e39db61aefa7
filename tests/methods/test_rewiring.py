"""Methods that draw connections in place of others: worked examples and identities."""

import optree
import pytest
import torch

import sparsefn as sf

KEY = sf.random.key(0)
NET = {
    "a": torch.randn(12, 16, generator=torch.Generator().manual_seed(0)) / 4,
    "b": torch.ones(16),
}
NET["c"] = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) / 4
LEAVES = ("a", "c")


def gradients(step):
    return optree.tree_map(lambda w: torch.sin(w * 7 + step), NET)


def total(state):
    return sum(int(state.masks[path].sum()) for path in LEAVES)


# ---- DSR -----------------------------------------------------------------------------


def test_dsr_keeps_the_total_and_steers_tau():
    dsr = sf.methods.dsr(0.5, target=10, when=sf.every(2), key=KEY)
    algorithm = sf.with_optimizer(dsr, sf.optimizers.sgd(0.01))
    state, taus = algorithm.init(NET), []
    for step in range(24):
        grads, before = gradients(step), state
        state = algorithm.update(state, grads, step)
        assert total(state) == 96 + 64
        memory = state.scores["drop"]
        if step % 2 == 0:
            gone = {path: before.masks[path] & ~state.masks[path] for path in LEAVES}
            moved = {path: before.params[path] - 0.01 * grads[path] for path in LEAVES}
            assert all(
                bool((moved[p][gone[p]].abs() <= memory["tau"] * (1 + 1e-6)).all())
                for p in LEAVES
            )
            assert all(int(state.masks[path].sum()) for path in LEAVES)
        taus.append(float(memory["next"] / memory["tau"]))
    assert set(taus) <= {0.5, 1.0, 2.0} and {1.0, 2.0} <= set(taus)


@pytest.mark.parametrize(("lost", "factor"), [(14, 0.5), (10, 1.0), (6, 2.0)])
def test_tau_follows_how_many_are_dropped(lost, factor):
    weights = {
        "w": torch.cat([torch.full((lost,), 1e-4), torch.ones(30 - lost)]).reshape(
            1, 30
        )
    }
    algorithm = sf.methods.dsr(0.0, target=10, when=sf.always(), key=KEY)
    memory = algorithm.update(algorithm.init(weights), weights, 0).scores["drop"]
    assert (float(memory["tau"]), float(memory["next"])) == (1e-3, 1e-3 * factor)


def test_a_distribution_says_how_dsr_starts_and_what_deep_rewiring_keeps():
    erk = sf.budgets.erk()
    start = sf.static(0.9, distribution=erk, key=KEY).init(NET).masks
    shares = [int(start[path].sum()) for path in LEAVES]
    # uniform has them equal
    assert shares[0] / NET["a"].numel() < shares[1] / NET["c"].numel()
    dsr = sf.methods.dsr(0.9, target=4, when=sf.always(), key=KEY, distribution=erk)
    deep = sf.methods.deep_rewiring(0.9, alpha=1e-2, std=0.1, key=KEY, distribution=erk)
    for rule, each in ((dsr, False), (deep, True)):
        algorithm = sf.with_optimizer(rule, sf.optimizers.sgd(0.1))
        state, changed = algorithm.init(NET), False
        assert optree.tree_all(optree.tree_map(torch.equal, state.masks, start))
        for step in range(6):
            before = state.masks
            state = algorithm.update(state, gradients(step), step)
            changed |= not optree.tree_all(
                optree.tree_map(torch.equal, state.masks, before)
            )
            assert total(state) == sum(shares)
            assert (
                not each or [int(state.masks[path].sum()) for path in LEAVES] == shares
            )
        assert changed


def test_regrowth_follows_the_survivors():
    def leaf(small, large, n):
        return torch.cat(
            [torch.full((small,), 1e-4), torch.ones(large), torch.zeros(n)]
        )[None]

    weights = {"a": leaf(2, 30, 38), "b": leaf(6, 10, 54)}
    algorithm = sf.methods.dsr(92 / 140, when=sf.always(), key=KEY)
    state = algorithm.init(weights)
    state = state._replace(
        params=weights, masks={path: leaf != 0 for path, leaf in weights.items()}
    )
    masks = algorithm.update(state, weights, 0).masks
    assert {path: int(mask.sum()) for path, mask in masks.items()} == {"a": 36, "b": 12}


# ---- deep rewiring -------------------------------------------------------------------


def test_deep_rewiring_keeps_the_signs():
    rewired = sf.methods.deep_rewiring(0.5, alpha=1e-2, std=0.1, key=KEY)
    algorithm = sf.with_optimizer(rewired, sf.optimizers.sgd(0.05))
    state, changes = algorithm.init(NET), 0
    signs = {path: torch.sign(NET[path]) for path in LEAVES}
    for step in range(12):
        before = state.masks
        state = algorithm.update(state, gradients(step), step)
        assert all(
            bool((state.params[p] * signs[p] > 0)[state.masks[p]].all()) for p in LEAVES
        )
        assert total(state) == 96 + 64
        changes += sum(int((before[p] & ~state.masks[p]).sum()) for p in LEAVES)
    assert changes > 0


def test_deep_rewiring_without_flips_is_sgd():
    rewired = sf.methods.deep_rewiring(0.5, alpha=0.0, std=0.0, key=KEY)
    algorithms = [
        sf.with_optimizer(a, sf.optimizers.sgd(1e-6))
        for a in (rewired, sf.static(0.5, key=KEY))
    ]
    states = [algorithm.init(NET) for algorithm in algorithms]
    for step in range(3):
        states = [
            a.update(s, gradients(step), step)
            for a, s in zip(algorithms, states, strict=True)
        ]
    assert all(
        torch.equal(states[0].params[path], states[1].params[path]) for path in NET
    )


def test_deep_rewiring_drops_a_changed_sign():
    weights = {"w": torch.tensor([[0.5, -0.2, 0.3, -0.3]])}
    algorithm = sf.with_optimizer(
        sf.methods.deep_rewiring(0.5, std=0.0, key=KEY), sf.optimizers.sgd(1.0)
    )
    start = {"w": torch.tensor([[True, True, False, False]])}
    state = algorithm.init(weights)
    state = state._replace(params=sf.apply_masks(weights, start), masks=start)
    state = algorithm.update(state, {"w": torch.tensor([[0.1, -0.3, 9.0, 9.0]])}, 0)
    mask, w = state.masks["w"][0], state.params["w"][0]
    assert (
        bool(mask[0])
        and int(mask.sum()) == 2
        and float(w[0]) == pytest.approx(0.4, abs=2e-5)
    )
    assert float(w[1:].abs().sum()) == pytest.approx(1e-12)


def test_l1_and_noise_leave_dense_leaves_alone():
    algorithm = sf.methods.deep_rewiring(0.5, alpha=1.0, std=1.0, key=KEY)
    state, zero = algorithm.init(NET), optree.tree_map(torch.zeros_like, NET)
    grads = algorithm.view.grads(state, zero, 0)
    assert not grads["b"].any() and all(
        (grads[p] != 0).equal(state.masks[p]) for p in LEAVES
    )


def test_weights_of_half_precision_start_where_they_do_not_vanish():
    weights = {"w": torch.tensor([[0.5, -0.2, 0.3, -0.3]], dtype=torch.float16)}
    algorithm = sf.with_optimizer(
        sf.methods.deep_rewiring(0.5, std=0.0, key=KEY), sf.optimizers.sgd(1.0)
    )
    state = algorithm.init(weights)
    state = algorithm.update(
        state, {"w": torch.tensor([[0.7, -0.7, 0.7, -0.7]], dtype=torch.float16)}, 0
    )
    assert int((state.params["w"] != 0).sum()) == int(state.masks["w"].sum()) == 2


# ---- CHTs ----------------------------------------------------------------------------


def test_chts_keeps_the_counts_and_grows_at_zero():
    algorithm = sf.methods.chts(0.75, steps=10, when=sf.every(2), key=KEY)
    state = algorithm.init(NET)
    for step in range(5):
        before, state = state, algorithm.update(state, gradients(step), step)
        assert {path: int(state.masks[path].sum()) for path in LEAVES} == {
            "a": 48,
            "c": 32,
        }
        for path in LEAVES:
            grown = state.masks[path] & ~before.masks[path]
            assert (
                bool(grown.any()) == (step % 2 == 0)
                and not state.params[path][grown].any()
            )
            stayed = state.masks[path] & before.masks[path] & (state.params[path] != 0)
            assert torch.equal(state.params[path][stayed], before.params[path][stayed])


def test_cht_takes_the_best_in_place_of_draws():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    weights = {"w": mask * torch.tensor([[8.0, 7, 6, 5], [4, 3, 2, 1], [9, 9, 0.5, 9]])}
    algorithm = sf.methods.chts(
        5 / 12, steps=10, fraction=1 / 7, soft=False, rule="CH3", when=sf.always()
    )
    state = algorithm.init(weights)
    state = state._replace(params=weights, masks={"w": mask})
    found = algorithm.update(state, weights, 0).masks["w"]
    left = mask.clone()
    left[2, 2] = False  # the smallest weight
    scores = sf.scores.topology("CH3")(sf.State(weights, {"w": left}), (), 0)["w"]
    assert torch.equal(found, sf.masks.grow_highest(scores, left, 1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: sf.methods.chts(0.5, steps=0),
            ValueError,
            "chts: expected steps >= 1, got 0",
        ),
        (
            lambda: sf.methods.chts(0.5, steps=9, rule="CH1"),
            ValueError,
            "expected rule to be .*, got 'CH1'",
        ),
        (
            lambda: sf.methods.dsr(0.5, when=3),
            TypeError,
            "expected when to be a trigger",
        ),
        (
            lambda: sf.methods.dsr(0.5, when=sf.always(), tau=0.0),
            ValueError,
            "expected tau > 0, got 0.0",
        ),
        (
            lambda: sf.methods.dsr(0.5, when=sf.always(), target=1.5),
            TypeError,
            "expected target to be an int",
        ),
        (
            lambda: sf.methods.deep_rewiring(0.5, std=-1.0),
            ValueError,
            "expected std >= 0",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
