"""Masks of n of m that are chosen by draws: `mask_choices`."""

import re
from itertools import combinations

import pytest
import torch

import sparsefn as sf

mask_choices, nm, KEY = sf.reparam.mask_choices, sf.patterns.nm, sf.random.key(3)
# the six masks of 2 of 4, in lexicographic order
MASKS = torch.tensor(
    [[float(i in kept) for i in range(4)] for kept in combinations(range(4), 2)]
)


def holding(map_, logit, base):
    """Latents of one leaf with given logits."""
    latents = map_.init({"w": base}, KEY)
    assert latents["logit"]["w"].shape == logit.shape
    return {**latents, "logit": {"w": logit}}


def test_masks_are_in_lexicographic_order_and_settled_takes_the_largest_logit():
    map_ = mask_choices(nm(2, 4))
    base = torch.arange(1.0, 25.0).reshape(6, 4)
    latents = holding(map_, torch.eye(6), base)
    weights, masks = map_.settled(latents, 0)
    expected = [
        [int(i in kept) for i in range(4)] for kept in combinations(range(4), 2)
    ]
    assert masks["w"].int().tolist() == expected
    assert torch.equal(weights["w"], base * masks["w"])


def test_the_first_of_equal_logits_wins_and_nan_never_does():
    map_ = mask_choices(nm(1, 3))
    nan, inf = float("nan"), float("inf")
    logit = torch.tensor([[1.0, 1.0, 0.0], [nan, -2.0, -1.0], [nan, -inf, nan]])
    latents = holding(map_, logit, torch.ones(3, 3))
    masks = map_.settled(latents, 0)[1]["w"].int().tolist()
    assert masks[:2] == [[1, 0, 0], [0, 0, 1]]
    assert [sum(row) for row in masks] == [1, 1, 1]


def test_weights_and_gradients_are_the_formula():
    map_ = mask_choices(nm(2, 4), scale=20.0, temperature=0.7)
    base = torch.randn(4, 8)
    latents = map_.init({"w": base}, KEY)
    logit = latents["logit"]["w"]
    u = sf.random.uniform_like(sf.random.leaf_key(KEY, "w", 5), logit).double()
    u = u * (1 - 2e-6) + 1e-6
    gumbel = -torch.log(-torch.log(u))

    def formula(logit):
        shares = torch.softmax((20.0 * logit.double() + gumbel) / 0.7, -1)
        return base * (shares @ MASKS.double()).reshape(4, 8).float()

    def made(logit):
        return map_.apply({**latents, "logit": {"w": logit}}, 5, KEY)[0]["w"]

    torch.testing.assert_close(made(logit), formula(logit))
    upstream = torch.randn(4, 8)
    (slope,) = torch.func.vjp(made, logit)[1](upstream)
    (expected,) = torch.func.vjp(formula, logit)[1](upstream)
    torch.testing.assert_close(slope, expected)


def test_cold_draws_are_masks_with_the_chances_of_the_logits():
    map_ = mask_choices(nm(1, 2), scale=1.0, temperature=1e-3)
    logit = torch.tensor([[0.0, 1.0]]).repeat(4000, 1)
    latents = holding(map_, logit, torch.ones(4000, 2))
    drawn = map_.apply(latents, 0, KEY)[0]["w"]
    chance = torch.softmax(logit[0], 0)[1]
    share = (drawn[:, 1] > 0.5).float().mean()
    assert abs(share - chance) < 4 * (chance * (1 - chance) / 4000).sqrt()
    torch.testing.assert_close(drawn.sum(1), torch.ones(4000))


def test_a_prior_leads_by_its_overlap():
    leaf = torch.randn(2, 8)
    prior = {"w": sf.masks.topk_mask(leaf.abs(), None, pattern=nm(2, 4))}
    plain = mask_choices(nm(2, 4)).init({"w": leaf}, KEY)["logit"]["w"]
    led = mask_choices(nm(2, 4), prior=prior, strength=5.0)
    logit = led.init({"w": leaf}, KEY)["logit"]["w"]
    masks = torch.tensor(
        [[float(i in kept) for i in range(4)] for kept in combinations(range(4), 2)]
    )
    shared = (
        prior["w"].reshape(4, 4).float() @ masks.T
    )  # of 2 kept weights, 1 by chance
    torch.testing.assert_close(logit - plain, 0.05 * (shared - 1))
    strong = mask_choices(nm(2, 4), prior=prior, strength=100.0)
    latents = strong.init({"w": leaf}, KEY)
    assert torch.equal(strong.settled(latents, 0)[1]["w"], prior["w"])


def test_groups_lie_along_the_axis_of_the_pattern():
    map_ = mask_choices(nm(1, 2, axis=0))
    base = torch.randn(4, 3)
    weights, masks = map_.settled(map_.init({"w": base}, KEY), 0)
    assert (masks["w"].reshape(2, 2, 3).sum(1) == 1).all()
    assert torch.equal(weights["w"], torch.where(masks["w"], base, 0.0))


def test_weights_are_frozen_and_an_optimizer_trains_the_logits():
    algorithm = sf.with_optimizer(
        sf.reparametrised(mask_choices(), key=KEY), sf.optimizers.sgd(0.1)
    )
    params = {"w": torch.randn(4, 4), "b": torch.zeros(4)}
    state = algorithm.init(params)
    grads = {"w": torch.randn(4, 4), "b": torch.ones(4)}
    new = algorithm.update(state, grads, 0)
    old_latents, latents = state.scores["latent"], new.scores["latent"]
    assert torch.equal(latents["base"]["w"], params["w"])
    assert not torch.equal(latents["logit"]["w"], old_latents["logit"]["w"])
    torch.testing.assert_close(new.params["b"], torch.full((4,), -0.1))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: mask_choices(2),
            TypeError,
            "mask_choices: expected a pattern such as",
        ),
        (
            lambda: mask_choices(strength=float("inf")),
            ValueError,
            "mask_choices: expected a finite strength, got inf",
        ),
        (
            lambda: mask_choices(sf.patterns.row_balanced()).init(
                {"w": torch.ones(2, 4)}, KEY
            ),
            ValueError,
            "expected a pattern that keeps a fixed number of single weights of a group",
        ),
        (
            lambda: mask_choices(sf.patterns.nm(16, 32)).init(
                {"w": torch.ones(2, 32)}, KEY
            ),
            ValueError,
            "expected a group of at most 10000 masks, got 601080390 of 16 in 32: "
            "choose a smaller m, or sf.methods.maskpro, which has one",
        ),
        (
            lambda: mask_choices(prior={"v": torch.ones(2, 4) > 0}).init(
                {"w": torch.ones(2, 4)}, KEY
            ),
            ValueError,
            "expected a prior mask of shape (2, 4) at 'w', got none",
        ),
        (
            lambda: mask_choices(prior={"w": torch.tensor(True)}).init(
                {"w": torch.ones(2, 4)}, KEY
            ),
            ValueError,
            "expected a prior mask of shape (2, 4) at 'w', got ()",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
