"""Learned gates: hard concrete and sigmoid ones. Recorded values are in
test_golden_maps.py.
"""

import math
import re

import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.reparam.gates import drawn_gate

KEY = sf.random.key(0)


def loss(params):
    return sum((torch.cos(3 * w) + w).sum() for w in params.values())


def trained(algorithm, params, steps):
    state = algorithm.init(params)
    for step in range(steps):
        state = algorithm.update(
            state, torch.func.grad(loss)(sf.effective(state)), step
        )
    return state


def test_the_chance_to_be_kept_is_that_of_4096_draws():
    map_ = sf.reparam.hard_concrete()
    for log_alpha in (-3.0, -1.0, 0.0, 2.0):
        gates = {"w": torch.full((4096,), log_alpha)}
        latents = {"latent": {"w": torch.ones(4096)}, "gate": gates}
        weights, masks = map_.apply(latents, 5, KEY)
        chance = sf.reparam.chance_kept(torch.tensor(log_alpha)).item()
        deviation = math.sqrt(chance * (1 - chance) / 4096)
        assert abs(masks["w"].double().mean().item() - chance) < 4 * deviation
        assert torch.equal(masks["w"], weights["w"] > 0)


def test_gates_of_the_paper():
    # Louizos et al. 2018: log alpha 0, draws .5, .9, .05; P(z > 0) = .8318, and .4010
    # at log alpha -2.
    gates = drawn_gate(torch.zeros(3), torch.tensor([0.5, 0.9, 0.05]), 2 / 3, -0.1, 1.1)
    torch.testing.assert_close(gates, torch.tensor([0.5, 1.0, 0.0]))
    chances = sf.reparam.chance_kept(torch.tensor([0.0, -2.0, 1e9, -1e9]))
    torch.testing.assert_close(
        chances, torch.tensor([0.8318, 0.4010, 1 - 1e-6, 1e-6]), rtol=1e-4, atol=1e-6
    )


def test_hard_concrete_draws_by_key_path_and_step_and_settles_without_noise():
    map_ = sf.reparam.hard_concrete(droprate=0.3)
    latents = map_.init({"a": torch.ones(64), "b": torch.ones(64)}, KEY)
    assert latents["gate"]["a"].mean().item() == pytest.approx(
        math.log(0.7 / 0.3), abs=0.01
    )
    assert 0.005 < latents["gate"]["a"].std().item() < 0.02
    one, same, other = (
        map_.apply(latents, step, KEY)[0] for step in (3, torch.tensor(3), 4)
    )
    assert torch.equal(one["a"], same["a"])
    assert not torch.equal(one["a"], other["a"]) and not torch.equal(one["a"], one["b"])
    settled = map_.settled(latents, 3)[0]["a"]
    expected = (torch.sigmoid(latents["gate"]["a"]) * (1.1 + 0.1) - 0.1).clamp(0, 1)
    torch.testing.assert_close(settled, expected)


def test_l0_regularisation_prunes_and_is_evaluated_without_noise():
    def penalty(tree, step):
        return 0.1 * sum(
            sf.reparam.chance_kept(a).sum() for a in tree["latent"]["gate"].values()
        )

    gates = sf.reparametrised(sf.reparam.hard_concrete())
    algorithm = sf.with_optimizer(
        sf.with_terms(gates, sf.terms.penalty(penalty)), sf.optimizers.sgd(1.0)
    )
    params = {"w": torch.zeros(4, 8)}
    state = algorithm.init(params)
    for step in range(160):
        state = algorithm.update(state, params, step)
    assert state.scores["latent"]["gate"]["w"].max() < -0.5
    assert 0.0 < sf.masks.sparsity(state.masks) < 1.0
    settled = sf.settled(algorithm, state)
    assert sf.masks.sparsity(settled.masks) > sf.masks.sparsity(state.masks)
    assert not sf.effective(settled)["w"][~settled.masks["w"]].any()
    assert (
        sf.settled(algorithm, sf.settled(algorithm, state))
        .masks["w"]
        .equal(settled.masks["w"])
    )
    assert settled.scores is state.scores and settled.opt is state.opt


def test_log_alpha_is_clamped_after_each_step():
    algorithm = sf.with_optimizer(
        sf.reparametrised(sf.reparam.hard_concrete()), sf.optimizers.sgd(1e6)
    )
    state = trained(algorithm, {"w": torch.ones(3, 4)}, 2)
    assert state.scores["latent"]["gate"]["w"].abs().max().item() == pytest.approx(
        math.log(100.0)
    )


@pytest.mark.parametrize("pattern", [sf.patterns.channel(1), sf.patterns.block((2, 2))])
def test_one_gate_for_each_unit(pattern):
    algorithm = sf.reparametrised(sf.reparam.hard_concrete(pattern=pattern))
    state = algorithm.init({"w": torch.ones(4, 6), "b": torch.ones(4)})
    shape = (1, 6) if pattern == sf.patterns.channel(1) else (2, 3)
    assert state.scores["latent"]["gate"]["w"].shape == shape
    state = trained(
        sf.with_optimizer(algorithm, sf.optimizers.adam(0.1)),
        {"w": torch.ones(4, 6)},
        3,
    )
    mask = state.masks["w"]
    units = (
        mask.all(0) | ~mask.any(0)
        if len(shape) and shape[0] == 1
        else torch.tensor(True)
    )
    assert units.all()


@pytest.mark.parametrize(
    "make", [sf.reparam.hard_concrete, lambda: sf.reparam.sigmoid_gate(2.0, init=-0.1)]
)
def test_latents_train_as_by_autograd(make):
    map_ = make()
    algorithm = sf.with_optimizer(
        sf.reparametrised(map_, key=KEY), sf.optimizers.adam(0.05)
    )
    params = {"w": torch.linspace(-1.0, 2.0, 12).reshape(3, 4)}
    state = algorithm.init(params)
    tree = sf.reparametrised(map_, key=KEY).view.get(state)["latent"]
    optimizer = sf.optimizers.adam(0.05)
    moments = optimizer.init(tree)
    for step in range(5):
        leaves = {
            name: {"w": x["w"].detach().requires_grad_()} for name, x in tree.items()
        }
        loss(map_.apply(leaves, step, KEY)[0]).backward()
        slopes = {name: {"w": x["w"].grad} for name, x in leaves.items()}
        steps, moments = optimizer.update(slopes, moments, params=tree)
        tree = {name: {"w": x["w"] + steps[name]["w"]} for name, x in tree.items()}
        state = algorithm.update(
            state, torch.func.grad(loss)(sf.effective(state)), step
        )
    assert sf.checkpoint.tree_equal(state.scores["latent"], tree)


def test_sigmoid_gates_start_at_the_weights_and_harden():
    # Savarese et al. 2020, s0 = -.1: at s = .05 1.0789 at temperature 1, 2.1051 at 200;
    # .0379 at s = -.02.
    latents = {
        "latent": {"w": torch.ones(3)},
        "gate": {"w": torch.tensor([0.05, -0.02, -0.1])},
    }
    at = {
        b: sf.reparam.sigmoid_gate(b, init=-0.1).apply(latents, 0, KEY)[0]["w"].tolist()
        for b in (1.0, 200.0)
    }
    assert at[1.0] == [
        pytest.approx(1.0789, abs=1e-4),
        pytest.approx(1.0421, abs=1e-4),
        pytest.approx(1.0),
    ]
    assert at[200.0][:2] == [
        pytest.approx(2.1051, abs=2e-4),
        pytest.approx(0.0379, abs=1e-4),
    ]


def test_rounds_of_continuous_sparsification():
    def temperature(step):
        return 200.0 ** ((step % 4) / 3)

    map_ = sf.reparam.sigmoid_gate(
        temperature, init=-0.1, round_end=sf.every(4, start=3)
    )
    algorithm = sf.with_optimizer(sf.reparametrised(map_), sf.optimizers.sgd(0.0))
    state = algorithm.init({"w": torch.ones(1, 2)})
    gates = {**state.scores["latent"], "gate": {"w": torch.tensor([[0.3, -0.01]])}}
    state = state._replace(scores={**state.scores, "latent": gates})
    for step in range(4):
        state = algorithm.update(state, {"w": torch.zeros(1, 2)}, step)
        if step < 3:
            assert state.scores["latent"]["gate"]["w"].tolist() == [
                [pytest.approx(0.3), pytest.approx(-0.01)]
            ]
    # .3 * 200 and -.01 * 200, at most -.1.
    assert state.scores["latent"]["gate"]["w"].tolist() == [
        [pytest.approx(-0.1), pytest.approx(-2.0)]
    ]
    assert not sf.settled(algorithm, state).masks["w"].any()


def test_gates_of_half_precision_leaves():
    for map_ in (sf.reparam.hard_concrete(), sf.reparam.sigmoid_gate(2.0)):
        algorithm = sf.with_optimizer(sf.reparametrised(map_), sf.optimizers.sgd(0.1))
        state = trained(algorithm, {"w": torch.ones(2, 4, dtype=torch.bfloat16)}, 2)
        assert (
            state.params["w"].dtype
            == state.scores["latent"]["gate"]["w"].dtype
            == torch.bfloat16
        )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: sf.reparam.hard_concrete(beta=0.0),
            "hard_concrete: expected beta > 0, got 0.0",
        ),
        (
            lambda: sf.reparam.hard_concrete(gamma=0.1),
            "hard_concrete: expected gamma < 0 and zeta > 1, got 0.1 and 1.1",
        ),
        (
            lambda: sf.reparam.chance_kept(torch.ones(1), zeta=1.0),
            "chance_kept: expected gamma < 0 and zeta > 1",
        ),
        (
            lambda: sf.reparam.hard_concrete(droprate=1.0),
            "hard_concrete: expected 0 < droprate < 1, got 1.0",
        ),
        (
            lambda: sf.reparam.sigmoid_gate(1.0, init=math.inf),
            "sigmoid_gate: expected a finite init, got inf",
        ),
        (
            lambda: sf.reparam.hard_concrete(pattern=sf.patterns.nm(2, 4)).init(
                {"w": torch.ones(2, 3)}, KEY
            ),
            "nm(2, 4, axis=-1): expected axis -1 divisible by 4, got shape (2, 3) at "
            "'w'",
        ),
    ],
)
def test_bad_arguments(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()


def test_a_round_end_is_a_trigger():
    with pytest.raises(
        TypeError, match="expected round_end to be a trigger such as every"
    ):
        sf.reparam.sigmoid_gate(1.0, round_end=3)


@pytest.mark.parametrize(
    "make", [sf.reparam.hard_concrete, lambda: sf.reparam.sigmoid_gate(2.0)]
)
def test_gates_and_weights_train_at_rates_of_their_own(make):
    sgd, params = (
        sf.optimizers.sgd,
        {"w": torch.linspace(-1.0, 2.0, 12).reshape(3, 4), "b": torch.ones(3)},
    )
    algorithm = sf.reparametrised(make(), key=KEY)
    far = math.log(100.0) if make is sf.reparam.hard_concrete else math.inf
    latents = sf.optimizers.by_path(
        [("latent.gate.*", sgd(3.0)), ("latent.*", sgd(0.5)), ("rest.*", sgd(0.25))]
    )
    nested = sf.optimizers.by_path([("latent.gate.*", sgd(3.0)), ("*", sgd(0.5))])
    state = algorithm.init(params)
    slopes = algorithm.view.grads(state, torch.func.grad(loss)(sf.effective(state)), 0)
    for optimizer in (
        latents,
        sf.optimizers.parts({"latent": nested, "rest": sgd(0.25)}),
    ):
        found = trained(sf.with_optimizer(algorithm, optimizer), params, 1)
        for name, rate in (("gate", 3.0), ("latent", 0.5)):
            expected = (
                state.scores["latent"][name]["w"] - rate * slopes["latent"][name]["w"]
            )
            expected = expected.clamp(-far, far) if name == "gate" else expected
            torch.testing.assert_close(found.scores["latent"][name]["w"], expected)
        torch.testing.assert_close(
            found.params["b"], params["b"] - 0.25 * slopes["rest"]["b"]
        )
