"""N of every m: held against recordings and all masks."""

import itertools
import math
import re
from importlib import import_module

import pytest
import torch
from golden_data import cases

import sparsefn as sf

methods = sf.methods


@pytest.mark.parametrize("case", cases("srste", "Sparse"), ids=lambda case: case.id)
def test_sr_ste_has_the_weights_and_gradients_of_its_authors(case):
    algorithm = methods.sr_ste(case.args["n"], case.args["m"], decay=case.args["decay"])
    state = algorithm.init({"w": case.inputs["weight"]})
    assert torch.equal(sf.effective(state)["w"], case.outputs["forward"])
    found = algorithm.view.grads(state, {"w": case.inputs["upstream"]}, 0)["w"]
    torch.testing.assert_close(found, case.outputs["grad"])


def test_sr_ste_by_hand():
    # Zhou et al. 2021, eq. 8, with a decay of 0.1.
    algorithm = methods.sr_ste(decay=0.1)
    state = algorithm.init({"w": torch.tensor([[3.0, -1.0, 0.5, 2.0]])})
    assert state.masks["w"].tolist() == [[True, False, False, True]]
    found = algorithm.view.grads(state, {"w": torch.ones(1, 4)}, 0)["w"]
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.9, 1.05, 1.0]]))


def test_groups_of_a_convolution_lie_along_its_inputs():
    weight = torch.randn(3, 8, 2, 2)
    for algorithm in (methods.sr_ste(), methods.asp()):
        state = algorithm.init({"w": weight})
        state = algorithm.update(state, {"w": torch.zeros_like(weight)}, 0)
        assert (state.masks["w"].reshape(3, 2, 4, 2, 2).sum(2) == 2).all()


def test_masks_of_sr_ste_follow_the_weights_and_pruned_ones_decay():
    algorithm = sf.with_optimizer(
        methods.sr_ste(1, 2, decay=0.5), sf.optimizers.sgd(1.0)
    )
    state = algorithm.init({"w": torch.tensor([[1.0, 0.8]])})
    state = algorithm.update(state, {"w": torch.tensor([[0.0, -1.0]])}, 0)
    torch.testing.assert_close(state.params["w"], torch.tensor([[1.0, 1.4]]))
    assert state.masks["w"].tolist() == [[False, True]]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 6)])
def test_asp_keeps_more_than_any_other_mask(n, m):
    weight = torch.randn(5, 2 * m)
    algorithm = methods.asp(n, m)
    state = algorithm.update(algorithm.init({"w": weight}), {"w": weight}, 0)
    groups = weight.abs().reshape(-1, m)
    every = torch.stack(
        [groups[:, list(kept)].sum(1) for kept in itertools.combinations(range(m), n)]
    )
    torch.testing.assert_close(
        state.params["w"].abs().reshape(-1, m).sum(1), every.max(0).values
    )
    trained = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1))
    after = trained.init(state.params)
    for step in range(3):
        after = trained.update(after, {"w": torch.randn(5, 2 * m)}, step)
        assert torch.equal(after.masks["w"].sum(1), torch.full((5,), 2 * n))
        assert not after.params["w"][~after.masks["w"]].any()


@pytest.mark.parametrize("make", [methods.sr_ste, methods.asp])
def test_bad_arguments_of_n_m(make):
    with pytest.raises(
        ValueError, match=re.escape("nm: expected n <= m, got n=5, m=4")
    ):
        make(5, 4)
    text = (
        "nm(2, 4, axis=1): expected axis 1 divisible by 4, got shape (2, 3, 3, 3) at "
        "'conv'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        make().init({"conv": torch.ones(2, 3, 3, 3)})


def test_maskllm_finds_the_masks_of_a_small_layer_that_trying_all_finds():
    torch.manual_seed(0)
    weight = torch.randn(3, 4)
    x = torch.randn(64, 4) @ torch.randn(4, 4)

    def loss(w):
        return (x @ (w - weight).T).square().mean(0)  # of each output

    algorithm = sf.with_optimizer(
        sf.methods.maskllm(steps=300, norm=0.0), sf.optimizers.adam(5e-3)
    )
    state = algorithm.init({"w": weight})
    for step in range(300):
        grads = torch.func.grad(lambda params: loss(params["w"]).sum())(
            sf.effective(state)
        )
        state = algorithm.update(state, grads, step)
    settled = sf.settled(algorithm, state)
    assert (settled.masks["w"].sum(1) == 2).all()
    masks = [
        torch.tensor([i in kept for i in range(4)])
        for kept in itertools.combinations(range(4), 2)
    ]
    best = torch.stack([loss(weight * mask) for mask in masks]).amin(0)
    torch.testing.assert_close(loss(sf.effective(settled)["w"]), best)


def choices_of_ten_steps():
    """The reparametrisation of `maskllm(steps=10)`."""
    return sf.reparam.mask_choices(
        scale=sf.schedules.linear_decay(100.0, 10, 500.0),
        temperature=sf.schedules.linear_decay(4.0, 10, 0.05),
    )


def test_maskllm_has_the_gradient_of_the_loss_of_the_paper():
    algorithm = sf.methods.maskllm(steps=10, norm=0.5)
    weight = torch.randn(4, 8)
    state = algorithm.init({"w": weight})
    upstream = torch.randn(4, 8)
    choices = choices_of_ten_steps()
    latents = state.scores["latent"]

    def paper(logit):
        made = {**latents, "logit": {"w": logit}}
        masked = choices.apply(made, 0, sf.random.key(0))[0]["w"]
        # at step 3 of 10
        return (upstream * masked).sum() - 0.5 * 0.7 * masked.square().sum()

    expected = torch.func.grad(paper)(latents["logit"]["w"])
    found = algorithm.view.grads(state, {"w": upstream}, 3)["latent"]["logit"]["w"]
    torch.testing.assert_close(found, expected)


def test_maskllm_without_norm_has_the_gradient_of_its_choices_alone():
    algorithm = sf.methods.maskllm(steps=10, norm=0.0)
    state = algorithm.init({"w": torch.randn(4, 8)})
    upstream = torch.randn(4, 8)
    choices = choices_of_ten_steps()
    latents = state.scores["latent"]

    def paper(logit):
        made = {**latents, "logit": {"w": logit}}
        return (upstream * choices.apply(made, 0, sf.random.key(0))[0]["w"]).sum()

    expected = torch.func.grad(paper)(latents["logit"]["w"])
    found = algorithm.view.grads(state, {"w": upstream}, 3)["latent"]["logit"]["w"]
    torch.testing.assert_close(found, expected)


def test_maskllm_starts_near_its_prior():
    weight = torch.randn(8, 16)
    prior = {"w": sf.masks.topk_mask(weight.abs(), None, pattern=sf.patterns.nm(2, 4))}
    algorithm = sf.methods.maskllm(steps=5, prior=prior, strength=50.0)
    state = algorithm.init({"w": weight})
    assert torch.equal(sf.settled(algorithm, state).masks["w"], prior["w"])


def test_maskllm_refuses_a_run_without_steps():
    with pytest.raises(ValueError, match="maskllm: expected steps >= 1, got 0"):
        sf.methods.maskllm(steps=0)


@pytest.mark.parametrize("name", ["scale", "temperature"])
def test_maskllm_takes_two_numbers_above_0(name):
    def refused(value, kind, text):
        with pytest.raises(kind, match=f"^{re.escape(text)}$"):
            sf.methods.maskllm(steps=5, **{name: value})

    head = f"expected {name} of maskllm to be two numbers, at the first step and at the"
    refused(100, TypeError, f"{head} last, got 100; write (100, 100)")
    refused(True, TypeError, f"{head} last, got True")
    refused((1.0,), TypeError, f"{head} last, got (1.0,)")
    refused((1.0, 2.0, 3.0), TypeError, f"{head} last, got (1.0, 2.0, 3.0)")
    refused("12", TypeError, f"{head} last, got '12'")
    last = f"the last {name} of maskllm"
    first = f"the first {name} of maskllm"
    refused((1.0, math.nan), ValueError, f"expected {last} to be finite, got nan")
    refused((-1.0, 1.0), ValueError, f"expected {first} > 0, got -1.0")
    refused((1.0, 0.0), ValueError, f"expected {last} > 0, got 0.0")
    kind = "to be a number or a 0-d float tensor, got bool"
    refused((True, 1.0), TypeError, f"expected {first} {kind}")
    sf.methods.maskllm(steps=5, **{name: [2, torch.tensor(1.0)]})


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: sf.methods.maskllm(steps=5, norm=math.nan),
            ValueError,
            "expected norm of maskllm to be finite, got nan",
        ),
        (
            lambda: sf.methods.maskllm(steps=5, strength=True),
            ValueError,
            "mask_choices: expected a finite strength, got True",
        ),
        (
            lambda: sf.methods.maskpro(decay=1.5),
            ValueError,
            "policy_masks: expected decay in [0, 1], got 1.5",
        ),
        (
            lambda: sf.methods.prox_sparse(math.nan),
            ValueError,
            "expected strength of nm_prox to be finite, got nan",
        ),
    ],
)
def test_numbers_of_learned_masks(make, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        make()


def test_prox_sparse_finds_the_mask_that_magnitude_misses():
    torch.manual_seed(0)
    weight = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    importance = torch.tensor([0.1, 0.1, 4.0, 4.0])
    algorithm = sf.with_optimizer(sf.methods.prox_sparse(0.02), sf.optimizers.sgd(0.05))
    state = algorithm.init({"w": weight})
    for step in range(200):
        slope = importance * (sf.effective(state)["w"] - weight)
        state = algorithm.update(state, {"w": slope}, step)
    settled = sf.settled(algorithm, state)
    expected = torch.tensor([[0.0, 0.0, 0.8, 0.7]])
    assert torch.equal(sf.effective(settled)["w"], expected)


@pytest.mark.parametrize("case", cases("learned_masks", "maskllm"), ids=lambda c: c.id)
def test_maskllm_has_the_masks_and_the_gradient_of_its_authors(case, monkeypatch):
    args, given, recorded = case.args, case.inputs, case.outputs

    def draws(step, key, path, like):
        return (given["u"] - 1e-6) / (1 - 2e-6)

    module = import_module("sparsefn.algorithms.reparam.mask_choices")
    monkeypatch.setattr(module, "uniform_at", draws)
    options = {"steps": args["steps"], "norm": 0.0}
    algorithm = methods.maskllm(args["n"], args["m"], **options)
    state = algorithm.init({"w": given["weight"]})
    latents = {**state.scores["latent"], "logit": {"w": recorded["primed"]}}
    state = state._replace(scores={**state.scores, "latent": latents})
    # which makes the weights of the next step
    state = algorithm.update(state, {"w": given["upstream"]}, args["step"] - 1)
    expected = given["weight"] * recorded["mask"]
    torch.testing.assert_close(sf.effective(state)["w"], expected)
    found = algorithm.view.grads(state, {"w": given["upstream"]}, args["step"])
    # their sums are in float32
    torch.testing.assert_close(
        found["latent"]["logit"]["w"], recorded["grad"], rtol=1e-5, atol=1e-4
    )
    settled = sf.settled(algorithm, state).masks["w"]
    assert torch.equal(settled, recorded["settled"])


@pytest.mark.parametrize("case", cases("learned_masks", "maskllm"), ids=lambda c: c.id)
def test_maskllm_starts_near_a_prior_as_its_authors_do(case):
    args, given = case.args, case.inputs

    def first_logits(prior):
        algorithm = methods.maskllm(
            args["n"], args["m"], steps=1, prior=prior, strength=args["strength"]
        )
        state = algorithm.init({"w": given["weight"]})
        return state.scores["latent"]["logit"]["w"]

    ours = (first_logits({"w": given["prior"]}) - first_logits(None)) / 0.01
    theirs = (case.outputs["primed"] - given["gate"]) / given["gate"].std()
    # a constant in the logits of a group chooses no mask
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", cases("learned_masks", "compute_proximal_loss"), ids=lambda c: c.id
)
def test_prox_sparse_has_the_frozen_weight_regulariser_of_the_authors(case):
    first, weight = case.inputs["original"], case.inputs["weight"]
    algorithm = sf.methods.prox_sparse(0.1, frozen=1.0, epsilon=case.args["epsilon"])
    state = algorithm.init({"w": first, "b": torch.ones(3)})
    latents = {**state.scores["latent"], "latent": {"w": weight}}
    state = state._replace(scores={**state.scores, "latent": latents})
    zero = {"w": torch.zeros_like(weight), "b": torch.zeros(3)}
    found = algorithm.view.grads(state, zero, 0)
    torch.testing.assert_close(found["latent"]["latent"]["w"], case.outputs["grad"])
    assert not found["rest"]["b"].any()


def test_prox_sparse_is_drawn_back_to_its_first_weights():
    weight = torch.tensor([[1.0, 0.5, 0.25, 2.0]])
    algorithm = sf.with_optimizer(
        sf.methods.prox_sparse(0.0, frozen=5.0), sf.optimizers.sgd(0.02)
    )
    state = algorithm.init({"w": weight})
    for step in range(300):
        slope = torch.full((1, 4), -20.0 if step == 0 else 0.0)
        state = algorithm.update(state, {"w": slope}, step)
        if step == 0:
            assert (state.params["w"] - weight > 0.3).all()
    torch.testing.assert_close(state.params["w"], weight, rtol=0.0, atol=0.05)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: sf.methods.prox_sparse(0.1, epsilon=0.0),
            ValueError,
            "expected epsilon > 0, got 0.0",
        ),
        (
            lambda: sf.methods.prox_sparse(0.1, frozen="much"),
            TypeError,
            "expected frozen of prox_sparse to be a number or a 0-d float tensor, got "
            "str",
        ),
        (
            lambda: sf.methods.prox_sparse(0.1, 4, 8),
            ValueError,
            "nm_prox: expected a pattern that keeps 1 or 2 single weights of a group",
        ),
    ],
)
def test_bad_arguments_of_prox_sparse(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_maskpro_finds_the_masks_of_a_small_layer_that_trying_all_finds():
    torch.manual_seed(0)
    weight = torch.randn(1, 4)
    x = torch.randn(64, 4) @ torch.randn(4, 4)

    def loss(w):
        return (x @ (w - weight).T).square().mean()

    algorithm = sf.with_optimizer(
        sf.methods.maskpro(scale=0.0, decay=0.9), sf.optimizers.sgd(0.02)
    )
    state = algorithm.init({"w": weight, "loss": torch.tensor(0.0)})
    for step in range(400):
        grads = {"w": torch.zeros(1, 4), "loss": loss(sf.effective(state)["w"])}
        state = algorithm.update(state, grads, step)
    masks = [
        torch.tensor([i in kept for i in range(4)])
        for kept in itertools.combinations(range(4), 2)
    ]
    best = torch.stack([loss(weight * mask) for mask in masks]).amin()
    settled = sf.effective(sf.settled(algorithm, state))
    torch.testing.assert_close(loss(settled["w"]), best)


def test_maskpro_refuses_more_weights_than_a_group_has():
    with pytest.raises(ValueError, match=re.escape("nm: expected n <= m, got n=5")):
        sf.methods.maskpro(5, 4)
