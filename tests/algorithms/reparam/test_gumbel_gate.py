"""Gumbel sigmoids of single weights: `gumbel_gate`."""

import re

import pytest
import torch

import sparsefn as sf

gumbel_gate, KEY = sf.reparam.gumbel_gate, sf.random.key(3)


def holding(map_, **logits):
    """Latents with given logits, of weights that are 1."""
    latents = map_.init({path: torch.ones_like(x) for path, x in logits.items()}, KEY)
    assert {*latents["logit"]} == {*logits}
    return {**latents, "logit": logits}


def test_weights_and_gradients_are_the_formula():
    map_ = gumbel_gate(0.5, scale=20.0, temperature=0.7)
    base = torch.randn(4, 8)
    latents = map_.init({"w": base}, KEY)
    logit = latents["logit"]["w"]
    u = sf.random.uniform_like(sf.random.leaf_key(KEY, "w", 5), logit).double()
    u = u * (1 - 2e-6) + 1e-6

    def formula(logit):
        gate = torch.sigmoid((20.0 * logit.double() + torch.logit(u)) / 0.7)
        return base * gate.float()

    def made(logit):
        return map_.apply({**latents, "logit": {"w": logit}}, 5, KEY)[0]["w"]

    torch.testing.assert_close(made(logit), formula(logit), rtol=1e-5, atol=1e-6)
    upstream = torch.randn(4, 8)
    (slope,) = torch.func.vjp(made, logit)[1](upstream)
    (expected,) = torch.func.vjp(formula, logit)[1](upstream)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("logit", [-1.0, 0.0, 2.0])
def test_cold_gates_are_open_with_the_chance_of_their_logit(logit):
    map_ = gumbel_gate(0.5, scale=1.0, temperature=1e-3)
    latents = holding(map_, w=torch.full((4000,), logit))
    gates = map_.apply(latents, 0, KEY)[0]["w"]
    assert ((gates < 0.01) | (gates > 0.99)).float().mean() > 0.99
    chance = torch.sigmoid(torch.tensor(logit))
    share = (gates > 0.5).float().mean()
    assert abs(share - chance) < 4 * (chance * (1 - chance) / 4000).sqrt()


def test_exactly_the_largest_logits_of_all_leaves_are_left():
    map_ = gumbel_gate(0.5)
    logits = {"a": torch.randn(5, 3), "b": torch.randn(7) + 1.0}
    weights, masks = map_.settled(holding(map_, **logits), 0)
    best = sf.masks.topk_mask(torch.cat([logits["a"].flatten(), logits["b"]]), 11)
    assert torch.equal(torch.cat([masks["a"].flatten(), masks["b"]]), best)
    for path, mask in masks.items():
        assert torch.equal(weights[path], mask.float())


def test_the_first_of_equal_logits_wins_and_nan_never_does():
    map_ = gumbel_gate(0.5)
    logits = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    masks = map_.settled(holding(map_, w=logits), 0)[1]
    assert masks["w"].tolist() == [False, True, True, False]


def test_the_sparsity_may_be_a_schedule():
    map_ = gumbel_gate(sf.schedules.piecewise({0: 0.25, 10: 0.75}))
    latents = holding(map_, w=torch.randn(8))
    counts = [int(map_.settled(latents, step)[1]["w"].sum()) for step in (0, 10)]
    assert counts == [6, 2]


def test_a_prior_leads():
    leaf = torch.randn(6, 8)
    prior = {"w": leaf > 0.3}
    plain = gumbel_gate(0.5).init({"w": leaf}, KEY)["logit"]["w"]
    logit = gumbel_gate(0.5, prior=prior, strength=5.0).init({"w": leaf}, KEY)
    sign = torch.where(prior["w"], 1.0, -1.0)
    torch.testing.assert_close(logit["logit"]["w"] - plain, 0.07 * sign)
    assert abs(plain.std() - 0.014) < 0.004
    share = prior["w"].float().mean().item()
    strong = gumbel_gate(1 - share, prior=prior, strength=50.0)
    latents = strong.init({"w": leaf}, KEY)
    assert torch.equal(strong.settled(latents, 0)[1]["w"], prior["w"])


def test_weights_are_frozen_and_an_optimizer_trains_the_logits():
    algorithm = sf.with_optimizer(
        sf.reparametrised(gumbel_gate(0.5), key=KEY), sf.optimizers.sgd(0.1)
    )
    params = {"w": torch.randn(4, 4), "b": torch.zeros(4)}
    state = algorithm.init(params)
    grads = {"w": torch.randn(4, 4), "b": torch.ones(4)}
    new = algorithm.update(state, grads, 0)
    assert torch.equal(new.scores["latent"]["base"]["w"], params["w"])
    old_logit = state.scores["latent"]["logit"]["w"]
    assert not torch.equal(new.scores["latent"]["logit"]["w"], old_logit)
    torch.testing.assert_close(new.params["b"], torch.full((4,), -0.1))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: gumbel_gate(1.5),
            ValueError,
            "expected sparsity in [0, 1], got 1.5",
        ),
        (
            lambda: gumbel_gate(None),
            TypeError,
            "gumbel_gate: expected sparsity to be a float in [0, 1] or a schedule, got "
            "None: masks of n of m",
        ),
        (
            lambda: gumbel_gate(0.5, scale="25"),
            TypeError,
            "got str",
        ),
        (
            lambda: gumbel_gate(0.5, strength=float("inf")),
            ValueError,
            "gumbel_gate: expected a finite strength, got inf",
        ),
        (
            lambda: gumbel_gate(0.5, prior={"v": torch.ones(2, 4) > 0}).init(
                {"w": torch.ones(2, 4)}, KEY
            ),
            ValueError,
            "gumbel_gate: expected a prior mask of shape (2, 4) at 'w', got none",
        ),
        (
            lambda: gumbel_gate(0.5, prior={"w": torch.tensor(True)}).init(
                {"w": torch.ones(2, 4)}, KEY
            ),
            ValueError,
            "gumbel_gate: expected a prior mask of shape (2, 4) at 'w', got ()",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
