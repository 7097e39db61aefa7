"""Regrowth between leaves: shares, capacities, rates and how many grow."""

import math

import optree
import pytest
import torch

import sparsefn as sf

R = sf.redistribute


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


def counts(masks):
    return {path: int(mask.sum()) for path, mask in masks.items()}


BEFORE = {"a": row(1, 1, 1, 0) > 0, "b": row(1, 0, 0, 0) > 0}
AFTER = {"a": row(1, 1, 0, 0) > 0, "b": row(0, 0, 0, 0) > 0}
SCORES = {"a": row(1, 2, 6, 9), "b": row(5, 7, 7, 7)}


def test_shares():
    assert optree.tree_map(float, R.mean_active(SCORES, BEFORE, AFTER)) == {
        "a": 3.0,
        "b": 5.0,
    }
    assert optree.tree_map(int, R.active(SCORES, BEFORE, AFTER)) == {"a": 3, "b": 1}
    assert optree.tree_map(int, R.survivors(SCORES, BEFORE, AFTER)) == {"a": 2, "b": 0}
    assert optree.tree_map(int, R.lost(SCORES, BEFORE, AFTER)) == {"a": 1, "b": 1}
    assert math.isnan(R.mean_active(SCORES, AFTER, AFTER)["b"])
    large = {"w": torch.arange(3000.0)}
    assert R.mean_active(large, {"w": large["w"] < 2500}, {})["w"] == 1249.5


def test_a_leaf_is_filled_to_most_of_its_room_before_any_is_filled_up():
    shares, room = {"a": 0.9, "b": 0.1}, {"a": 10, "b": 100}
    assert R.allocate(shares, 20, room) == {"a": 10, "b": 10}
    assert R.allocate(shares, 20, room, most=0.55) == {"a": 5, "b": 15}
    # 60 fit under .55, two go on by share
    assert R.allocate(shares, 62, room, most=0.55) == {"a": 7, "b": 55}
    # of the 20 over, a has room for five
    assert R.allocate(shares, 80, room, most=0.55) == {"a": 10, "b": 70}
    assert R.allocate(shares, 110, room, most=0.0) == room
    with pytest.raises(
        ValueError, match="cannot hand out 111 among caps that sum to 110"
    ):
        R.allocate(shares, 111, room)


@pytest.mark.parametrize("most", [1.0, 0.99, 0.5])
def test_tensors_are_dealt_out_like_numbers(most):
    shares, room = {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 4, "b": 9, "c": 9}
    batch = torch.func.vmap(lambda n: R.allocate(shares, n, room, most))(
        torch.arange(23)
    )
    for total in range(23):
        plain = R.allocate(shares, total, room, most)
        assert all(type(n) is int for n in plain.values())
        assert sum(plain.values()) == total
        assert {path: int(n[total]) for path, n in batch.items()} == plain
    other_order = R.allocate(
        dict(reversed(shares.items())), torch.tensor(9), room, most
    )
    assert list(other_order) == ["c", "b", "a"]
    assert {path: int(n) for path, n in other_order.items()} == R.allocate(
        shares, 9, room, most
    )


def test_drop_grow_fills_leaves_to_most_of_their_room():
    # 2 stay in each leaf and 4 grow, of which a would get them all; its room is 6.
    def share(scores, before, after):
        return {"a": torch.tensor(9.0), "b": torch.tensor(1.0)}

    w = row(8, 7, 6, 5, 0, 0, 0, 0)
    for most, wanted in ((1.0, {"a": 6, "b": 2}), (0.5, {"a": 5, "b": 3})):
        plan = R.Redistribute(share, most=most)
        algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", redistribute=plan)
        state = algorithm.init({"a": w, "b": w})
        assert counts(algorithm.update(state, {"a": w, "b": w}, 0).masks) == wanted


def test_the_statistic_may_be_another_score_than_that_of_growth():
    # Growth by the gradient of the step, shares by a moving average that has seen the
    # steps before.
    w = row(8, 7, 6, 5, 0, 0, 0, 0)
    plan = R.Redistribute(R.mean_active, score=sf.scores.momentum(0.5))
    algorithm = sf.rigl(
        "current",
        drop_fraction=0.5,
        when=sf.at([1]),
        redistribute=plan,
        init="from_zeros",
    )
    state = algorithm.init({"a": w, "b": w})
    high = row(1, 1, 1, 1, 2, 3, 4, 5)
    state = algorithm.update(state, {"a": high, "b": 8 * high}, 0)
    assert state.scores["share"]["a"][0, 0] == 0.5  # advanced though nothing fires
    assert counts(state.masks) == {"a": 4, "b": 4}
    # Averages .75 and 2.5 of gradients (1, 8) and (1, 1): of 4, one and three.
    state = algorithm.update(state, {"a": high, "b": high}, 1)
    assert counts(state.masks) == {"a": 3, "b": 5}
    assert state.masks["a"][0].nonzero().flatten().tolist() == [0, 1, 7]

    # And the reverse: growth by the average, shares by the gradient.
    plan = R.Redistribute(R.mean_active, score=sf.scores.gradient)
    algorithm = sf.snfs(
        "current",
        grow=sf.scores.momentum(0.5),
        drop_fraction=0.5,
        redistribute=plan,
        init="from_zeros",
        when=sf.at([1]),
    )
    state = algorithm.update(
        algorithm.init({"a": w, "b": w}), {"a": 8 * high, "b": high}, 0
    )
    state = algorithm.update(state, {"a": high, "b": 3 * high}, 1)
    assert counts(state.masks) == {"a": 3, "b": 5}


def test_three_scores_with_memory_lie_by_their_roles():
    plan = R.Redistribute(R.mean_active, score=sf.scores.momentum(0.5))
    algorithm = sf.rigl(
        0.5,
        drop=sf.scores.ema(sf.scores.magnitude, 0.5),
        redistribute=plan,
        when=sf.never(),
    )
    state = algorithm.update(algorithm.init({"w": row(1, 2)}), {"w": row(4, 4)}, 0)
    assert state.scores["share"]["w"].tolist() == [[2.0, 2.0]]
    assert set(state.scores) == {"drop", "share"}


def test_a_plain_function_gets_the_growth_scores():
    seen = {}

    def share(scores, before, after):
        seen.update(scores=scores, before=before, after=after)
        return R.lost(scores, before, after)

    w = row(4, 3, 0, 0)
    algorithm = sf.rigl(
        "current", drop_fraction=0.5, redistribute=share, init="from_zeros"
    )
    algorithm.update(algorithm.init({"w": w}), {"w": row(0, 0, 0, -9)}, 0)
    assert seen["scores"]["w"].tolist() == [[0, 0, 0, 9]]
    assert (seen["before"]["w"].tolist(), seen["after"]["w"].tolist()) == (
        [[True, True, False, False]],
        [[True, False, False, False]],
    )


def test_lost_is_the_same_as_no_redistribution():
    params = {"a": torch.randn(8, 8), "b": torch.randn(3, 5)}
    ends = []
    for plan in (None, R.lost, R.Redistribute(R.lost)):
        algorithm = sf.rigl(0.6, drop_fraction=0.4, redistribute=plan, when=sf.always())
        state = algorithm.init(params)
        for step in range(3):
            state = algorithm.update(
                state,
                {path: torch.sin(9 * w) for path, w in state.params.items()},
                step,
            )
        ends.append(state.masks)
    assert sf.checkpoint.tree_equal(ends[0], ends[1])
    assert sf.checkpoint.tree_equal(ends[0], ends[2])


def test_careful_rates_spare_important_leaves_that_are_nearly_dense():
    # 9 of 10 active: a is above the average and drops a tenth, ceil(.1 * 9) = 1; b
    # drops ceil(.5 * 9) = 5.
    masks = {path: torch.arange(10.0)[None] < 9 for path in "ab"}
    params = {path: torch.arange(10.0, 0.0, -1.0)[None] for path in "ab"}
    grads = {"a": torch.full((1, 10), 3.0), "b": torch.ones(1, 10)}
    dropped = []

    def share(scores, before, after):
        dropped.append({path: 9 - n for path, n in counts(after).items()})
        return R.lost(scores, before, after)

    for below in (0.2, 0.1, 0.0):
        plan = R.Redistribute(share, rate=R.careful(below=below))
        algorithm = sf.rigl(
            "current",
            drop_fraction=0.5,
            count=sf.budgets.rounded_up,
            redistribute=plan,
            init=masks,
            when=sf.always(),
        )
        algorithm.update(algorithm.init(params), grads, 0)
    assert dropped == [{"a": 1, "b": 5}, {"a": 5, "b": 5}, {"a": 5, "b": 5}]
    fractions = R.careful()(
        0.3,
        {"a": torch.full((4,), 9.0), "b": torch.ones(4)},
        {"a": torch.ones(4) > 0, "b": torch.ones(4) > 0},
    )
    # a dense important leaf drops nothing
    assert optree.tree_map(float, fractions) == {"a": 0.0, "b": 0.3}
    assert R.careful()(0.3, {}, {}) == {}
    alike = {path: torch.ones(4) for path in "ab"}
    full = {path: torch.ones(4) > 0 for path in "ab"}
    # neither is above average
    assert optree.tree_map(float, R.careful()(0.3, alike, full)) == {"a": 0.3, "b": 0.3}
    alike["a"] = torch.full((4,), 9.0)
    assert optree.tree_map(float, R.careful(below=1.0)(0.3, alike, full)) == {
        "a": 0.0,
        "b": 0.3,
    }


def test_each_may_grow_by_a_chance_of_its_own():
    scores = torch.tensor([[0.95, 0.5, 0.05, 0.9], [0.1, 0.2, 0.3, 0.99]])
    free = torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert R.independently(scores, free, torch.tensor([0, 0])).tolist() == [0, 0]
    assert R.independently(scores, free, torch.tensor([1, 1])).tolist() == [1, 1]
    assert R.independently(scores, free, torch.tensor([3, 4])).tolist() == [3, 4]
    one, zero = torch.tensor([[True, False]]), torch.tensor([[0.3, 0.9], [0.0, 0.0]])
    assert R.independently(zero, one.expand(2, 2), torch.tensor([1, 1])).tolist() == [
        1,
        1,
    ]  # with certainty
    assert R.independently(
        scores, torch.zeros_like(free), torch.tensor([0, 0])
    ).tolist() == [0, 0]


def everything(seed, fraction):
    plan = R.Redistribute(
        R.mean_active,
        score=sf.scores.momentum(0.5),
        most=0.9,
        rate=R.careful(below=0.9),
    )
    return sf.set(
        0.5,
        drop_fraction=fraction,
        init="bernoulli",
        key=sf.random.key(seed) if isinstance(seed, int) else seed,
        redistribute=plan,
        grow_count=R.independently,
        restart_dropped=True,
        when=sf.every(2),
    )


MAKE = torch.Generator().manual_seed(1)
PARAMS = {
    path: torch.randn(shape, generator=MAKE)
    for path, shape in (("a", (6, 8)), ("b", (5, 4)))
}


def walk(algorithm, steps, update=None):
    state = algorithm.init(PARAMS)
    for step in steps:
        grads = {path: 0.5 * w * (w - 1.0) + 0.125 for path, w in state.params.items()}
        state = (update or algorithm.update)(state, grads, step)
    return state


@pytest.mark.deep
def test_all_of_it_is_pure_under_tensor_steps_vmap_and_compile():
    plain = walk(everything(0, 0.3), range(4))
    tensors = [torch.tensor(step) for step in range(4)]
    assert sf.checkpoint.tree_equal(walk(everything(0, 0.3), tensors), plain)
    algorithm = everything(0, 0.3)
    update = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    assert sf.checkpoint.tree_equal(walk(algorithm, tensors, update), plain)

    keys = torch.stack([sf.random.key(0), sf.random.key(1)])
    levels = torch.tensor([0.3, 0.6], dtype=torch.float64)
    batch = torch.func.vmap(lambda key, level: walk(everything(key, level), range(4)))(
        keys, levels
    )
    for i, fraction in enumerate((0.3, 0.6)):
        single = walk(everything(i, fraction), range(4))
        assert sf.checkpoint.tree_equal(
            sf.ensemble.member(batch, i).masks, single.masks
        )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: sf.rigl(0.5, redistribute="momentum"),
            TypeError,
            "expected redistribute to be a function such as "
            "sf.redistribute.mean_active, or a Redistribute, got 'momentum'",
        ),
        (
            lambda: sf.rigl(0.5, redistribute=R.Redistribute(None)),
            TypeError,
            "expected redistribute to be a function such as "
            "sf.redistribute.mean_active, or a Redistribute, got None",
        ),
        (
            lambda: sf.rigl(0.5, redistribute=R.Redistribute(R.lost, score="grad")),
            TypeError,
            "expected the score of redistribute to be a score such as "
            "sf.scores.magnitude, got 'grad'",
        ),
        (
            lambda: sf.rigl(0.5, redistribute=R.Redistribute(R.lost, rate=0.2)),
            TypeError,
            "expected the rate of redistribute to be a function, got 0.2",
        ),
        (
            lambda: sf.rigl(0.5, redistribute=R.Redistribute(R.lost, most=1.5)),
            ValueError,
            "expected most in [0, 1], got 1.5",
        ),
        (
            lambda: R.allocate({"a": 1.0}, 1, {"a": 1}, most=-0.1),
            ValueError,
            "expected most in [0, 1], got -0.1",
        ),
        (
            lambda: R.careful(below=2),
            ValueError,
            "careful: expected below in [0, 1], got 2",
        ),
        (
            lambda: R.allocate({"a": -1.0}, 1, {"a": 1}),
            ValueError,
            "expected finite shares >= 0, got -1.0 at 'a'",
        ),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text
