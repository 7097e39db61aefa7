"""One cycle: quota, drop, grow and plant, as every preset of `drop_grow` makes it."""

import optree
import pytest
import torch
from single_rows import count, kept, row

import sparsefn as sf
from sparsefn._engine.draws import leaf_draws
from sparsefn._engine.leaves import leafwise, lists
from sparsefn._engine.selection import batches, dispatch


def test_ties_go_to_the_lower_index_in_both_directions():
    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude")
    state = algorithm.init(row(1, 1, 1, 1, 0, 0, 0, 0))
    # Among equal weights the higher index is dropped, among equal gradients the lower
    # one grows.
    assert kept(algorithm.update(state, row(0, 0, 0, 0, 5, 5, 5, 5), 0)) == {0, 1, 4, 5}


def test_a_weight_that_is_dropped_and_grows_back_keeps_its_value():
    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude")
    state = algorithm.init(row(4, 3, 2, 1))
    state = algorithm.update(state, row(0, 9, 0, 0), 0)
    assert state.params["w"].tolist() == [[4.0, 3.0, 0.0, 0.0]]

    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", exclude_dropped=True)
    state = algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(0, 9, 1, 0), 0)
    assert kept(state) == {0, 2}
    assert state.params["w"].tolist() == [[4.0, 0.0, 0.0, 0.0]]


def test_excluding_the_dropped_drops_no_more_than_can_be_grown():
    algorithm = sf.rigl(0.25, drop_fraction=1.0, init="magnitude", exclude_dropped=True)
    state = algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(1, 1, 1, 1), 0)
    assert kept(state) == {0, 1, 3}


def test_the_dropped_are_a_rounded_fraction_of_the_active():
    # 10 active: .25 drops round_half_even(2.5) = 2; peers that truncate or round up say
    # so by `count`.
    params = {"w": torch.arange(20.0, 0.0, -1.0).reshape(4, 5)}
    grads = {"w": torch.arange(20.0).reshape(4, 5)}
    rules = {
        2: sf.rigl(0.5, drop_fraction=0.25, init="magnitude"),
        3: sf.rigl(
            0.5,
            drop_fraction=0.25,
            init="magnitude",
            count=lambda f, n: torch.ceil(f * n).long(),
        ),
        0: sf.rigl(0.5, drop_fraction=0.0, init="magnitude"),
        10: sf.rigl(0.5, drop_fraction=1.0, init="magnitude"),
    }
    for dropped, algorithm in rules.items():
        state = algorithm.init(params)
        new = algorithm.update(state, grads, 0)
        assert int((new.masks["w"] & ~state.masks["w"]).sum()) == dropped
        assert count(new) == 10


def test_a_dense_start_is_brought_to_the_target_and_a_schedule_is_followed():
    params = {"w": torch.randn(10, 10)}
    algorithm = sf.rigl(0.8, init="dense")
    state = algorithm.init(params)
    assert count(state) == 100
    assert count(algorithm.update(state, params, 0)) == 20

    level = sf.schedules.piecewise({0: 0.5, 1: 0.9, 2: 0.3})
    algorithm = sf.rigl(level, drop_fraction=0.1, when=sf.always())
    state, seen = algorithm.init(params), []
    for step in range(3):
        state = algorithm.update(state, params, step)
        seen.append(count(state))
    assert seen == [50, 10, 70]


def test_current_grows_back_exactly_what_was_dropped():
    algorithm = sf.rigl(
        "current", drop_fraction=0.5, init=lambda params: {"w": params["w"] != 0}
    )
    state = algorithm.init(row(4, 3, 0, 0, 0, 0))
    state = algorithm.update(state, row(0, 0, 0, 0, 0, 9), 0)
    assert kept(state) == {0, 5}


@pytest.mark.parametrize(
    "pattern",
    [
        sf.patterns.nm(2, 4),
        sf.patterns.block((2, 2)),
        sf.patterns.block((3, 3)),
        sf.patterns.channel(0),
        sf.patterns.row_balanced(),
        sf.patterns.in_groups(4),
        sf.patterns.out_groups(2),
    ],
    ids=str,
)
def test_every_pattern_keeps_its_counts(pattern):
    params = {"w": torch.randn(6, 8)}
    algorithm = sf.rigl(
        0.5, drop_fraction=0.5, pattern=pattern, key=sf.random.key(5), when=sf.always()
    )
    state = algorithm.init(params)
    first, moved = state.masks["w"], False
    for step in range(3):
        grads = {"w": torch.randn(6, 8)}
        state = algorithm.update(
            sf.with_params(state, {"w": torch.randn(6, 8)}), grads, step
        )
        mask = state.masks["w"]
        moved = moved or not torch.equal(mask, first)
        if "block" in str(pattern):
            size = int(str(pattern)[7])
            units = torch.nn.functional.max_pool2d(
                mask[None].float(), size, ceil_mode=True
            )[0]
            assert int(units.sum()) == units.numel() // 2
            whole = units.repeat_interleave(size, 0).repeat_interleave(size, 1)[:6, :8]
            assert torch.equal(mask, whole.bool())
        else:
            assert int(mask.sum()) == 24
            assert torch.equal(
                mask,
                sf.masks.topk_mask(mask.float(), *wanted(pattern), pattern=pattern),
            )
    assert moved


def wanted(pattern):
    """The count of each group at half the sparsity."""
    return {"n": (None,), "c": (3,), "r": (4,), "i": (6,), "o": (12,)}[str(pattern)[0]]


def test_rows_drop_and_grow_inside_themselves():
    # A constant fan-in of 2, Lasby et al. 2024: each row drops its smallest and grows
    # its largest gradient.
    algorithm = sf.rigl(
        0.5, drop_fraction=0.5, pattern=sf.patterns.row_balanced(), init="magnitude"
    )
    state = algorithm.init(
        {"w": torch.tensor([[5.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.9]])}
    )
    state = algorithm.update(
        state, {"w": torch.tensor([[0.0, 0.0, 9.0, 8.0], [0.2, 0.7, 0.0, 0.0]])}, 0
    )
    assert kept(state) == {0, 2, 5, 7}


def test_one_competition_over_all_leaves_moves_counts_between_them():
    algorithm = sf.rigl(
        0.5, drop_fraction=0.5, init="magnitude", distribution=sf.budgets.global_()
    )
    params = {
        "a": torch.tensor([[4.0, 3.0, 0.0, 0.0]]),
        "b": torch.tensor([[2.0, 1.0, 0.0, 0.0]]),
    }
    grads = {
        "a": torch.tensor([[0.0, 0.0, 0.1, 0.1]]),
        "b": torch.tensor([[0.0, 0.0, 5.0, 6.0]]),
    }
    state = algorithm.init(params)
    state = algorithm.update(state, grads, 0)
    assert (kept(state, "a"), kept(state, "b")) == ({0, 1}, {2, 3})
    params["b"] = -params["b"]
    floored = sf.rigl(
        0.5,
        drop_fraction=0.75,
        init="magnitude",
        distribution=sf.budgets.global_(floor=0.5),
    )
    state = floored.update(floored.init(params), grads, 0)
    assert (len(kept(state, "a")), len(kept(state, "b"))) == (2, 2)


def test_random_drop_and_random_growth_draw_apart():
    seen = {}

    def draws(role):
        def score(state, grads, step):
            seen[role] = sf.scores.random(state, grads, step)
            return seen[role]

        return score

    algorithm = sf.set(0.5, drop=draws("drop"), grow=draws("grow"), when=sf.always())
    state = algorithm.init({"w": torch.ones(8, 8)})
    algorithm.update(state, state.params, 0)
    assert not (seen["drop"]["w"] == seen["grow"]["w"]).all()
    # Nor do they repeat the draws of the first mask.
    assert not any(
        torch.equal(sf.masks.topk_mask(draw["w"], 32), state.masks["w"])
        for draw in seen.values()
    )


def test_counts_that_have_moved_stay_moved():
    # With nothing to drop the next update changes nothing, though no leaf has the
    # uniform count of 4.
    fraction = sf.schedules.piecewise({0: 0.5, 1: 0.0})
    algorithm = sf.snfs(
        0.5,
        grow=sf.scores.momentum(0.5),
        drop_fraction=fraction,
        init="magnitude",
        when=sf.always(),
    )
    w = torch.tensor([[8.0, 7.0, 6.0, 5.0, 0.0, 0.0, 0.0, 0.0]])
    grads = {"a": torch.ones(1, 8), "b": torch.full((1, 8), 3.0)}
    state = algorithm.update(algorithm.init({"a": w, "b": w}), grads, 0)
    assert (len(kept(state, "a")), len(kept(state, "b"))) == (3, 5)
    assert sf.checkpoint.tree_equal(
        algorithm.update(state, grads, 1).masks, state.masks
    )


def test_redistribution_brings_a_dense_start_to_the_total():
    algorithm = sf.snfs(0.75, drop_fraction=0.1, init="dense")
    params = {"a": torch.randn(4, 10), "b": torch.randn(4, 40)}
    state = algorithm.update(algorithm.init(params), params, 0)
    assert count(state) == 50


def test_redistribution_never_overfills_a_leaf_and_keeps_the_total():
    algorithm = sf.snfs(
        0.5, grow=sf.scores.momentum(0.5), drop_fraction=0.5, when=sf.always()
    )
    params = {"a": torch.randn(2, 3), "b": torch.randn(20, 20)}
    state = algorithm.init(params)
    total = count(state)
    for step in range(4):
        state = algorithm.update(
            state, {"a": torch.full((2, 3), 100.0), "b": torch.ones(20, 20)}, step
        )
        assert count(state) == total
    assert state.masks["a"].all()


def test_survivors_share_the_regrowth_of_dsr():
    # Mostafa & Wang 2019: survivors 30 and 10, 8 removed: 6 and 2 grow.
    def survivors(scores, before, after):
        return {path: mask.sum() for path, mask in after.items()}

    masks = {
        "a": torch.arange(50).reshape(5, 10) < 34,
        "b": torch.arange(50).reshape(5, 10) < 14,
    }
    algorithm = sf.set(
        0.52,
        drop_fraction=0.0,
        count=lambda fraction, active: torch.full_like(active, 4),
        redistribute=survivors,
        exclude_dropped=True,
        init=masks,
        when=sf.always(),
    )
    params = {path: torch.arange(50.0, 0.0, -1.0).reshape(5, 10) for path in masks}
    algorithm_state = algorithm.init(params)
    state = algorithm.update(algorithm_state, params, 0)
    assert {path: int(mask.sum()) for path, mask in state.masks.items()} == {
        "a": 36,
        "b": 12,
    }
    for path, survived in (("a", 30), ("b", 10)):
        assert state.masks[path].flatten()[:survived].all()
        assert not state.masks[path].flatten()[survived : survived + 4].any()


def test_grown_weights_start_where_they_are_told():
    # Deep rewiring (Bellec et al. 2018) starts them at a sign times epsilon.
    seen = []

    def epsilon(state, grown, step):
        seen.append((grown["w"].tolist(), grown["b"].tolist(), step))
        return optree.tree_map(lambda p: torch.full_like(p, -1e-12), state.params)

    algorithm = sf.rigl(
        0.5, drop_fraction=0.5, init="magnitude", grown=epsilon, when=sf.always()
    )
    state = algorithm.init({**row(4, 3, 2, 1), "b": torch.ones(2)})
    state = algorithm.update(state, {**row(0, 0, 9, 1), "b": torch.ones(2)}, 5)
    torch.testing.assert_close(
        state.params["w"], torch.tensor([[4.0, 0.0, -1e-12, 0.0]]), rtol=0, atol=0
    )
    assert state.params["b"].tolist() == [1.0, 1.0]
    assert seen == [([[False, False, True, False]], True, 5)]


def test_two_scores_with_memory_lie_by_their_roles():
    algorithm = sf.drop_grow(
        0.5,
        drop=sf.scores.ema(sf.scores.magnitude, 0.5),
        grow=sf.scores.momentum(0.5),
        init="magnitude",
        drop_fraction=0.5,
        when=sf.at([1]),
    )
    state = algorithm.update(algorithm.init(row(4, 2, 0, 0)), row(0, 0, 1, 2), 0)
    assert state.scores["drop"]["w"].tolist() == [[2.0, 1.0, 0.0, 0.0]]
    assert state.scores["grow"]["w"].tolist() == [[0.0, 0.0, 0.5, 1.0]]
    # The averages are 2.25 and 1.5 against weights of 2.5 and 2: it is the average that
    # competes.
    state = algorithm.update(
        sf.with_params(state, row(0.1, 4, 0, 0)), row(0, 0, 0, 0), 1
    )
    assert state.scores["drop"]["w"].tolist() == [[pytest.approx(1.05), 2.5, 0.0, 0.0]]
    assert kept(state) == {1, 3}


@pytest.mark.parametrize("pruned", ["keep", "train"])
def test_pruned_weights_may_stay_in_the_state(pruned):
    algorithm = sf.rigl(
        0.5, drop_fraction=0.5, init="magnitude", pruned=pruned, when=sf.always()
    )
    state = algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(0, 0, 0, 9), 0)
    assert state.params["w"].tolist() == [[4.0, 3.0, 2.0, 0.0]]
    assert sf.effective(state)["w"].tolist() == [[4.0, 0.0, 0.0, 0.0]]


def test_gradients_that_are_not_numbers_grow_last():
    nan, inf = float("nan"), float("inf")
    algorithm = sf.rigl(0.5, drop_fraction=1.0, init="magnitude")
    state = algorithm.init(row(4, 3, 2, 1))
    assert kept(algorithm.update(state, row(nan, 0, -inf, 0.1), 0)) == {2, 3}
    assert kept(algorithm.update(state, row(nan, nan, nan, nan), 0)) == {0, 1}


def constant_fan_in(w, g, mask, fraction, gamma=0.3):
    """One update of SRigL on one matrix, Lasby et al. 2024, with counts that are
    tensors throughout.
    """
    rows, total = mask.shape[0], mask.sum()
    n_prune = torch.floor(fraction * total).long()
    salient = sf.masks.topk_mask(w.abs(), total - n_prune) | sf.masks.topk_mask(
        g.abs(), n_prune
    )
    least = torch.floor(gamma * (total // rows)).long().clamp(min=1)
    alive = salient.sum(1) >= least
    fan_in = total // alive.sum()
    kept = (
        sf.masks.topk_mask(
            torch.where(alive[:, None], w.abs(), -torch.inf), total - n_prune
        )
        & alive[:, None]
    )
    wanted = torch.where(alive, fan_in, 0)
    trimmed = sf.masks.drop_lowest(
        w, kept, (kept.sum(1) - wanted).clamp(min=0), pattern=sf.patterns.row_balanced()
    )
    return sf.masks.grow_highest(
        g.abs(), trimmed, wanted - trimmed.sum(1), pattern=sf.patterns.row_balanced()
    )


def test_counts_of_groups_may_be_tensors_as_in_srigl():
    w = torch.tensor(
        [
            [5.0, 4.0, 0.0, 0.0],
            [1.0, 0.9, 0.0, 0.0],
            [0.1, 0.2, 0.0, 0.0],
            [6.0, 0.0, 2.5, 0.0],
        ]
    )
    g = torch.tensor(
        [
            [0.0, 0.0, 9.0, 8.0],
            [0.0, 0.0, 0.7, 0.2],
            [0.0, 0.0, 0.05, 0.04],
            [0.0, 0.3, 0.0, 0.6],
        ]
    )
    fractions = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    masks = [constant_fan_in(w, g, w != 0, fraction) for fraction in fractions]
    # Salient counts 4, 1, 0, 3: row 2 is ablated and the others keep 8 // 3 = 2.
    assert [set(line.nonzero().flatten().tolist()) for line in masks[0]] == [
        {0, 1},
        {2, 3},
        set(),
        {0, 2},
    ]
    batch = torch.func.vmap(lambda fraction: constant_fan_in(w, g, w != 0, fraction))(
        fractions
    )
    assert torch.equal(batch, torch.stack(masks))


def test_a_weight_that_is_dropped_and_grows_back_may_start_anew():
    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", restart_dropped=True)
    state = algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(0, 9, 0, 0), 0)
    assert kept(state) == {0, 1}
    assert state.params["w"].tolist() == [[4.0, 0.0, 0.0, 0.0]]


def test_it_starts_where_grown_weights_do_and_its_moments_at_zero():
    def ones(state, grown, step):
        return optree.tree_map(torch.ones_like, state.params)

    for reset in (True, False):
        algorithm = sf.rigl(
            0.5,
            drop_fraction=0.5,
            init="magnitude",
            restart_dropped=True,
            grown=ones,
            when=sf.at([1]),
        )
        algorithm = sf.with_optimizer(
            algorithm, sf.optimizers.sgd(0.0, momentum=0.5), reset_grown=reset
        )
        state = algorithm.init(row(4, 3, 2, 1))
        for step in range(2):
            state = algorithm.update(state, row(1, 9, 0, 0), step)
        assert state.params["w"].tolist() == [[4.0, 1.0, 0.0, 0.0]]
        assert state.opt.momentum["w"].tolist() == [
            [1.5, 0.0 if reset else 13.5, 0.0, 0.0]
        ]


def test_excluding_the_dropped_where_nothing_is_free_drops_nothing():
    for fraction in (0.5, 1.0):
        algorithm = sf.rigl(
            0.0, drop_fraction=fraction, exclude_dropped=True, when=sf.always()
        )
        assert kept(
            algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(1, 1, 1, 1), 0)
        ) == {0, 1, 2, 3}


def test_every_leaf_starts_its_dropped_weights_anew():
    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", restart_dropped=True)
    params = {path: row(4, 3, 2, 1)["w"] for path in "abc"}
    state = algorithm.update(
        algorithm.init(params), {path: row(0, 9, 0, 0)["w"] for path in params}, 0
    )
    for path in params:
        assert kept(state, path) == {0, 1}
        assert state.params[path].tolist() == [[4.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("restart", [False, True])
def test_a_dropped_block_keeps_the_best_of_what_it_had(restart):
    # Of four blocks two are whole and the others lose two of four. The second goes and
    # the last comes.
    algorithm = sf.rigl(
        0.5,
        drop_fraction=0.5,
        pattern=sf.patterns.block((1, 4), zeros=2),
        init="magnitude",
        restart_dropped=restart,
    )
    state = algorithm.init(row(9, 8, 7, 6, 5, 5, 5, 5, 1, 4, 2, 3, 0.1, 0.4, 0.3, 0.2))
    assert kept(state) == {0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 14}
    grads = row(*[0] * 8, *[1] * 4, *[2] * 4)
    assert kept(algorithm.update(state, grads, 0)) == {
        0,
        1,
        2,
        3,
        4,
        5,
        9,
        11,
        12,
        13,
        14,
        15,
    }
    # What a pruned block has left stays where it was, though all of it be zero.
    zeroed = sf.with_params(
        state, row(9, 8, 7, 6, 5, 5, 5, 5, 0, 0, 0, 0, 0.1, 0.4, 0.3, 0.2)
    )
    assert kept(algorithm.update(zeroed, grads, 0)) == {
        0,
        1,
        2,
        3,
        4,
        5,
        9,
        11,
        12,
        13,
        14,
        15,
    }


def test_what_a_pruned_block_has_left_keeps_its_weights_where_all_scores_tie():
    def alike(state, grads, step):
        return optree.tree_map(torch.ones_like, state.params)

    pattern = sf.patterns.block((1, 4), zeros=2)
    options = {
        "drop_fraction": 0.5,
        "pattern": pattern,
        "init": "magnitude",
        "restart_dropped": True,
    }
    algorithm = sf.drop_grow(0.5, drop=alike, grow=sf.scores.gradient, **options)
    state = algorithm.init(row(9, 8, 7, 6, 5, 5, 5, 5, 1, 4, 2, 3, 0.1, 0.4, 0.3, 0.2))
    state = algorithm.update(state, row(*[0] * 8, *[1] * 4, *[2] * 4), 0)
    assert state.params["w"][0, 8:12].tolist() == [0.0, 4.0, 0.0, 3.0]


def test_leaves_over_and_under_their_targets_are_brought_there():
    masks = {"a": row(1, 1, 1, 0)["w"] > 0, "b": row(1, 0, 0, 0)["w"] > 0}
    algorithm = sf.rigl(0.5, drop_fraction=0.0, init=masks)
    params = {path: row(4, 3, 2, 1)["w"] for path in masks}
    state = algorithm.update(algorithm.init(params), params, 0)
    assert (kept(state, "a"), kept(state, "b")) == ({0, 1}, {0, 1})


def test_a_rounding_rule_may_be_any_function_of_a_leaf():
    params = {
        "a": torch.arange(20.0).reshape(2, 10) + 1,
        "b": torch.arange(30.0).reshape(3, 10) + 1,
    }
    grads = {path: -leaf for path, leaf in params.items()}
    asked = []

    def at_most_two(fraction, active):
        asked.append((fraction, tuple(active.shape)))
        return min(int(fraction * active), 2)

    rigl = sf.rigl(
        0.5, drop_fraction=0.3, count=at_most_two, init="magnitude", when=sf.always()
    )
    before = rigl.init(params)
    after = rigl.update(before, grads, 0).masks
    assert asked == [(0.3, (1,)), (0.3, (1,))]
    exact = sf.rigl(
        0.5,
        drop_fraction=0.3,
        count=lambda f, n: torch.full_like(n, 2),
        init="magnitude",
        when=sf.always(),
    )
    assert sf.checkpoint.tree_equal(after, exact.update(before, grads, 0).masks)


def test_redistribution_may_rate_some_leaves_only():
    plan = sf.redistribute.Redistribute(
        sf.redistribute.lost, rate=lambda fraction, scores, masks: {"a": 0.0}
    )
    params = {"a": torch.randn(4, 10), "b": torch.randn(4, 10)}
    algorithm = sf.set(
        0.5,
        drop_fraction=0.4,
        redistribute=plan,
        init="magnitude",
        key=sf.random.key(0),
    )
    state = algorithm.init(params)
    new = algorithm.update(state, params, 0)
    assert torch.equal(new.masks["a"], state.masks["a"]) and not torch.equal(
        new.masks["b"], state.masks["b"]
    )


def test_grow_count_sees_the_sizes_of_scores_and_who_is_free():
    seen = []

    def as_wanted(*args):
        seen.append(args)
        return args[2]

    rigl = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", grow_count=as_wanted)
    state = rigl.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    state = rigl.update(state, {"w": torch.tensor([[-1.0, 5.0, -7.0, 2.0]])}, 0)
    ((scores, free, wanted),) = seen
    assert scores.tolist() == [[1.0, 5.0, 7.0, 2.0]]
    assert free.tolist() == [[False, True, True, True]] and wanted.tolist() == [1]
    assert state.masks["w"].tolist() == [[True, False, True, False]]


def test_excluded_weights_are_no_room_for_regrowth_between_leaves():
    algorithm = sf.rigl(
        0.25,
        drop_fraction=0.3,
        exclude_dropped=True,
        redistribute=sf.redistribute.mean_active,
        init="magnitude",
    )
    params = {
        "a": torch.arange(20.0).reshape(2, 10) + 1,
        "b": torch.arange(20.0).reshape(2, 10) + 1,
    }
    before = algorithm.init(params)
    # all would grow in b, which has 5 free places
    grads = {"a": torch.ones(2, 10), "b": 100 * torch.ones(2, 10)}
    after = algorithm.update(before, grads, 0)
    # 8 were dropped: 5 to b, 3 back to a
    assert [int(mask.sum()) for mask in after.masks.values()] == [14, 16]
    for path, mask in after.masks.items():
        lost = before.masks[path] & (after.params[path] == 0)
        assert not (mask & lost).any()


def test_nothing_to_sparsify_is_left_alone():
    algorithm = sf.rigl(0.5, where=lambda path, leaf: path == "w")
    with pytest.warns(UserWarning, match="where"):
        state = algorithm.init({"b": torch.ones(3)})
    assert sf.checkpoint.tree_equal(
        algorithm.update(state, {"b": torch.ones(3)}, 0), state
    )


@pytest.mark.parametrize(
    "make", [sf.rigl, sf.set, sf.snfs], ids=lambda make: make.__name__
)
def test_leaves_at_once_have_the_states_of_each_by_itself(make, monkeypatch):
    # What a device does, on the CPU: competitions, draws and elementwise work of all
    # leaves are one.
    draw = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=draw)
        for name, shape in (("a", (9, 4)), ("b", (5, 7)), ("c", (3, 2)))
    }
    algorithm = make(0.5, key=sf.random.key(3), drop_fraction=0.4)

    def run():
        state = algorithm.init(params)
        for step in range(0, 300, 100):
            state = algorithm.update(
                state, {path: x * step for path, x in params.items()}, step
            )
        return state

    want = run()
    seen = []
    monkeypatch.setattr(dispatch, "_in_memory", lambda *given: seen.append(1))
    monkeypatch.setattr(batches, "takes", lambda entries: True)
    monkeypatch.setattr(lists, "pays", lambda tensors: True)
    monkeypatch.setattr(leafwise, "_words", lambda *tensors: None)
    monkeypatch.setattr(leaf_draws, "pays", lambda tensors: True)
    assert sf.checkpoint.tree_equal(run(), want) and seen
