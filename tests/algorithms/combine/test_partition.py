"""Partitions: different algorithms for different leaves."""

import optree
import pytest
import torch
from composed_runs import PARTS, RANDOM, kept, run

import sparsefn as sf


@pytest.mark.parametrize("name", PARTS)
def test_a_part_draws_and_trains_as_it_would_alone(name):
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9)
    alone = run(sf.with_optimizer(PARTS[name](), optimizer), params={"a": RANDOM["a"]})
    parts = sf.partition([("b", sf.static(0.5)), ("a", PARTS[name]())])
    state = run(sf.with_optimizer(parts, optimizer))
    assert torch.equal(state.masks["a"], alone.masks["a"])
    assert torch.equal(state.params["a"], alone.params["a"])
    assert torch.equal(state.opt.momentum["a"], alone.opt.momentum["a"])
    assert state.masks["c"].ndim == 0


@pytest.mark.parametrize("name", PARTS)
def test_optimizers_inside_the_parts_equal_one_around_them(name):
    optimizer = sf.optimizers.adam(0.05, weight_decay=0.01)
    around = run(
        sf.with_optimizer(
            sf.partition([("a", PARTS[name]()), ("*", sf.static(0.5))]), optimizer
        )
    )
    parts = [
        ("a", sf.with_optimizer(PARTS[name](), optimizer)),
        ("*", sf.with_optimizer(sf.static(0.5), optimizer)),
    ]
    inside = run(sf.partition(parts))
    assert sf.checkpoint.tree_equal(inside.params, around.params)
    assert sf.checkpoint.tree_equal(inside.masks, around.masks)
    assert torch.equal(inside.parts[0].opt.mu["a"], around.opt.mu["a"])
    assert torch.equal(inside.parts[1].opt.nu["b"], around.opt.nu["b"])


def test_parts_may_have_optimizers_of_their_own_and_some_none():
    fast, slow = (
        sf.with_optimizer(sf.dense(), sf.optimizers.sgd(lr)) for lr in (0.5, 0.25)
    )
    algorithm = sf.partition([("a", fast), ("b", slow)])
    params = {"a": torch.zeros(1, 2), "b": torch.zeros(1, 2), "c": torch.zeros(2)}
    state = algorithm.update(
        algorithm.init(params), optree.tree_map(torch.ones_like, params), 0
    )
    assert {path: leaf.flatten()[0].item() for path, leaf in state.params.items()} == {
        "a": -0.5,
        "b": -0.25,
        "c": 0.0,
    }


def test_the_first_match_wins_and_the_rest_stays_dense():
    params = {
        "head": {"w": torch.ones(2, 2)},
        "body": {"w": torch.ones(2, 2)},
        "neck": torch.ones(2, 2),
    }
    parts = [
        ("head.*", sf.static(1.0)),
        (["*.w"], sf.static(0.5)),
        (lambda path, leaf: path != "tail", sf.static(0.25)),
    ]
    state = sf.partition(parts).init({**params, "tail": torch.ones(2, 2)})
    assert int(state.masks["head"]["w"].sum()) == 0
    assert int(state.masks["body"]["w"].sum()) == 2
    assert int(state.masks["neck"].sum()) == 3
    assert state.masks["tail"].ndim == 0


def test_a_part_applies_its_own_where_to_its_leaves():
    params = {
        "a": {"weight": torch.ones(2, 2), "bias": torch.ones(2)},
        "b": torch.ones(4),
    }
    state = sf.partition(
        [("a.*", sf.static(0.5)), ("b", sf.static(0.5, where="b"))]
    ).init(params)
    assert state.masks["a"]["bias"].ndim == 0
    assert int(state.masks["b"].sum()) == 2


def test_a_global_budget_inside_a_part_sees_its_leaves_alone():
    params = {
        "a": torch.tensor([[9.0, 8.0]]),
        "b": torch.tensor([[1.0, 2.0]]),
        "c": torch.tensor([[3.0, 4.0]]),
    }
    algorithm = sf.partition(
        [(["b", "c"], sf.gmp(0.5, distribution=sf.budgets.global_()))]
    )
    state = algorithm.init(params)
    assert (state.masks["a"].ndim, kept(state, "b"), kept(state, "c")) == (
        0,
        set(),
        {0, 1},
    )


def test_latents_train_in_one_part_and_weights_in_another():
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9, weight_decay=0.05)
    power = sf.reparametrised(sf.reparam.power(2.0))
    state = run(
        sf.with_optimizer(
            sf.partition([("a", power), ("b", sf.rigl(0.5, when=sf.always()))]),
            optimizer,
        )
    )
    for path, algorithm in (("a", power), ("b", sf.rigl(0.5, when=sf.always()))):
        alone = run(
            sf.with_optimizer(algorithm, optimizer), params={path: RANDOM[path]}
        )
        assert torch.equal(state.params[path], alone.params[path])
        assert torch.equal(state.masks[path], alone.masks[path])


def test_terms_may_be_given_to_one_part():
    terms = sf.partition([("a", sf.with_terms(sf.dense(), sf.terms.l1(1.0)))])
    algorithm = sf.with_optimizer(terms, sf.optimizers.sgd(0.5))
    params = {"a": torch.tensor([2.0]), "b": torch.tensor([2.0])}
    state = algorithm.update(
        algorithm.init(params), optree.tree_map(torch.zeros_like, params), 0
    )
    assert (state.params["a"].item(), state.params["b"].item()) == (1.5, 2.0)


def test_grow_and_prune_lets_one_part_be_dense_at_a_time():
    # Ma et al. 2022: three parts; in every round one is dense, after three rounds each
    # was once.
    def part(i):
        level = sf.schedules.cycling(
            [0.0 if j == i else 0.5 for j in range(3)], sf.always()
        )
        return sf.gmp(level, regrow=True)

    algorithm = sf.partition([(f"{i}", part(i)) for i in range(3)])
    params = [torch.randn(4, 4) for _ in range(3)]
    state, dense = algorithm.init(params), []
    for step in range(6):
        state = algorithm.update(state, params, step)
        dense.append([bool(mask.all()) for mask in state.masks])
    assert dense == [[i == step % 3 for i in range(3)] for step in range(6)]
