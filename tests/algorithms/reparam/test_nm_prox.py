"""The proximal operator of n of m: `nm_prox`."""

import re
from itertools import combinations
from math import prod

import pytest
import torch
from golden_data import cases

import sparsefn as sf
from sparsefn.algorithms.reparam.nm_prox import proximal_sizes as sizes_of

nm_prox, nm, KEY = sf.reparam.nm_prox, sf.patterns.nm, sf.random.key(0)


def moved(weight, strength, pattern=nm(2, 4)):
    """One leaf after the proximal step."""
    map_ = nm_prox(strength, pattern)
    latents = map_.init({"w": weight}, KEY)
    new = map_.project(latents, 0)
    torch.testing.assert_close(new["base"]["w"], weight, rtol=0, atol=0, equal_nan=True)
    return new["latent"]["w"]


def proximal_sizes(z, n, strength):
    """The operator at a plain number."""
    return sizes_of(z, n, torch.tensor(strength, dtype=torch.float64))


def products(x, degree):
    """The sum over all sets of `degree` rows of their product, by definition."""
    return sum(prod(rows) for rows in combinations(x, degree))


def objective(x, z, n, strength):
    return 0.5 * (x - z).square().sum(0) + strength * products(x, n + 1)


def sorted_groups(groups, m, seed=0):
    """Random groups, half of them of nearly equal weights, where minima compete."""
    torch.manual_seed(seed)
    z = torch.rand(m, groups, dtype=torch.float64)
    z = torch.where(torch.arange(groups) % 2 == 0, z, 1.0 - 0.2 * z)
    return z.sort(0, descending=True).values


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (1, 4), (2, 3), (2, 6)])
@pytest.mark.parametrize("strength", [0.2, 1.0, 1.7, 3.0])
def test_no_descent_from_any_start_finds_a_smaller_objective(n, m, strength):
    z = sorted_groups(200, m)
    found = objective(proximal_sizes(z, n, strength), z, n, strength)
    assert (found <= objective(z, z, n, strength)).all()
    starts = z.repeat(1, 40)
    x = torch.rand_like(starts) * starts
    for _ in range(60):
        # the objective is a parabola in each weight
        for i in torch.randperm(m).tolist():
            others = torch.cat([x[:i], x[i + 1 :]])
            x[i] = (starts[i] - strength * products(others, n)).clamp_min(0.0)
    best = objective(x, starts, n, strength).reshape(40, -1).amin(0)
    assert (found <= best + 1e-14).all()
    # descent ends in the same minimum where it was not unlucky
    assert (found >= best - 1e-4).double().mean() > 0.95


def test_no_point_of_a_fine_grid_is_better():
    z = sorted_groups(6, 4, seed=1)
    axis = torch.linspace(0.0, 1.0, 21, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis, axis, axis).T
    for strength in (0.3, 1.0, 2.5):
        x = proximal_sizes(z, 2, strength)
        for group in range(6):
            own = z[:, group : group + 1]
            every = objective(grid, own.expand_as(grid), 2, strength)
            mine = objective(x[:, group : group + 1], own, 2, strength)
            assert mine <= every.amin() + 1e-15


def test_a_weak_penalty_moves_all_four_as_its_slope_says():
    z = torch.tensor([[0.9], [0.8], [0.7], [0.6]], dtype=torch.float64)
    x = proximal_sizes(z, 2, 0.1)
    for i in range(4):
        others = torch.cat([x[:i], x[i + 1 :]])
        torch.testing.assert_close(x[i], z[i] - 0.1 * products(others, 2))
    assert (x > 0).all()


def test_of_one_of_two_it_is_a_linear_system_or_the_larger_weight():
    z = torch.tensor([[0.9], [0.8]], dtype=torch.float64)
    # x1 + x2 / 2 = 0.9 and x1 / 2 + x2 = 0.8
    expected = torch.tensor([[2 / 3], [14 / 30]], dtype=torch.float64)
    torch.testing.assert_close(proximal_sizes(z, 1, 0.5), expected)
    expected = torch.tensor([[0.9], [0.0]], dtype=torch.float64)
    assert torch.equal(proximal_sizes(z, 1, 1.0), expected)


def test_groups_with_two_weights_are_fixed_points():
    weight = torch.randn(8, 16)
    mask = sf.masks.topk_mask(weight.abs(), None, pattern=nm(2, 4))
    pruned = torch.where(mask, weight, 0.0)
    assert torch.equal(moved(pruned, 100.0), pruned)
    assert torch.equal(moved(weight, 0.0), weight)


def test_a_strong_penalty_keeps_the_two_largest_as_they_are():
    weight = torch.randn(8, 16)
    mask = sf.masks.topk_mask(weight.abs(), None, pattern=nm(2, 4))
    assert torch.equal(moved(weight, 1e6), torch.where(mask, weight, 0.0))


def test_signs_and_order_go_along():
    weight = torch.rand(6, 4, dtype=torch.float64)
    signs = torch.randn(6, 4, dtype=torch.float64).sign()
    places = torch.tensor([2, 0, 3, 1])
    new = moved(weight, 0.7)
    assert torch.equal(moved(signs * weight, 0.7), signs * new)
    assert torch.equal(moved(weight[:, places], 0.7), new[:, places])
    assert torch.equal(moved(weight.T.contiguous(), 0.7, nm(2, 4, axis=0)), new.T)


def test_the_penalty_scales_with_the_weights():
    weight = torch.randn(6, 8, dtype=torch.float64)
    torch.testing.assert_close(moved(4.0 * weight, 0.25), 4.0 * moved(weight, 1.0))


def test_its_derivative_is_the_limit_of_differences():
    torch.manual_seed(3)
    weight = torch.randn(5, 8, dtype=torch.float64)
    way = torch.randn(5, 8, dtype=torch.float64)
    after = torch.func.jvp(lambda w: moved_alone(w), (weight,), (way,))[1]
    far = moved_alone(weight + 1e-6 * way) - moved_alone(weight - 1e-6 * way)
    torch.testing.assert_close(after, far / 2e-6, rtol=1e-6, atol=1e-6)
    pulled = torch.func.vjp(moved_alone, weight)[1](way)[0]
    torch.testing.assert_close((pulled * way).sum(), (after * way).sum())


def moved_alone(weight):
    """One leaf after the proximal step, without checks."""
    map_ = nm_prox(0.4)
    return map_.project({"base": {"w": weight}, "latent": {"w": weight}}, 0)["latent"][
        "w"
    ]


def test_what_is_not_finite_keeps_two():
    nan, inf = float("nan"), float("inf")
    weight = torch.tensor([[nan, 1.0, 2.0, 3.0], [inf, 1.0, -inf, 3.0]])
    new = moved(weight, 0.5)
    assert new.tolist() == [[0.0, 0.0, 2.0, 3.0], [inf, 0.0, -inf, 0.0]]


@pytest.mark.parametrize("case", cases("learned_masks", "prox_op"), ids=lambda c: c.id)
def test_the_proximal_operator_of_the_authors(case):
    weight, theirs = case.inputs["weight"], case.outputs["out"]
    strength = case.args["lambda_"]
    ours = moved(weight, strength)

    def values(x):
        sizes = x.abs().reshape(-1, 4).T
        return objective(sizes, weight.abs().reshape(-1, 4).T, 2, strength)

    assert (values(ours) <= values(theirs) + 1e-14).all()
    same = values(ours) >= values(theirs) - 1e-10
    assert same.double().mean() > 0.9
    same = same.repeat_interleave(4).reshape(weight.shape)
    torch.testing.assert_close(ours[same], theirs[same], rtol=0.0, atol=1e-5)


def test_settled_is_the_first_weights_under_the_largest_trained_ones():
    map_ = nm_prox(0.5, nm(1, 2))
    base = torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    latents = map_.init({"w": base}, KEY)
    nan = float("nan")
    latents["latent"]["w"] = torch.tensor([[1.0, -1.0, nan, 0.0]])
    weights, masks = map_.settled(latents, 0)
    assert weights["w"].tolist() == [[5.0, 0.0, 0.0, 8.0]]
    assert masks["w"].tolist() == [[True, False, False, True]]


def test_trained_weights_do_not_share_the_memory_of_the_frozen_ones():
    latents = nm_prox(0.5).init({"w": torch.ones(2, 4)}, KEY)
    latents["latent"]["w"].zero_()
    assert latents["base"]["w"].all()


def test_the_strength_follows_its_schedule():
    map_ = nm_prox(sf.schedules.piecewise({0: 0.0, 3: 1e6}))
    latents = map_.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])}, KEY)
    assert torch.equal(map_.project(latents, 2)["latent"]["w"], latents["base"]["w"])
    late = map_.project(latents, 3)["latent"]["w"]
    assert late.tolist() == [[4.0, 3.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: nm_prox(1.0, 2),
            TypeError,
            "nm_prox: expected a pattern such as sf.patterns.nm(2, 4), got 2",
        ),
        (
            lambda: nm_prox(1.0, nm(4, 8)),
            ValueError,
            "expected a pattern that keeps 1 or 2 single weights of a group, such as "
            "nm(2, 4), got nm(4, 8, axis=-1)",
        ),
        (
            lambda: nm_prox(-1.0),
            ValueError,
            "nm_prox: expected strength >= 0, got -1.0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
