"""The first masks of an algorithm."""

import pytest
import torch

import sparsefn as sf

W = torch.tensor([[4.0, -3.0, 2.0, 1.0], [-0.5, 0.6, 0.7, -0.8]])


def test_every_kind_of_init_makes_the_mask_it_names():
    holes = torch.tensor([[1.0, 0.0], [-0.0, float("nan")]])
    assert sf.static(None, init="from_zeros").init({"w": holes}).masks[
        "w"
    ].tolist() == [[True, False], [False, True]]
    assert sf.static(0.5, init="dense").init({"w": W}).masks["w"].all()
    assert sf.static(0.5, init="dense").init({"w": W}).masks["w"].shape == W.shape
    assert sf.static(0.5, init="magnitude").init({"w": W}).masks["w"].tolist() == [
        [True] * 4,
        [False] * 4,
    ]
    board = sf.static(0.5, init="checkerboard").init({"w": W}).masks["w"]
    assert torch.equal(board, sf.masks.checkerboard((2, 4), 0.5))
    given = {"w": W > 0}
    assert torch.equal(sf.static(None, init=given).init({"w": W}).masks["w"], W > 0)
    assert torch.equal(
        sf.static(None, init=lambda p: {"w": p["w"] > 0}).init({"w": W}).masks["w"],
        W > 0,
    )


def test_the_choice_of_leaves_warns_once(recwarn):
    sf.static(None, init="from_zeros", where=lambda path, leaf: False).init({"w": W})
    (warning,) = recwarn
    assert "no leaf is sparsified" in str(warning.message)


def test_bernoulli_masks_keep_each_unit_by_a_chance_of_its_own():
    params = {"a": torch.ones(30, 40), "b": torch.ones(20, 10, 3, 3)}

    def counts(seed, **options):
        algorithm = sf.static(
            0.75, init="bernoulli", key=sf.random.key(seed), **options
        )
        return [int(mask.sum()) for mask in algorithm.init(params).masks.values()]

    assert counts(0) == counts(0)
    drawn = torch.tensor([counts(seed) for seed in range(20)]).double()
    assert (drawn.std(0) > 3).all()
    # Deviations of sqrt(n p q / 20): 3.4 and 4.1.
    assert (
        (drawn.mean(0) - torch.tensor([300.0, 450.0])).abs()
        < torch.tensor([14.0, 17.0])
    ).all()

    kernels = sf.static(
        0.75, init="bernoulli", pattern=sf.patterns.kernel(), key=sf.random.key(0)
    ).init(params)
    whole = kernels.masks["b"].flatten(2)
    assert torch.equal(whole.any(-1), whole.all(-1))
    assert 20 < int(whole.any(-1).sum()) < 80
    erk = sf.budgets.erk()({"a": (30, 40), "b": (20, 10, 3, 3)}, 0.75)
    assert abs(counts(1, distribution=sf.budgets.erk())[0] - erk["a"]) < 80
    assert abs(sum(counts(1, distribution=sf.budgets.global_())) - 750) < 120
    rows = sf.static(
        0.75, init="bernoulli", pattern=sf.patterns.row_balanced(), key=sf.random.key(0)
    ).init(params)
    assert abs(int(rows.masks["a"].sum()) - 300) < 75
    for sparsity, kept in ((0.0, True), (1.0, False)):
        masks = sf.static(sparsity, init="bernoulli").init(params).masks
        assert all(bool((mask == kept).all()) for mask in masks.values())


def test_bernoulli_masks_need_an_open_count():
    with pytest.raises(
        ValueError,
        match=r"^init='bernoulli' needs a pattern that leaves the count open, got "
        r"nm\(2, 4",
    ):
        sf.static(0.5, init="bernoulli", pattern=sf.patterns.nm(2, 4)).init({"w": W})
    with pytest.raises(ValueError, match="init='bernoulli' needs a sparsity, got None"):
        sf.static(None, init="bernoulli").init({"w": W})
