"""Methods that learn what is pruned: held against recordings of the authors' code, by
hand, and by autograd.
"""

import itertools
import math
import re

import pytest
import torch
from golden_data import cases
from torch.func import grad

import sparsefn as sf
from sparsefn.algorithms.reparam.gates import gumbel_gates

methods = sf.methods
SGD = sf.optimizers.sgd


def named(fn):
    return pytest.mark.parametrize(
        "case", cases("reparam", fn), ids=lambda case: case.id
    )


def holding(algorithm, params, **latents):
    """A state of the algorithm with these latents; the next update makes the weights of
    them.
    """
    state = algorithm.init(params)
    return state._replace(
        scores={
            **state.scores,
            "latent": {name: {"w": x} for name, x in latents.items()},
        }
    )


def keeping(n_kept, scores):
    """The sparsity that keeps so many, where the authors truncate."""
    return 1 - n_kept / scores.numel()


@named("GetSubnet")
def test_edge_popup_has_the_masks_and_gradients_of_its_authors(case):
    given, size = case.inputs, case.inputs["score"].numel()
    kept = size - int((1 - case.args["kept"]) * size)
    algorithm = methods.edge_popup(keeping(kept, given["score"]))
    state = algorithm.init({"w": given["weight"]})
    state = algorithm.update(
        state._replace(scores={"learned": {"w": given["score"]}}), state.params, 0
    )
    assert torch.equal(state.masks["w"], case.outputs["mask"].bool())
    found = algorithm.view.grads(state, {"w": given["upstream"]}, 0)
    torch.testing.assert_close(
        found["scores"]["w"], case.outputs["grad_score"], rtol=1e-5, atol=1e-6
    )


def test_edge_popup_by_hand():
    # Ramanujan et al. 2020: scores move by gradient * weight * sign(score).
    weight = torch.tensor([[0.5, -2.0, 1.0, 3.0]])
    algorithm = methods.edge_popup(0.5)
    state = algorithm.init({"w": weight})
    scores = {"learned": {"w": torch.tensor([[-0.9, 0.2, 0.5, -0.1]])}}
    state = algorithm.update(state._replace(scores=scores), state.params, 0)
    assert state.masks["w"].tolist() == [[True, False, True, False]]
    found = algorithm.view.grads(state, {"w": torch.tensor([[1.0, 1.0, -1.0, 2.0]])}, 0)
    assert found["scores"]["w"].tolist() == [[-0.5, -2.0, -1.0, -6.0]]
    trained = sf.with_optimizer(algorithm, SGD(0.1))
    after = trained.update(trained.init({"w": weight}), {"w": torch.ones(1, 4)}, 0)
    assert torch.equal(after.params["w"], weight)


def test_scores_of_edge_popup_start_as_a_kaiming_uniform_draw():
    params = {"a": torch.ones(64, 4, 3, 3), "b": torch.ones(64, 36)}
    one, other = (
        methods.edge_popup(0.5, key=sf.random.key(i)).init(params).scores["learned"]
        for i in (0, 1)
    )
    for score in one.values():
        assert score.abs().max() <= 1 / 6 and score.abs().max() > 0.16
        assert abs(float(score.mean())) < 0.01 and float(score.std()) == pytest.approx(
            1 / 6 / math.sqrt(3), rel=0.05
        )
    assert not torch.equal(one["a"].flatten(1), one["b"]) and not torch.equal(
        one["a"], other["a"]
    )


@named("TopKBinarizer")
def test_movement_has_the_masks_of_its_authors(case):
    score = case.inputs["score"]
    sparsity = keeping(int(case.args["kept"] * score.numel()), score)
    algorithm = methods.movement(sparsity, steps=10)
    state = algorithm.init({"w": torch.zeros_like(score)})
    state = algorithm.update(
        state._replace(scores={"learned": {"w": score}}), state.params, 9
    )
    assert torch.equal(state.masks["w"], case.outputs["mask"].bool())


def test_movement_by_hand():
    # Sanh et al. 2020: a weight that moves away from zero is kept.
    algorithm = sf.with_optimizer(methods.movement(0.5, steps=100), SGD(1.0))
    state = algorithm.init({"w": torch.tensor([[1.0, -1.0]])})
    assert state.masks["w"].all() and not state.scores["learned"]["w"].any()
    state = algorithm.update(state, {"w": torch.tensor([[0.5, 0.5]])}, 0)
    assert state.scores["learned"]["w"].tolist() == [[-0.5, 0.5]] and state.params[
        "w"
    ].tolist() == [[0.5, -1.5]]
    still = {"w": torch.zeros(1, 2)}
    assert algorithm.update(state, still, 80).masks["w"].tolist() == [[False, True]]
    wide = methods.movement(0.8, steps=100)
    params = {"w": torch.ones(10, 100)}
    kept = [
        sf.masks.n_kept(wide.update(wide.init(params), params, t).masks)
        for t in (10, 45, 80, 99)
    ]
    assert kept == [1000, 300, 200, 200]  # a cubic from step 10 to step 80


@named("ThresholdBinarizer")
def test_soft_movement_has_the_masks_of_its_authors(case):
    score = case.inputs["score"]
    algorithm = methods.soft_movement(case.args["tau"], steps=10)
    state = algorithm.init({"w": torch.zeros_like(score)})
    state = algorithm.update(
        state._replace(scores={"learned": {"w": score}}), state.params, 9
    )
    assert torch.equal(state.masks["w"], case.outputs["mask"].bool())


def test_the_penalty_of_soft_movement_is_a_mean_of_means_and_rises_with_the_threshold():
    algorithm = methods.soft_movement(0.1, steps=100, strength=3.0)
    params = {"a": torch.randn(3, 4), "b": torch.randn(2, 2), "bias": torch.zeros(2)}
    state = algorithm.init(params)
    assert all(mask.all() for mask in state.masks.values())  # sigmoid(0) > 0
    scores = {"a": torch.randn(3, 4), "b": torch.randn(2, 2)}
    state = state._replace(scores={"learned": scores | {"bias": torch.zeros(())}})
    zeros = {path: torch.zeros_like(x) for path, x in params.items()}
    for step, share in ((5, 0.0), (45, 1 - 0.5**3), (80, 1.0)):

        def penalty(scores, share=share):
            return (
                3.0 * share * sum(torch.sigmoid(s).mean() for s in scores.values()) / 2
            )

        found = algorithm.view.grads(state, zeros, step)
        for path, slope in grad(penalty)(scores).items():
            torch.testing.assert_close(found["scores"][path], slope)
        assert not any(x.any() for x in found["params"].values())


@named("sparseFunction")
def test_str_has_the_weights_and_gradients_of_its_authors(case):
    given, out = case.inputs, case.outputs
    algorithm = methods.str_(case.args["s"])
    state = algorithm.init({"w": given["weight"]})
    torch.testing.assert_close(sf.effective(state)["w"], out["out"])
    found = algorithm.view.grads(state, {"w": given["upstream"]}, 0)["latent"]
    torch.testing.assert_close(found["latent"]["w"], out["grad_weight"])
    expected = out["grad_threshold"].reshape(())
    torch.testing.assert_close(found["threshold"]["w"], expected, rtol=1e-5, atol=1e-6)


def test_str_by_hand_and_nothing_is_pruned_without_weight_decay():
    weight = torch.tensor([[0.5, -0.3, 0.1]])
    algorithm = methods.str_(init=math.log(0.2 / 0.8))
    state = algorithm.init({"w": weight})
    torch.testing.assert_close(
        sf.effective(state)["w"], torch.tensor([[0.3, -0.1, 0.0]])
    )
    found = algorithm.view.grads(state, {"w": torch.tensor([[1.0, -2.0, 5.0]])}, 0)[
        "latent"
    ]
    assert found["latent"]["w"].tolist() == [[1.0, -2.0, 0.0]]
    assert float(found["threshold"]["w"]) == pytest.approx(-0.48)
    kept = []
    for decay in (0.0, 0.5):
        trained = sf.with_optimizer(methods.str_(), SGD(1.0, weight_decay=decay))
        state = trained.init({"w": weight})
        for step in range(12):
            state = trained.update(state, {"w": torch.zeros(1, 3)}, step)
        kept.append(int(state.masks["w"].sum()))
    assert kept == [3, 0]


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.5])
def test_powerprop_has_the_gradients_of_autograd(alpha):
    weight, upstream = (
        torch.randn(4, 5, dtype=torch.float64),
        torch.randn(4, 5, dtype=torch.float64),
    )
    algorithm = methods.powerprop(alpha=alpha)
    state = algorithm.init({"w": weight})
    torch.testing.assert_close(sf.effective(state)["w"], weight)
    v = state.scores["latent"]["latent"]["w"]
    expected = grad(lambda v: (upstream * v * v.abs() ** (alpha - 1)).sum())(v)
    found = algorithm.view.grads(state, {"w": upstream}, 0)["latent"]["latent"]["w"]
    torch.testing.assert_close(found, expected)


def test_powerprop_by_hand_at_one_and_with_an_inner_algorithm():
    # Schwarz et al. 2021: v = (.5, -2, 0) makes (.25, -4, 0), with slopes 1, 4 and 0.
    state = methods.powerprop().init({"w": torch.tensor([[0.25, -4.0, 0.0]])})
    assert state.scores["latent"]["latent"]["w"].tolist() == [[0.5, -2.0, 0.0]]
    found = methods.powerprop().view.grads(state, {"w": torch.ones(1, 3)}, 0)
    assert found["latent"]["latent"]["w"].tolist() == [[1.0, 4.0, 0.0]]
    params, runs = {"w": torch.randn(4, 8)}, []
    rigl = sf.rigl(0.5, when=sf.every(2), drop_fraction=0.5)
    for algorithm in (
        rigl,
        methods.powerprop(rigl, alpha=1.0),
        methods.powerprop(rigl),
    ):
        trained = sf.with_optimizer(algorithm, SGD(0.1))
        runs.append(trained.init(params))
        for step in range(5):
            grads = {"w": torch.cos(torch.arange(32.0).reshape(4, 8) + step)}
            runs[-1] = trained.update(runs[-1], grads, step)
    # At 1 only grown weights differ: they resume from their latent, where rigl starts
    # them at 0.
    assert all(int(state.masks["w"].sum()) == 16 for state in runs)
    plain = [
        sf.with_optimizer(a, SGD(0.1))
        for a in (sf.static(0.5), methods.powerprop(sf.static(0.5), alpha=1.0))
    ]
    ends = [a.update(a.init(params), params, 0).params["w"] for a in plain]
    assert torch.equal(*ends)


@named("L0Dense")
def test_hard_concrete_has_the_gates_and_the_penalty_of_its_authors(case):
    given, out, args = case.inputs, case.outputs, case.args
    algorithm = methods.hard_concrete(
        args["lamba"],
        weight_decay=args["weight_decay"],
        beta=args["temperature"],
        pattern=sf.patterns.channel(
            0
        ),  # a gate for each input: their weights are (inputs, outputs)
    )
    params = {"w": given["weight"]}
    state = holding(
        algorithm, params, latent=given["weight"], gate=given["log_alpha"][:, None]
    )
    settled = sf.effective(sf.settled(algorithm, state))["w"]
    torch.testing.assert_close(
        settled, given["weight"] * out["test_gate"][:, None], rtol=1e-4, atol=1e-6
    )
    slopes = algorithm.view.grads(state, {"w": torch.zeros_like(given["weight"])}, 0)[
        "latent"
    ]
    expected = -out["grad_penalty_log_alpha"]  # theirs is negative
    torch.testing.assert_close(
        slopes["gate"]["w"][:, 0], expected, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        slopes["latent"]["w"], -out["grad_penalty_weight"], rtol=1e-4, atol=1e-5
    )


def test_hard_concrete_keeps_as_many_as_the_chance_says():
    algorithm = methods.hard_concrete(0.1)
    ones = torch.ones(64, 64)
    for log_alpha in (-2.0, 0.0):
        state = holding(algorithm, {"w": ones}, latent=ones, gate=log_alpha * ones)
        state = algorithm.update(state, {"w": ones}, 0)
        chance = float(sf.reparam.chance_kept(torch.tensor(log_alpha)))
        assert abs(sf.masks.n_kept(state.masks) / 4096 - chance) < 4 * math.sqrt(
            chance * (1 - chance) / 4096
        )


def test_the_penalty_of_hard_concrete_counts_the_weights_that_are_kept():
    algorithm = methods.hard_concrete(0.5, weight_decay=0.25)
    v, alpha = torch.randn(3, 4), torch.randn(3, 4)
    state = holding(algorithm, {"w": v}, latent=v, gate=alpha)

    def penalty(v, alpha):  # Louizos et al. 2018, eq. 12
        open_ = torch.sigmoid(alpha - 2 / 3 * math.log(0.1 / 1.1))
        return (open_ * (0.5 + 0.125 * v.square())).sum()

    found = algorithm.view.grads(state, {"w": torch.zeros(3, 4)}, 0)["latent"]
    for name, slope in zip(
        ("latent", "gate"), grad(penalty, (0, 1))(v, alpha), strict=True
    ):
        torch.testing.assert_close(found[name]["w"], slope)


@named("SoftMaskedConv2d")
def test_continuous_sparsification_has_the_weights_gradients_and_rounds_of_its_authors(
    case,
):
    given, out, beta = case.inputs, case.outputs, case.args["beta"]
    # The last step of a round, at which b is their beta.
    algorithm = methods.continuous_sparsification(
        steps=3, final=beta, strength=0.0, init=case.args["s0"]
    )
    params = {"w": given["weight"]}
    state = holding(algorithm, params, latent=given["weight"], gate=given["score"])
    state = state._replace(scores={**state.scores, "step": torch.tensor(2)})
    slopes = algorithm.view.grads(state, {"w": given["upstream"]}, 2)["latent"]
    torch.testing.assert_close(slopes["latent"]["w"], out["grad_weight"])
    torch.testing.assert_close(
        slopes["gate"]["w"], out["grad_score"], rtol=1e-4, atol=1e-6 * beta
    )
    torch.testing.assert_close(
        sf.effective(sf.settled(algorithm, state))["w"], given["weight"] * out["ticket"]
    )
    after = algorithm.update(state, params, 2).scores["latent"]["gate"]["w"]
    torch.testing.assert_close(after, out["score_after_round"])
    hot = algorithm.update(state, params, 1)  # weights of step 2
    torch.testing.assert_close(sf.effective(hot)["w"], out["out"])


def test_the_penalty_of_continuous_sparsification_is_the_sum_of_the_gates():
    algorithm = methods.continuous_sparsification(
        steps=5, final=16.0, strength=0.5, init=-0.3
    )
    v, s = torch.randn(3, 4), 0.3 * torch.randn(3, 4)
    for step, beta in ((0, 1.0), (1, 2.0), (4, 16.0), (5, 1.0), (8, 8.0)):
        state = holding(algorithm, {"w": v}, latent=v, gate=s)
        found = algorithm.view.grads(state, {"w": torch.zeros(3, 4)}, step)["latent"]

        def penalty(s, beta=beta):
            return (
                0.5
                * (torch.sigmoid(beta * s) / torch.sigmoid(torch.tensor(-0.3))).sum()
            )

        torch.testing.assert_close(found["gate"]["w"], grad(penalty)(s))
        assert not found["latent"]["w"].any()


def test_gates_without_weight_decay():
    optimizer = sf.optimizers.by_path(
        [("latent.gate.*", SGD(0.1)), ("*", SGD(0.1, weight_decay=0.5))]
    )
    algorithm = sf.with_optimizer(
        methods.continuous_sparsification(steps=5, strength=0.0, init=0.2), optimizer
    )
    params = {"w": torch.ones(2, 2)}
    after = algorithm.update(
        algorithm.init(params), {"w": torch.zeros(2, 2)}, 0
    ).scores["latent"]
    assert torch.equal(after["gate"]["w"], torch.full((2, 2), 0.2))
    torch.testing.assert_close(after["latent"]["w"], torch.full((2, 2), 0.95))


PARAMS = {"w": torch.ones(2, 2), "bias": torch.ones(2)}


@pytest.mark.parametrize(
    "make", [lambda: methods.soft_movement(steps=5), lambda: methods.hard_concrete(0.1)]
)
@pytest.mark.filterwarnings("ignore:no leaf is sparsified")
def test_without_a_sparsified_leaf_there_is_no_penalty(make):
    params = {"bias": torch.ones(2)}
    algorithm = sf.with_optimizer(make(), SGD(0.5))
    assert torch.equal(
        algorithm.update(algorithm.init(params), params, 0).params["bias"],
        torch.full((2,), 0.5),
    )


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: methods.edge_popup(1.5),
            ValueError,
            "expected sparsity in [0, 1], got 1.5",
        ),
        (
            lambda: methods.movement(0.5, steps=0),
            ValueError,
            "movement: expected steps >= 1, got 0",
        ),
        (
            lambda: methods.movement(0.5, steps=10, warmup=0.5, cooldown=0.5),
            ValueError,
            "expected end > begin, got begin=5.0, end=5.0",
        ),
        (
            lambda: methods.soft_movement(steps=0.5),
            TypeError,
            "soft_movement: expected steps to be an int, got float",
        ),
        (
            lambda: methods.powerprop(alpha=0.5),
            ValueError,
            "power: expected alpha >= 1, got 0.5",
        ),
        (
            lambda: methods.powerprop(0.9),
            TypeError,
            "expected an inner Algorithm, got float",
        ),
        (
            lambda: methods.hard_concrete(1.0, beta=0.0),
            ValueError,
            "hard_concrete: expected beta > 0, got 0.0",
        ),
        (
            lambda: methods.leap(0.5, steps=0),
            ValueError,
            "leap: expected steps >= 1, got 0",
        ),
        (
            lambda: methods.leap(0.5, steps=5, density=math.nan),
            ValueError,
            "expected density of leap to be finite, got nan",
        ),
        (
            lambda: methods.leap(0.5, steps=5, norm="10"),
            TypeError,
            "expected norm of leap to be a number or a 0-d float tensor, got str",
        ),
        (
            lambda: methods.leap(None, steps=5),
            TypeError,
            "leap: expected sparsity to be a float in [0, 1] or a schedule, got None: "
            "masks of n of m, which have a sparsity of their own, are learned by "
            "sf.methods.maskllm",
        ),
        (
            lambda: methods.leap(0.5, steps=5, scale=25.0),
            TypeError,
            "expected scale of leap to be two numbers, at the first step and at the "
            "last, got 25.0; write (25.0, 25.0)",
        ),
        (
            lambda: methods.leap(0.5, steps=5, temperature=(4.0, 0.0)),
            ValueError,
            "expected the last temperature of leap > 0, got 0.0",
        ),
        (
            lambda: methods.continuous_sparsification(steps=0),
            ValueError,
            "continuous_sparsification: expected steps >= 1, got 0",
        ),
        (
            lambda: methods.continuous_sparsification(steps=5, init=math.inf),
            ValueError,
            "expected a finite init, got inf",
        ),
    ],
)
def test_bad_arguments(make, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        make()


def test_soft_movement_has_the_same_bits_for_int_and_tensor_steps_and_any_leaves():
    algorithm = sf.with_optimizer(
        methods.soft_movement(steps=6, where="*"), sf.optimizers.sgd(0.1)
    )
    for n in (1, 2, 3, 5):
        params = {
            str(i): sf.random.normal(sf.random.key(i), (4, 3 + i)) for i in range(n)
        }
        state = algorithm.init(params)
        for step in range(6):
            new = algorithm.update(state, params, step)
            assert sf.checkpoint.tree_equal(
                new, algorithm.update(state, params, torch.tensor(step))
            ), f"{n}, {step}"
            state = new


@pytest.mark.parametrize("case", cases("learned_masks", "leap"), ids=lambda c: c.id)
def test_leap_has_the_gates_and_the_gradient_of_its_authors(case, monkeypatch):
    args, recorded = case.args, {**case.inputs, **case.outputs}
    paths = ["0", "1"]

    def those(name):
        return {path: recorded[f"{name}{path}"] for path in paths}

    def draws(step, key, path, like):
        return (recorded[f"u{path}"] - 1e-6) / (1 - 2e-6)

    monkeypatch.setattr("sparsefn.algorithms.reparam.gates.uniform_at", draws)
    algorithm = methods.leap(1 - args["density"], steps=args["steps"], where="*")
    state = algorithm.init(those("weight"))
    latents = {"base": those("weight"), "logit": those("logit")}
    step = torch.tensor(args["step"])
    state = state._replace(scores={"latent": latents, "step": step})
    share = args["step"] / args["steps"]
    gates = gumbel_gates(
        those("logit"), 25 + 325 * share, 4 - 3.95 * share, step, sf.random.key(0)
    )
    torch.testing.assert_close(gates, those("mask"))
    found = algorithm.view.grads(state, those("upstream"), args["step"])
    # their sums are in float32
    torch.testing.assert_close(
        found["latent"]["logit"], those("grad"), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("seed", range(3))
def test_leap_finds_one_of_the_two_best_masks_of_a_small_layer(seed):
    torch.manual_seed(seed)
    weight = torch.randn(2, 4)
    x = torch.randn(64, 4) @ torch.randn(4, 4)

    def loss(w):
        return (x @ (w - weight).T).square().mean()

    algorithm = sf.with_optimizer(
        methods.leap(0.5, steps=200, norm=0.0), sf.optimizers.adam(1e-2)
    )
    state = algorithm.init({"w": weight})
    for step in range(200):
        slope = grad(lambda params: loss(params["w"]))(sf.effective(state))
        state = algorithm.update(state, slope, step)
    settled = sf.settled(algorithm, state)
    masks = [
        torch.tensor([i in kept for i in range(8)]).reshape(2, 4)
        for kept in itertools.combinations(range(8), 4)
    ]
    losses = sorted(loss(weight * mask) for mask in masks)  # of 70 masks
    assert loss(sf.effective(settled)["w"]) <= losses[1] * (1 + 1e-5)
