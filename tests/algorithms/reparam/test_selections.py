"""Soft and faded selections of the best weights."""

import re

import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.reparam.selections import soft_mask
from sparsefn.testing.laws import COMPILE

KEY = sf.random.key(0)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


def made(map_, v, step=0):
    weights, masks = map_.apply({"latent": {"w": v}}, step, KEY)
    return weights["w"], masks["w"]


def run(algorithm, params, steps):
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1, momentum=0.9))
    state = algorithm.init(params)
    for step in range(steps):
        state = algorithm.update(
            state, {p: torch.cos(3 * w) for p, w in sf.effective(state).items()}, step
        )
    return state


# ---- faded ---------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [sf.patterns.nm(2, 4), sf.patterns.unstructured()])
def test_without_a_factor_and_with_the_slope_1_it_is_ste(pattern):
    sparsity = None if pattern.fixed else 0.7
    faded = sf.reparam.faded(pattern, 0.0, sparsity=sparsity, slope=1.0)
    one = run(sf.reparametrised(faded), {"w": draw(6, 8)}, 6)
    two = run(sf.ste(sparsity, pattern=pattern), {"w": draw(6, 8)}, 6)
    assert torch.equal(one.scores["latent"]["latent"]["w"], two.params["w"])
    assert sf.checkpoint.tree_equal(
        (one.masks, sf.effective(one)), (two.masks, sf.effective(two))
    )


def test_with_the_factor_1_it_is_dense():
    one = run(
        sf.reparametrised(sf.reparam.faded(sf.patterns.nm(2, 4), 1.0)),
        {"w": draw(6, 8)},
        6,
    )
    two = run(sf.dense(), {"w": draw(6, 8)}, 6)
    assert (
        torch.equal(sf.effective(one)["w"], sf.effective(two)["w"])
        and one.masks["w"].all()
    )


def test_the_factor_fades_and_the_gradient_with_it():
    map_ = sf.reparam.faded(sf.patterns.nm(1, 2), sf.schedules.linear_decay(1.0, 4))
    v = torch.tensor([[4.0, 2.0]])
    for step, factor in ((0, 1.0), (2, 0.5), (4, 0.0)):
        weights, pull, masks = torch.func.vjp(
            lambda tree, step=step: map_.apply(tree, step, KEY),
            {"latent": {"w": v}},
            has_aux=True,
        )
        assert weights["w"].tolist() == [[4.0, 2.0 * factor]]
        assert pull({"w": torch.ones(1, 2)})[0]["latent"]["w"].tolist() == [
            [1.0, factor]
        ]
        assert masks["w"].tolist() == [[True, factor > 0]]
    settled, masks = map_.settled({"latent": {"w": v}}, 0)
    assert settled["w"].tolist() == [[4.0, 0.0]] and masks["w"].tolist() == [
        [True, False]
    ]


def test_gradient_annealing_scales_the_gradients_of_pruned_weights():
    slope = sf.schedules.cosine_decay(1.0, 4)
    map_ = sf.reparam.faded(sf.patterns.unstructured(), 0.0, sparsity=0.5, slope=slope)
    algorithm = sf.reparametrised(map_)
    state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    grads = {"w": torch.full((1, 4), 2.0)}
    for step in range(5):
        found = algorithm.view.grads(state, grads, step)["latent"]["latent"]["w"]
        torch.testing.assert_close(
            found, torch.tensor([[2.0, 2.0, 2.0 * slope(step), 2.0 * slope(step)]])
        )
        state = algorithm.update(state, grads, step)


def test_autosparse_is_a_soft_threshold_with_a_slope_below():
    v, s = torch.tensor([2.0, -0.25, 0.4]), torch.tensor(0.0)
    hard, soft = (
        sf.reparam.soft_threshold(init=0.0, slope=slope) for slope in (0.0, 0.25)
    )
    latents = {"latent": {"w": v}, "threshold": {"w": s}}
    one, two = (
        torch.func.vjp(lambda tree, m=m: m.apply(tree, 0, KEY)[0], latents)
        for m in (hard, soft)
    )
    assert torch.equal(one[0]["w"], two[0]["w"])
    by_v, by_s = (
        two[1]({"w": torch.tensor([1.0, 2.0, 4.0])})[0][name]["w"]
        for name in ("latent", "threshold")
    )
    assert by_v.tolist() == [1.0, 0.5, 1.0]
    assert by_s.item() == pytest.approx(-0.25 * (1.0 - 0.25 * 2.0 + 0.25 * 4.0))


# ---- soft top-k ----------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.93])
def test_gates_add_up_to_the_count(sharpness, sparsity):
    v = draw(20, 30, dtype=torch.float64)
    k = sf.budgets.n_kept(600, sparsity)
    gates = soft_mask(v.abs(), k, sharpness)
    assert gates.sum().item() == pytest.approx(k, rel=1e-9)
    assert gates.min() >= 0.0 and gates.max() <= 1.0
    assert torch.equal(made(sf.reparam.soft_topk(sparsity, sharpness), v)[0], v * gates)


def test_sharp_gates_are_the_mask_of_the_best():
    v = draw(20, 30)
    gates = soft_mask(v.abs(), 150, 1e8)
    torch.testing.assert_close(
        gates, sf.masks.topk_mask(v.abs(), 150).float(), rtol=0, atol=1e-6
    )
    ends = [soft_mask(v.abs(), k, 10.0) for k in (0, 600)]
    torch.testing.assert_close(ends[0], torch.zeros(20, 30), rtol=0, atol=1e-6)
    torch.testing.assert_close(ends[1], torch.ones(20, 30), rtol=0, atol=1e-6)


def test_the_slopes_of_soft_gates_are_those_of_differences():
    x = draw(9, dtype=torch.float64).abs().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: soft_mask(x, 4, 3.0), (x,), eps=1e-6, atol=1e-6
    )


def test_nan_has_no_gate_and_wins_nothing():
    gates = soft_mask(torch.tensor([1.0, float("nan"), 3.0, float("inf")]), 2, 5.0)
    assert gates[1] == 0.0 and gates[3] == 1.0
    assert gates.sum().item() == pytest.approx(2.0)


def test_what_soft_topk_settles_to_has_the_exact_count():
    algorithm = sf.reparametrised(
        sf.reparam.soft_topk(0.75, sf.schedules.linear(1.0, 0.5))
    )
    state = run(algorithm, {"w": draw(8, 8)}, 4)
    assert state.masks["w"].ndim == 0
    settled = sf.settled(algorithm, state)
    assert int(settled.masks["w"].sum()) == 16
    kept = settled.masks["w"]
    assert torch.equal(sf.effective(settled)["w"][kept], sf.effective(state)["w"][kept])


# ---- soft N:M ------------------------------------------------------------------------


def test_soft_nm_is_continuous_where_the_mask_flips():
    map_ = sf.reparam.soft_nm(2, 4, rescale=False)
    below, above = (
        made(map_, torch.tensor([4.0, 2.0 + e, 2.0, 0.5])) for e in (-1e-6, 1e-6)
    )
    assert below[1].tolist() == [True, False, True, False] and above[1].tolist() == [
        True,
        True,
        False,
        False,
    ]
    torch.testing.assert_close(below[0], above[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_soft_nm_has_its_mask_and_scale(axis):
    v = draw(8, 12, 4)
    map_ = sf.reparam.soft_nm(2, 4, axis)
    latents = map_.init({"w": v}, KEY)
    weights, masks = map_.apply(latents, 0, KEY)
    assert torch.equal(
        masks["w"],
        sf.masks.topk_mask(v.abs(), None, pattern=sf.patterns.nm(2, 4, axis)),
    )
    small = made(sf.reparam.soft_nm(2, 4, axis, rescale=False), v)[0]
    best = (v * small).sum() / (small * small).sum()
    torch.testing.assert_close(weights["w"], best * small)
    assert (weights["w"][~masks["w"]] == 0).all()


def test_soft_nm_trains_through_and_its_scale_stays():
    algorithm = sf.reparametrised(sf.reparam.soft_nm(2, 4))
    trained = sf.with_optimizer(algorithm, sf.optimizers.adamw(0.1, weight_decay=0.1))
    first = state = trained.init({"w": draw(4, 8)})
    assert list(algorithm.view.get(state)["latent"]) == ["latent"]
    grads = {"w": torch.ones(4, 8)}
    assert torch.equal(
        algorithm.view.grads(state, grads, 0)["latent"]["latent"]["w"], grads["w"]
    )
    for step in range(3):
        state = trained.update(state, grads, step)
        assert torch.equal(state.masks["w"].reshape(-1, 4).sum(1), torch.full((8,), 2))
    assert sf.checkpoint.tree_equal(
        state.scores["latent"]["scale"], first.scores["latent"]["scale"]
    )


def test_soft_nm_obeys_the_laws():
    # Not in the registry of transforms: a straight-through gradient is no derivative.
    pattern = sf.patterns.nm(2, 4)
    meta = sf.testing.Meta(
        pattern=pattern,
        start="magnitude",
        scale_free=False,
        permutes=False,
        baseline=None,
    )
    # the registry's rows compile the other maps
    laws = [law for law in sf.testing.LAWS if law is not COMPILE]

    def made(sparsity, key):
        return sf.reparametrised(sf.reparam.soft_nm(2, 4))

    sf.testing.check_laws(made, meta=meta, max_examples=2, laws=laws)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: sf.reparam.faded("2:4", 0.5),
            TypeError,
            "faded: expected a pattern such as sf.patterns.nm(2, 4)",
        ),
        (
            lambda: sf.reparam.faded(sf.patterns.unstructured(), 0.5),
            TypeError,
            "faded: expected a sparsity, as unstructured() leaves the count open",
        ),
        (
            lambda: sf.reparam.faded(sf.patterns.nm(2, 4), 0.5, sparsity=0.5),
            TypeError,
            "faded: expected no sparsity, as nm(2, 4, axis=-1) fixes the count",
        ),
        (
            lambda: sf.reparam.soft_nm(2, 4).init({"w": torch.ones(2, 3)}, KEY),
            ValueError,
            "expected axis -1 divisible by 4, got shape (2, 3) at 'w'",
        ),
    ],
)
def test_bad_arguments(call, error, said):
    with pytest.raises(error, match=re.escape(said)):
        call()
