"""Dynamic sparse training: `drop_grow`, `set`, `rigl`, `snfs`, and rules of other
papers.
"""

import inspect
import pydoc

import optree
import pytest
import torch
from single_rows import count, kept, row

import sparsefn as sf


def test_rigl_drops_the_smallest_weights_and_grows_the_largest_gradients():
    # 4 of 8 active, drop half: 2 and 3 go, 7 and 4 come.
    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude")
    state = algorithm.init(row(8, -7, 6, -5, 4, 3, 2, 1))
    assert kept(state) == {0, 1, 2, 3}
    state = algorithm.update(state, row(0, 0, 0, 0, -3, 2, 1, 4), 0)
    assert kept(state) == {0, 1, 4, 7}
    assert state.params["w"].tolist() == [[8.0, -7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_the_drop_fraction_may_be_a_schedule_or_a_tensor():
    params, grads = row(8, 7, 6, 5, 4, 3, 2, 1), row(0, 0, 0, 0, 4, 3, 2, 1)
    decay = sf.rigl(
        0.5,
        drop_fraction=sf.schedules.cosine_decay(1.0, 2),
        init="magnitude",
        when=sf.always(),
    )
    for step, expected in ((0, {4, 5, 6, 7}), (1, {0, 1, 4, 5}), (2, {0, 1, 2, 3})):
        assert kept(decay.update(decay.init(params), grads, step)) == expected
    fixed = sf.rigl(0.5, drop_fraction=torch.tensor(0.5), init="magnitude")
    assert kept(fixed.update(fixed.init(params), grads, 0)) == {0, 1, 4, 5}


def test_between_triggers_nothing_is_done():
    algorithm = sf.rigl(0.5, when=sf.every(10, start=10), init="magnitude")
    state = algorithm.init(row(8, 7, 6, 5, 4, 3, 2, 1))
    assert all(
        algorithm.update(state, state.params, step) is state for step in range(10)
    )
    assert kept(algorithm.update(state, row(*range(8)), 10)) != kept(state)


def wanted(pattern):
    """The count of each group at half the sparsity."""
    return {"n": (None,), "c": (3,), "r": (4,), "i": (6,), "o": (12,)}[str(pattern)[0]]


def test_set_grows_at_random_by_key_path_and_step():
    params = {"w": torch.randn(8, 8)}

    def grown(step=0, seed=0, tree=params):
        algorithm = sf.set(
            0.5,
            drop_fraction=0.5,
            init="magnitude",
            key=sf.random.key(seed),
            when=sf.always(),
        )
        state = algorithm.init(tree)
        new = algorithm.update(state, tree, step)
        assert int(new.masks["w"].sum()) == 32
        lowest = (
            state.params["w"]
            .abs()
            .masked_fill(~state.masks["w"], torch.inf)
            .flatten()
            .argsort()[:16]
        )
        stayed = state.masks["w"].flatten().index_fill(0, lowest, False)
        assert (new.masks["w"].flatten() | ~stayed).all()
        return kept(new)

    assert grown() == grown()
    assert grown() == grown(tree={"0": torch.ones(3, 3), **params})
    assert len({grown(), grown(step=1), grown(seed=1)}) == 3


def test_snfs_keeps_a_moving_average_of_the_dense_gradient():
    # Decay .5, gradients 1 then 0: .5, .25, without bias correction, and through a save
    # in between.
    algorithm = sf.snfs(0.5, grow=sf.scores.momentum(0.5), when=sf.at([9]))
    state = algorithm.update(algorithm.init(row(1, 2)), row(1, 1), 0)
    assert state.scores["grow"]["w"].tolist() == [[0.5, 0.5]]
    state = sf.checkpoint.load_state_dict(
        algorithm.init(row(0, 0)), sf.checkpoint.state_dict(state)
    )
    assert algorithm.update(state, row(0, 0), 1).scores["grow"]["w"].tolist() == [
        [0.25, 0.25]
    ]


def test_snfs_moves_regrowth_to_leaves_of_large_momentum():
    # 2 dropped in each leaf; means over the active are 1 and 3, so of the 4 one goes to
    # a and three to b.
    algorithm = sf.snfs(
        0.5, grow=sf.scores.momentum(0.5), drop_fraction=0.5, init="magnitude"
    )
    w = torch.tensor([[8.0, 7.0, 6.0, 5.0, 0.0, 0.0, 0.0, 0.0]])
    state = algorithm.init({"a": w, "b": w})
    grads = {
        "a": 1 + torch.arange(8.0)[None] / 100,
        "b": 3 + torch.arange(8.0)[None] / 100,
    }
    state = algorithm.update(state, grads, 0)
    assert (kept(state, "a"), kept(state, "b")) == ({0, 1, 7}, {0, 1, 5, 6, 7})


def changes(algorithm, steps):
    """{step: how many weights were exchanged} of the steps at which masks changed."""
    params = {"w": torch.arange(400.0).reshape(20, 20).cos()}
    state, seen = algorithm.init(params), {}
    for step in range(steps):
        # The pruned weights have the largest gradients, so that all that is dropped is
        # exchanged.
        grads = {"w": torch.where(state.masks["w"], 0.0, 1.0 + params["w"].abs())}
        new = algorithm.update(state, grads, step)
        if new is not state:
            seen[step] = int((state.masks["w"] & ~new.masks["w"]).sum())
        state = new
    return seen


@pytest.mark.parametrize("preset", [sf.rigl, sf.set])
def test_masks_change_every_100_steps_unless_the_caller_says_otherwise(preset):
    kept = {"init": "magnitude", "exclude_dropped": True}
    assert changes(preset(0.5, **kept), 301) == dict.fromkeys((0, 100, 200, 300), 60)
    assert changes(preset(0.5, when=sf.at([3]), **kept), 5) == {3: 60}
    assert changes(preset(0.5, drop_fraction=0.1, **kept), 101) == {0: 20, 100: 20}


@pytest.mark.parametrize(
    ("steps", "period", "stop"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (3, 1, 2),
        (100, 1, 75),
        (250, 2, 187),
        (1000, 10, 750),
        (10_000, 100, 7500),
        (90_000, 100, 67_500),
    ],
)
def test_the_length_of_a_run_gives_the_period_the_end_and_the_decay(
    steps, period, stop
):
    params = {"w": torch.arange(400.0).reshape(20, 20).cos()}
    grads = {"w": torch.arange(400.0).reshape(20, 20).sin()}
    ours = sf.rigl(0.5, steps=steps, init="magnitude")
    told = sf.rigl(
        0.5,
        when=sf.every(period, stop=stop),
        drop_fraction=sf.schedules.cosine_decay(0.3, stop),
        init="magnitude",
    )
    for step in {
        0,
        1,
        period,
        period + 1,
        stop // 2 // period * period,
        stop - 1,
        stop,
        steps - 1,
        steps,
    }:
        state = ours.init(params)
        assert sf.checkpoint.tree_equal(
            ours.update(state, grads, step), told.update(state, grads, step)
        )
        if step >= stop or step % period:
            assert ours.update(state, grads, step) is state


def test_what_is_given_goes_before_what_follows_from_the_length():
    kept = {"init": "magnitude", "exclude_dropped": True}
    seen = changes(sf.rigl(0.5, steps=400, when=sf.every(150), **kept), 400)
    # 0.3 of 200, then half of it, and none from three quarters on
    assert seen == {0: 60, 150: 30, 300: 0}
    assert changes(
        sf.rigl(0.5, steps=400, drop_fraction=0.1, **kept), 400
    ) == dict.fromkeys(range(0, 300, 4), 20)


def test_every_preset_takes_the_length():
    for preset in (sf.set, sf.rigl, sf.snfs):
        state = preset(0.5, steps=1000, init="magnitude").init(row(4, 3, 2, 1))
        assert kept(state) == {0, 1}


def test_mest_drops_by_weight_and_gradient_and_goes_down_and_up():
    # Yuan et al. 2021, lambda 1: |w| + |g| of w = [.1, .2], g = [.5, 0] drops index 1.
    def mest(state, grads, step):
        return optree.tree_map(lambda w, g: w.abs() + g.abs(), state.params, grads)

    algorithm = sf.drop_grow(
        0.5,
        drop=mest,
        grow=sf.scores.random,
        drop_fraction=0.5,
        exclude_dropped=True,
        init="magnitude",
    )
    state = algorithm.update(algorithm.init(row(0.1, 0.2, 0, 0)), row(0.5, 0, 0, 0), 0)
    assert 0 in kept(state)
    assert 1 not in kept(state)

    # 100 weights: 10 -> 8 -> 10; at a fraction of 0 the update changes nothing.
    params = {"w": torch.randn(10, 10)}
    for fraction, new_ones in ((0.2, 2), (0.0, 0)):
        options = {"drop": mest, "grow": sf.scores.random, "exclude_dropped": True}
        algorithm = sf.drop_grow(0.9, drop_fraction=fraction, **options)
        state = algorithm.init(params)
        new = algorithm.update(state, params, 0)
        assert count(new) == 10
        assert int((new.masks["w"] & ~state.masks["w"]).sum()) == new_ones


def test_fired_weights_are_a_score_with_memory():
    # Liu et al. 2021 (ITOP): masks {0, 1} then {1, 2} of 4: the explored share is .75,
    # and 3 grows first.
    fired = sf.Accumulated(
        init=lambda params: optree.tree_map(
            lambda p: torch.zeros_like(p, dtype=torch.bool), params
        ),
        accumulate=lambda memory, state, grads, step: optree.tree_map(
            torch.logical_or, memory, state.masks
        ),
        value=lambda memory, state, grads, step: optree.tree_map(
            lambda m: (~m).float(), memory
        ),
    )
    algorithm = sf.drop_grow(
        0.5,
        drop=sf.scores.gradient,
        grow=fired,
        drop_fraction=0.5,
        exclude_dropped=True,
        init="magnitude",
        when=sf.always(),
    )
    state = algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(1, 2, 0, 0), 0)
    assert (kept(state), state.scores["grow"]["w"].tolist()) == (
        {1, 2},
        [[True, True, False, False]],
    )
    state = algorithm.update(state, row(0, 1, 2, 0), 1)
    assert state.scores["grow"]["w"].float().mean() == 0.75
    assert kept(state) == {2, 3}


def paths_of_length_3(state, grads, step):
    """The CH3-L3 score of Zhang et al. 2024: where links would close many short
    paths.
    """

    def half(m):
        common = m @ m.T
        outside = (m.sum(1)[None] - common).clamp(min=1)
        return torch.where(common > 0, 1 / outside, 0.0) @ m

    def leaf(mask):
        m = mask.float()
        return torch.where(mask, 0.0, half(m) + half(m.T).T)

    return optree.tree_map(leaf, state.masks)


def test_growth_may_follow_the_topology_alone():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]]) == 1
    scores = paths_of_length_3(sf.State({}, {"w": mask}), (), 0)["w"]
    assert scores.tolist() == [
        [0.0, 0.0, 0.0, 1.5],
        [2.5, 0.0, 0.0, 1.5],
        [1.0, 2.5, 0.0, 0.0],
    ]
    params = {
        "w": torch.tensor(
            [[0.1, 9.0, 8.0, 0.0], [0.0, 7.0, 6.0, 0.0], [0.0, 0.0, 0.2, 5.0]]
        )
    }
    algorithm = sf.drop_grow(
        "current",
        drop=sf.scores.magnitude,
        grow=paths_of_length_3,
        drop_fraction=2 / 7,
        exclude_dropped=True,
        init={"w": mask},
    )
    state = algorithm.update(algorithm.init(params), params, 0)
    assert kept(state) == {1, 2, 4, 5, 6, 9, 11}


def test_how_many_grow_may_be_a_rule_of_ones_own():
    def two_less(scores, free, wanted):
        assert (scores.shape, free.shape, wanted.shape) == ((1, 8), (1, 8), (1,))
        return wanted - 2

    algorithm = sf.rigl(0.5, drop_fraction=1.0, init="magnitude", grow_count=two_less)
    state = algorithm.update(
        algorithm.init(row(8, 7, 6, 5, 4, 3, 2, 1)), row(1, 2, 3, 4, 5, 6, 7, 8), 0
    )
    assert kept(state) == {6, 7}


def test_an_optimizers_moments_are_scores():
    # Growth where Adam's |m| / (sqrt(v) + eps) is largest; its moments are kept where
    # weights are pruned.
    def ratio(state, grads, step):
        return optree.tree_map(
            lambda m, v: m.abs() / (v.sqrt() + 1e-8), state.opt.mu, state.opt.nu
        )

    algorithm = sf.drop_grow(
        0.5,
        drop=sf.scores.magnitude,
        grow=ratio,
        drop_fraction=0.5,
        init="magnitude",
        when=sf.at([2]),
    )
    algorithm = sf.with_optimizer(
        sf.with_dense_gradients(algorithm), sf.optimizers.adam(0.0)
    )
    state = algorithm.init(row(4, 3, 2, 1))
    # The third has a small steady gradient, the second and the fourth one that changes
    # its sign.
    for step, sign in enumerate((1, -1, 1)):
        state = algorithm.update(state, row(1, sign, 0.1, 9 * sign), step)
    assert kept(state) == {0, 2}


def test_a_pattern_that_fixes_the_sparsity_needs_none():
    algorithm = sf.rigl(
        None,
        drop_fraction=0.5,
        pattern=sf.patterns.nm(2, 4),
        init="magnitude",
        when=sf.always(),
    )
    state = algorithm.update(algorithm.init(row(4, 3, 2, 1)), row(0, 0, 0, 9), 0)
    assert kept(state) == {0, 3}


def test_scores_may_decide_the_target_among_what_may_be_kept():
    # Every row that a chain leaves open gets three weights; of the gradients, not of
    # the weights, above a threshold.
    def three(scores, free, step):
        return free.any(-1) * 3

    rows = sf.from_masks({"w": torch.tensor([[True] * 4, [False] * 4, [True] * 4])})
    target = {
        "pattern": sf.patterns.row_balanced(),
        "drop_fraction": 0.0,
        "init": "dense",
        "when": sf.always(),
    }
    algorithm = sf.chain(rows, sf.rigl(sf.counts.Counted(three), **target))
    weights = {"w": torch.arange(1.0, 13.0).reshape(3, 4)}
    state = algorithm.update(algorithm.init(weights), weights, 0)
    assert state.masks["w"].int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]]
    above = sf.rigl(
        sf.counts.above(2.5),
        drop_fraction=1.0,
        init={"w": torch.arange(8) < 2},
        where="*",
    )
    state = above.update(
        above.init({"w": torch.ones(8)}),
        {"w": torch.tensor([0.0, 1, 2, 3, 4, 5, 1, 3])},
        0,
    )
    assert state.masks["w"].nonzero().flatten().tolist() == [3, 4, 5, 7]


def test_a_target_by_scores_needs_masks_to_start_from():
    with pytest.raises(ValueError, match="init='random' needs a sparsity"):
        sf.rigl(sf.counts.above(0.5)).init({"w": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="expected distribution to be uniform"):
        sf.rigl(sf.counts.above(0.5), distribution=sf.budgets.erk())


# ---- the presets' keywords -----------------------------------------------------------


@pytest.mark.parametrize("preset", [sf.rigl, sf.set, sf.snfs])
def test_help_and_editors_see_every_keyword_and_its_default(preset):
    found, base = (
        inspect.signature(preset).parameters,
        inspect.signature(sf.drop_grow).parameters,
    )
    assert list(found) == list(base)
    assert not any(p.kind is p.VAR_KEYWORD for p in found.values())
    assert found["drop"].default is sf.scores.magnitude
    assert all(
        found[name].default is base[name].default
        for name in found
        if name in base and name not in OWN
    )
    text = pydoc.plain(pydoc.render_doc(preset))
    assert all(
        f"{name}: " in text
        for name in ("steps", "when", "drop_fraction", "distribution")
    )
    assert "**options" not in text


OWN = {"drop", "grow", "redistribute"}


def test_the_defaults_shown_are_those_of_the_presets():
    params = {
        "w": torch.arange(400.0).reshape(20, 20).cos(),
        "v": torch.arange(400.0).reshape(20, 20).sin(),
    }
    for preset in (sf.rigl, sf.set, sf.snfs):
        shown = {
            n: p.default
            for n, p in inspect.signature(preset).parameters.items()
            if p.default is not p.empty
        }
        states = []
        for algorithm in (preset(0.5), sf.drop_grow(0.5, **shown)):
            states.append(algorithm.update(algorithm.init(params), params, 0))
        assert sf.checkpoint.tree_equal(*states)
