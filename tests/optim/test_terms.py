"""Gradient terms, by themselves and inside `with_terms`."""

import pytest
import torch

import sparsefn as sf

KEY = sf.random.key(0)
STATE = sf.State(
    {"w": torch.tensor([3.0, -1.0, 0.0, 2.0]), "b": torch.tensor([4.0])},
    {"w": torch.tensor([True, False, False, True]), "b": torch.tensor(True)},
)


def test_l1_and_l2_are_slopes_of_their_penalties():
    assert sf.terms.l1(0.5)(STATE, 0)["w"].tolist() == [0.5, -0.5, 0.0, 0.5]
    assert sf.terms.l2(0.5)(STATE, 0)["w"].tolist() == [1.5, -0.5, 0.0, 1.0]
    for term, fn in (
        (sf.terms.l1(0.25), lambda w: w.abs().sum()),
        (sf.terms.l2(0.25), lambda w: (w * w).sum() / 2),
    ):
        by_autograd = sf.terms.penalty(
            lambda params, step, fn=fn: 0.25 * (fn(params["w"]) + fn(params["b"]))
        )
        assert sf.checkpoint.tree_equal(term(STATE, 0), by_autograd(STATE, 0))


def test_pruned_decay_acts_off_the_mask_alone():
    # Zhou et al. 2021, strength .1: 0 on the mask, .1 * w off it, nothing on dense
    # leaves.
    term = sf.terms.pruned_decay(0.1)(STATE, 0)
    assert term["w"].tolist() == [0.0, pytest.approx(-0.1), 0.0, 0.0]
    assert term["b"].tolist() == [0.0]


def test_a_penalty_may_depend_on_the_step():
    term = sf.terms.penalty(lambda params, step: 0.1 * step * (params["w"] ** 3).sum())
    assert term(STATE, 2)["w"].tolist() == pytest.approx([5.4, 0.6, 0.0, 2.4])
    assert term(STATE, 0)["w"].tolist() == [0.0] * 4
    assert term(STATE, torch.tensor(2))["b"].tolist() == [0.0]


def test_noise_has_its_deviation_and_depends_on_key_path_and_step():
    wide = sf.State({"a": torch.zeros(4000), "b": torch.zeros(4000)}, {})
    draws = sf.terms.noise(0.5, sf.random.key(1))(wide, 3)
    assert float(draws["a"].std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(draws["a"].mean())) < 0.03
    assert sf.checkpoint.tree_equal(
        draws, sf.terms.noise(0.5, sf.random.key(1))(wide, torch.tensor(3))
    )
    others = [
        sf.terms.noise(0.5, sf.random.key(2))(wide, 3),
        sf.terms.noise(0.5, sf.random.key(1))(wide, 4),
    ]
    assert not any(
        torch.equal(draws["a"], other)
        for other in (draws["b"], others[0]["a"], others[1]["a"])
    )


@pytest.mark.parametrize("std", [-1.0, float("nan")])
def test_noise_refuses_what_is_no_deviation(std):
    with pytest.raises(ValueError, match=f"expected std >= 0, got {std}"):
        sf.terms.noise(std, sf.random.key(0))


def test_terms_add_up_and_leave_pruned_weights_alone():
    algorithm = sf.with_terms(
        sf.static(0.5, init="magnitude"), sf.terms.l2(0.1), sf.terms.l1(1.0)
    )
    state = algorithm.init(
        {"w": torch.tensor([[4.0, -3.0, 2.0, 1.0]]), "b": torch.tensor([2.0])}
    )
    grads = algorithm.view.grads(
        state, {"w": torch.full((1, 4), 5.0), "b": torch.zeros(1)}, 0
    )
    assert grads["w"].tolist() == [[pytest.approx(6.4), pytest.approx(3.7), 0.0, 0.0]]
    assert grads["b"].tolist() == [pytest.approx(1.2)]


def test_noise_moves_no_pruned_weight():
    algorithm = sf.with_terms(sf.static(0.5), sf.terms.noise(1.0, sf.random.key(0)))
    state = algorithm.init({"w": torch.ones(8, 8)})
    # Not in the gradient either, where a clipped norm would see it.
    noise = algorithm.view.grads(state, {"w": torch.zeros(8, 8)}, 0)["w"]
    assert torch.equal(noise != 0, state.masks["w"])
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.adam(0.1))
    state = algorithm.init({"w": torch.ones(8, 8)})
    for step in range(3):
        state = algorithm.update(state, {"w": torch.zeros(8, 8)}, step)
    mask = state.masks["w"]
    assert not state.params["w"][~mask].any()
    assert (state.params["w"][mask] != 1.0).all()
    assert not state.opt.mu["w"][~mask].any()


def test_terms_keep_the_dtype_of_the_gradient():
    algorithm = sf.with_terms(
        sf.dense(),
        sf.terms.penalty(lambda params, step: (params["w"].double() ** 2).sum()),
    )
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    grads = algorithm.view.grads(algorithm.init(params), params, 0)
    assert grads["w"].dtype == torch.bfloat16
    assert grads["w"].tolist() == [3.0] * 3


def test_l2_inside_the_gradient_equals_weight_decay():
    params = {"w": torch.randn(4, 4)}
    terms = sf.with_optimizer(
        sf.with_terms(sf.rigl(0.5, when=sf.always()), sf.terms.l2(0.1)),
        sf.optimizers.adam(0.05),
    )
    decay = sf.with_optimizer(
        sf.rigl(0.5, when=sf.always()), sf.optimizers.adam(0.05, weight_decay=0.1)
    )
    a, b = terms.init(params), decay.init(params)
    for step in range(5):
        grads = {"w": torch.cos(3 * sf.effective(a)["w"])}
        a, b = terms.update(a, grads, step), decay.update(b, grads, step)
    assert sf.checkpoint.tree_equal(a, b)


def test_a_term_of_another_structure_or_shape_is_an_error():
    grads = {"w": torch.ones(1, 2)}
    wrong = sf.with_terms(sf.dense(), lambda state, step: {"v": torch.ones(1, 2)})
    with pytest.raises(
        ValueError,
        match="expected a term with the structure of params, but there is no leaf at "
        "'w'",
    ):
        wrong.view.grads(wrong.init(grads), grads, 0)
    wrong = sf.with_terms(sf.dense(), lambda state, step: {"w": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"expected a term of shape \(1, 2\) at 'w', got \(2,\)"
    ):
        wrong.view.grads(wrong.init(grads), grads, 0)


def test_terms_see_what_is_trained():
    params = {"w": torch.tensor([[4.0, 3.0]]), "b": torch.tensor([2.0])}
    latents = sf.with_terms(sf.reparametrised(sf.reparam.power(2.0)), sf.terms.l2(0.5))
    state = latents.init(params)
    found = latents.view.grads(state, {"w": torch.zeros(1, 2), "b": torch.zeros(1)}, 0)
    assert torch.equal(
        found["latent"]["latent"]["w"], 0.5 * state.scores["latent"]["latent"]["w"]
    )
    assert found["rest"]["b"].tolist() == [1.0]
    scores = sf.with_terms(
        sf.supermask(0.5), sf.terms.l1(0.5), sf.terms.on("scores.*", sf.terms.l2(1.0))
    )
    state = scores.init(params)
    found = scores.view.grads(state, {"w": torch.zeros(1, 2), "b": torch.zeros(1)}, 0)
    assert torch.equal(found["scores"]["w"], 0.5 + state.scores["learned"]["w"])
    assert found["params"]["b"].tolist() == [0.5]
    noisy = sf.with_optimizer(
        sf.with_terms(sf.supermask(0.5), sf.terms.noise(0.1, KEY)),
        sf.optimizers.sgd(1.0),
    )
    state = noisy.init(params)
    after = noisy.update(state, {"w": torch.zeros(1, 2), "b": torch.zeros(1)}, 0)
    assert not torch.equal(after.scores["learned"]["w"], state.scores["learned"]["w"])


def test_terms_of_dense_algorithms_see_masks_and_not_supports():
    # Weights of `ste` move everywhere, and pruned_decay is of those off the mask alone.
    decayed = sf.with_terms(sf.ste(0.5), sf.terms.pruned_decay(0.5))
    state = decayed.init({"w": torch.tensor([[4.0, 2.0]])})
    assert decayed.view.grads(state, {"w": torch.zeros(1, 2)}, 0)["w"].tolist() == [
        [0.0, 1.0]
    ]


def test_a_term_on_some_leaves():
    for where in ("b", ["b"], lambda path, leaf: path == "b"):
        assert sf.terms.on(where, sf.terms.l2(0.5))(STATE, 0)["b"].tolist() == [2.0]
        assert sf.terms.on(where, sf.terms.l2(0.5))(STATE, 0)["w"].tolist() == [0.0] * 4
    with pytest.raises(
        ValueError, match="terms.on: no path matches 'bias'; the paths are 'b', 'w'"
    ):
        sf.terms.on("bias", sf.terms.l2(0.5))(STATE, 0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
def test_terms_of_leaves_without_dimensions_have_the_bits_of_a_batch(dtype):
    terms = [sf.terms.l1(0.3), sf.terms.l2(0.7), sf.terms.noise(0.1, KEY)]
    algorithm = sf.with_terms(sf.dense(), *terms)

    def grads_of(w, g):
        return algorithm.view.grads(algorithm.init({"t": w}), {"t": g}, 0)["t"]

    w, g = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    batch = torch.vmap(grads_of)(w, g)
    assert batch.dtype == dtype
    assert torch.equal(
        batch, torch.stack([grads_of(*row) for row in zip(w, g, strict=True)])
    )
