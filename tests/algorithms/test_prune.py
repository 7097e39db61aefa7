"""Pruning by score: `one_shot`, `gmp`, `iterative`, `ste`, and the published methods
they compose to.
"""

import re

import optree
import pytest
import torch

import sparsefn as sf


def row(*values):
    return {"w": torch.tensor([values], dtype=torch.float32)}


def kept(state, path="w"):
    """Indices of the kept weights of one leaf."""
    return set(state.masks[path].flatten().nonzero().flatten().tolist())


def counts(state):
    return {path: int(mask.sum()) for path, mask in state.masks.items()}


# ---- one_shot: pruning before training -----------------------------------------------


def test_snip_keeps_the_largest_weight_times_gradient():
    # Lee et al. 2019: |w * g| = [.2, .4, .5, .15]; by magnitude it would be {0, 3}.
    params, grads = row(2, -1, 0.5, 3), row(0.1, -0.4, 1, -0.05)
    algorithm = sf.one_shot(0.5, score=sf.scores.saliency)
    state = algorithm.init(params)
    assert state.masks["w"].all()
    assert kept(algorithm.update(state, grads, 0)) == {1, 2}
    assert kept(sf.one_shot(0.5).update(state, grads, 0)) == {0, 3}
    assert algorithm.update(state, grads, 1) is state


def test_snip_over_batches_sums_before_the_absolute_value():
    # Gradients g and -g cancel: all scores are 0 and the lower index wins. Summing |w *
    # g| gives {1, 2}.
    params, grads = row(2, -1, 0.5, 3), row(0.1, -0.4, 1, -0.05)
    signed = sf.scores.sum(sf.scores.movement)
    total = signed._replace(
        value=lambda *args: optree.tree_map(torch.abs, signed.value(*args))
    )
    for score, expected in (
        (total, {0, 1}),
        (sf.scores.sum(sf.scores.saliency), {1, 2}),
    ):
        algorithm = sf.one_shot(0.5, score=score, when=sf.at([1]))
        state = algorithm.update(algorithm.init(params), grads, 0)
        assert state.masks["w"].all()
        assert (
            kept(algorithm.update(state, optree.tree_map(torch.neg, grads), 1))
            == expected
        )


@pytest.mark.parametrize(("regrow", "expected"), [(True, {3}), (False, {2})])
def test_force_lets_pruned_weights_return_and_iterative_snip_does_not(regrow, expected):
    # de Jorge et al. 2021: the second scores are [.9, .02, .6, 1.2], and 3 was pruned
    # first.
    algorithm = sf.one_shot(
        lambda step: 0.5 if step == 0 else 0.75,
        score=sf.scores.saliency,
        when=sf.every(1, stop=2),
        distribution=sf.budgets.global_(),
        pruned="keep",
        regrow=regrow,
    )
    params = row(1, 2, 3, 4)
    state = algorithm.update(algorithm.init(params), row(0.1, 0.3, 0.21, 0.05), 0)
    assert kept(state) == {1, 2}
    state = algorithm.update(state, row(0.9, 0.01, 0.2, 0.3), 1)
    assert kept(state) == expected
    assert sf.checkpoint.tree_equal(state.params, params)


def test_exponential_schedule_of_kept_fractions():
    # Kept fraction .01 in 2 rounds: .1, then .01.
    algorithm = sf.one_shot(
        lambda step: 1 - 0.01 ** ((step + 1) / 2), when=sf.every(1, stop=2)
    )
    state = algorithm.init({"w": torch.arange(100.0).reshape(10, 10)})
    seen = []
    for step in range(3):
        state = algorithm.update(state, state.params, step)
        seen.append(int(state.masks["w"].sum()))
    assert seen == [10, 1, 1]


def test_grasp_takes_the_hessian_gradient_product_for_its_gradient():
    # Wang et al. 2020, on L = w'Aw/2: g = [1, -2], Hg = [0, -5], scores w * Hg = [0, 5]
    # of sum |g|^2.
    a, w = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, -1.0])
    gradient = torch.func.grad(lambda x: 0.5 * x @ a @ x)
    g = gradient(w)
    product = torch.func.jvp(gradient, (w,), (g,))[1]
    assert g.tolist() == [1.0, -2.0]
    assert product.tolist() == [0.0, -5.0]
    assert float(w @ product) == float(g @ g) == 5.0
    algorithm = sf.one_shot(
        0.5,
        score=lambda state, grads, step: {"w": state.params["w"] * grads["w"]},
        where="w",
    )
    assert kept(algorithm.update(algorithm.init({"w": w}), {"w": product}, 0)) == {1}


def test_synaptic_flow_has_equal_sums_in_every_layer():
    # Tanaka et al. 2020: scores |w| * dR/d|w| with all weights and inputs positive.
    params = {
        "0": torch.tensor([[1.0, -2.0], [3.0, 0.0]]),
        "1": torch.tensor([[-1.0, 2.0]]),
    }
    flow = torch.func.grad(lambda p: (p["1"] @ (p["0"] @ torch.ones(2))).sum())
    grads = flow(optree.tree_map(torch.abs, params))
    scores = sf.scores.saliency(sf.State(params, {}), grads, 0)
    assert scores["0"].tolist() == [[1.0, 2.0], [6.0, 0.0]]
    assert scores["1"].tolist() == [[3.0, 6.0]]
    algorithm = sf.one_shot(
        0.5, score=sf.scores.saliency, distribution=sf.budgets.global_()
    )
    state = algorithm.update(algorithm.init(params), grads, 0)
    assert (kept(state, "0"), kept(state, "1")) == ({2}, {0, 1})


# ---- lottery tickets -----------------------------------------------------------------


@pytest.mark.parametrize("global_", [False, True])
def test_iterative_pruning_takes_a_fraction_of_what_remains(global_):
    distribution = sf.budgets.global_() if global_ else sf.budgets.uniform()
    algorithm = sf.iterative(0.2, when=sf.every(5), distribution=distribution)
    params = {"w": torch.arange(100.0).reshape(10, 10) + 1}
    state, seen = algorithm.init(params), []
    for step in range(26):
        before = state.masks["w"]
        state = algorithm.update(state, state.params, step)
        assert not (state.masks["w"] & ~before).any()
        if step % 5 == 0:
            seen.append(int(state.masks["w"].sum()))
    assert seen == [80, 64, 51, 41, 33, 26]
    assert kept(state) == set(range(74, 100))


def test_iterative_pruning_counts_per_leaf_or_in_total():
    params = {
        "a": torch.arange(10.0).reshape(2, 5) + 1,
        "b": torch.arange(10.0).reshape(2, 5) + 100,
    }
    for distribution, expected in (
        (sf.budgets.uniform(), {"a": 5, "b": 5}),
        (sf.budgets.global_(), {"a": 0, "b": 10}),
        (sf.budgets.global_(floor=0.2), {"a": 2, "b": 8}),
    ):
        algorithm = sf.iterative(0.5, when=sf.at([0]), distribution=distribution)
        assert counts(algorithm.update(algorithm.init(params), params, 0)) == expected


def test_the_fraction_may_be_a_schedule_or_a_tensor():
    params = {"w": torch.arange(100.0).reshape(10, 10) + 1}
    for fraction in (
        sf.schedules.constant(0.2),
        torch.tensor(0.2, dtype=torch.float64),
    ):
        algorithm = sf.iterative(fraction, when=sf.always())
        state = algorithm.init(params)
        for step in range(3):
            state = algorithm.update(state, params, step)
        assert int(state.masks["w"].sum()) == 51


def test_a_count_is_pruned_at_each_trigger():
    params = {
        "a": torch.arange(10.0).reshape(2, 5) + 1,
        "b": torch.arange(10.0).reshape(2, 5) + 100,
    }
    for options, expected in (
        ({"count": 3}, {"a": 4, "b": 4}),
        ({"count": torch.tensor(3)}, {"a": 4, "b": 4}),
        ({"count": 3, "distribution": sf.budgets.global_()}, {"a": 4, "b": 10}),
        ({"count": 1, "pattern": sf.patterns.row_balanced()}, {"a": 6, "b": 6}),
        ({"count": 1, "pattern": sf.patterns.channel(1)}, {"a": 6, "b": 6}),
        (
            {
                "fraction": 0.25,
                "count": lambda fraction, active: (fraction * active).ceil().long(),
            },
            {"a": 5, "b": 5},
        ),
    ):
        algorithm = sf.iterative(when=sf.always(), **options)
        state = algorithm.init(params)
        for step in range(2):
            state = algorithm.update(state, params, step)
        assert counts(state) == expected, options


def test_a_count_of_a_tensor_is_clamped_to_what_remains():
    params = row(1, 2, 3, 4)
    algorithm = sf.iterative(count=torch.tensor(9))
    assert kept(algorithm.update(algorithm.init(params), params, 0)) == set()


def test_counts_differ_between_members_of_an_ensemble():
    params = row(1, 2, 3, 4)

    def pruned(count):
        algorithm = sf.iterative(count=count)
        return algorithm.update(algorithm.init(params), params, 0).masks["w"]

    assert torch.func.vmap(pruned)(torch.tensor([1, 3, 9])).sum((1, 2)).tolist() == [
        3,
        1,
        0,
    ]


@pytest.mark.deep
@pytest.mark.parametrize("count", [3, torch.tensor(3)])
def test_counts_compile(count):
    params = row(1, -2, 3, -4, 5)
    algorithm = sf.iterative(count=count, when=sf.every(2))
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    states = [algorithm.init(params)] * 2
    for step in range(2):
        states = [
            algorithm.update(states[0], params, step),
            compiled(states[1], params, torch.tensor(step)),
        ]
        assert sf.checkpoint.tree_equal(*states)
    assert kept(states[1]) == {3, 4}


def test_rewinding_puts_early_weights_under_the_late_mask():
    # Frankle & Carbin 2019: after a level, the weights of step k under the new mask.
    early, late = row(5, -4, 3, 2), row(0.1, 4, -3, 0.2)
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9)
    algorithm = sf.with_optimizer(
        sf.iterative(0.5, when=sf.at([1])), optimizer, skip=sf.at([1]), reset=sf.at([1])
    )
    state = algorithm.update(algorithm.init(early), row(1, 1, 1, 1), 0)
    state = algorithm.update(sf.with_params(state, late), late, 1)
    assert kept(state) == {1, 2}
    rewound = sf.with_params(state, early)
    assert rewound.params["w"].tolist() == [[0.0, -4.0, 3.0, 0.0]]
    assert sf.checkpoint.tree_equal(rewound.opt, optimizer.init(rewound.params))


def test_mask_criteria_close_over_the_first_weights():
    # Zhou et al. 2019: magnitude increase |w_T| - |w_0| = [.1, -1, .4] against large
    # final.
    first, last = row(1, -2, 0.1), row(1.1, -1, 0.5)

    def increase(state, grads, step):
        return optree.tree_map(lambda w, v: w.abs() - v.abs(), state.params, first)

    for score, expected in ((increase, {0, 2}), (sf.scores.magnitude, {0, 1})):
        algorithm = sf.one_shot(1 / 3, score=score)
        assert kept(algorithm.update(algorithm.init(last), last, 0)) == expected


# ---- gmp -----------------------------------------------------------------------------


def test_gradual_pruning_has_the_exact_counts_of_the_cubic():
    # .8 - .8 * (1 - t/4)^3 of 100: 0, 46.25, 70, 78.75, 80 pruned.
    algorithm = sf.gmp(sf.schedules.polynomial(0.0, 0.8, begin=0, end=4))
    state, seen = algorithm.init({"w": torch.arange(100.0).reshape(10, 10)}), []
    for step in range(6):
        state = algorithm.update(state, state.params, step)
        seen.append(int(state.masks["w"].sum()))
    assert seen == [100, 54, 30, 21, 20, 20]
    assert kept(state) == set(range(80, 100))


def test_the_first_mask_is_of_the_schedule_at_0_and_weights_off_it_are_zero():
    state = sf.gmp(sf.schedules.piecewise({0: 0.5, 10: 0.75})).init(row(1, -2, 3, -4))
    assert state.params["w"].tolist() == [[0.0, 0.0, 3.0, -4.0]]


def test_masks_only_shrink_unless_regrow():
    dip = sf.schedules.piecewise({0: 0.5, 1: 0.75, 2: 0.25})
    params = row(1, 2, 3, 4)
    for regrow, expected in ((False, [2, 1, 1]), (True, [2, 1, 3])):
        algorithm = sf.gmp(dip, regrow=regrow, pruned="keep")
        state, seen = algorithm.init(params), []
        for step in range(3):
            state = algorithm.update(state, params, step)
            seen.append(len(kept(state)))
        assert seen == expected


def test_a_schedule_that_leaves_0_1_is_clamped():
    params = row(1, 2, 3, 4)
    algorithm = sf.gmp(lambda step: 0.5 * step - 0.25)
    state = algorithm.init(params)
    assert len(kept(state)) == 4
    assert len(kept(algorithm.update(state, params, 9))) == 0


def test_ac_dc_alternates_with_a_fresh_optimizer():
    # Peste et al. 2021: .5 -> 0 -> .5; pruned weights return as zeros, all momenta
    # restart at the dense phase.
    level = sf.schedules.piecewise({0: 0.5, 2: 0.0, 4: 0.5})
    options = {
        "when": sf.at([2, 4]),
        "distribution": sf.budgets.global_(),
        "regrow": True,
    }
    params, grads = row(1, 2, 3, 4), row(1, 1, 1, 1)
    bare = sf.gmp(level, **options)
    state = first = bare.init(params)
    for step in range(5):
        state = bare.update(state, grads, step)
        assert kept(state) == ({0, 1, 2, 3} if step in (2, 3) else {2, 3})
    assert sf.checkpoint.tree_equal(state.masks, first.masks)

    algorithm = sf.with_optimizer(
        sf.gmp(level, **options), sf.optimizers.sgd(0.1, momentum=0.9), reset=sf.at([2])
    )
    state = algorithm.init(params)
    for step in range(2):
        state = algorithm.update(state, grads, step)
    assert state.opt.momentum["w"].tolist() == [
        [0.0, 0.0, pytest.approx(1.9), pytest.approx(1.9)]
    ]
    state = algorithm.update(state, grads, 2)
    assert state.params["w"][0, :2].tolist() == [0.0, 0.0]
    assert not state.opt.momentum["w"].any()
    state = algorithm.update(state, grads, 3)
    assert state.params["w"][0, :2].tolist() == [
        pytest.approx(-0.1),
        pytest.approx(-0.1),
    ]


def test_patterns_prune_whole_units():
    params = {"w": torch.tensor([[1.0, 9.0, 1.0, 1.0], [4.0, 4.0, 4.0, 3.0]])}
    for pattern, expected in (
        (sf.patterns.channel(0), {4, 5, 6, 7}),
        (sf.patterns.channel(0, norm=float("inf")), {0, 1, 2, 3}),
        (sf.patterns.channel(1), {0, 1, 4, 5}),
        (sf.patterns.block((1, 2)), {0, 1, 4, 5}),
        (sf.patterns.row_balanced(), {0, 1, 4, 5}),
        (sf.patterns.nm(1, 2), {1, 2, 4, 6}),
        (sf.patterns.out_groups(2), {0, 1, 4, 5}),
        (sf.patterns.in_groups(2), {1, 4, 6, 7}),
    ):
        assert kept(sf.gmp(0.5, pattern=pattern).init(params)) == expected, pattern


def test_one_competition_over_all_leaves_can_have_a_floor_for_each():
    params = {
        "a": torch.tensor([[10.0, 9.0, 8.0, 7.0]]),
        "b": torch.tensor([[0.4, 0.3, 0.2, 0.1]]),
    }
    state = sf.gmp(0.5, distribution=sf.budgets.global_()).init(params)
    assert (kept(state, "a"), kept(state, "b")) == ({0, 1, 2, 3}, set())
    state = sf.gmp(0.5, distribution=sf.budgets.global_(floor=0.25)).init(params)
    assert (kept(state, "a"), kept(state, "b")) == ({0, 1, 2}, {0})
    state = sf.gmp(0.5, distribution=sf.budgets.global_(ceiling=0.5)).init(params)
    assert (kept(state, "a"), kept(state, "b")) == ({0, 1}, {0, 1})


# ---- ste and N:M ---------------------------------------------------------------------


def test_straight_through_masks_flip_while_all_weights_train():
    # Wortsman et al. 2019: SGD, keep 1, lr .2: latents [1, 1.1], and the mask flips.
    algorithm = sf.with_optimizer(sf.ste(0.5), sf.optimizers.sgd(0.2))
    state = algorithm.init(row(1, 0.9))
    assert kept(state) == {0}
    state = algorithm.update(state, row(0, -1), 0)
    assert kept(state) == {1}
    assert torch.equal(
        state.params["w"],
        torch.tensor([[1.0, 0.9]]) + -0.2 * torch.tensor([[0.0, -1.0]]),
    )


def test_ste_is_gmp_that_trains_what_it_prunes():
    params = {"w": torch.randn(6, 4)}
    both = [
        sf.with_optimizer(algorithm, sf.optimizers.adam(0.1))
        for algorithm in (
            sf.ste(0.5),
            sf.gmp(0.5, pruned="train", regrow=True, when=sf.always()),
        )
    ]
    states = [algorithm.init(params) for algorithm in both]
    for step in range(5):
        grads = {"w": torch.sin(3 * sf.effective(states[0])["w"])}
        states = [
            algorithm.update(state, grads, step)
            for algorithm, state in zip(both, states, strict=True)
        ]
    assert sf.checkpoint.tree_equal(*states)


def test_sr_ste_decays_only_what_is_pruned():
    # Zhou et al. 2021: w = [3, -1, .5, 2], mask {0, 3}, g = 1, strength .1.
    algorithm = sf.with_terms(
        sf.ste(0.5, pattern=sf.patterns.nm(2, 4)), sf.terms.pruned_decay(0.1)
    )
    state = algorithm.init(row(3, -1, 0.5, 2))
    assert kept(state) == {0, 3}
    grads = algorithm.view.grads(state, row(1, 1, 1, 1), 0)["w"]
    torch.testing.assert_close(grads, torch.tensor([[1.0, 0.9, 1.05, 1.0]]))


def test_n_of_m_groups_of_a_convolution_run_along_its_input_channels():
    weight = torch.zeros(1, 4, 2, 2)
    weight[0, :, 0, 0] = torch.tensor([1.0, 4.0, 3.0, 2.0])
    weight[0, :, 1, 1] = torch.tensor([9.0, 1.0, 8.0, 2.0])
    mask = sf.one_shot(0.5, pattern=sf.patterns.nm(2, 4, axis=1))
    mask = mask.update(mask.init({"w": weight}), {"w": weight}, 0).masks["w"]
    assert mask.sum(1).tolist() == [[[2, 2], [2, 2]]]
    assert mask[0, :, 0, 0].tolist() == [False, True, True, False]
    assert mask[0, :, 1, 1].tolist() == [True, False, True, False]


def test_two_of_four_keeps_more_after_a_permutation():
    # Mishra et al. 2021: [4, 3, 2, 1, 0, 0, 0, 0] keeps 7; columns 2, 3 exchanged with
    # 4, 5 keep 10.
    algorithm = sf.one_shot(0.5, pattern=sf.patterns.nm(2, 4))
    for values, expected in (
        ((4, 3, 2, 1, 0, 0, 0, 0), 7.0),
        ((4, 3, 0, 0, 2, 1, 0, 0), 10.0),
    ):
        params = row(*values)
        assert (
            float(algorithm.update(algorithm.init(params), params, 0).params["w"].sum())
            == expected
        )


# ---- scores of other papers, written by hand -----------------------------------------


def test_movement_keeps_what_moves_away_from_zero():
    # Sanh et al. 2020: w = [1, -1], g = [.5, .5]: scores [-.5, .5].
    algorithm = sf.one_shot(0.5, score=sf.scores.sum(sf.scores.movement))
    assert kept(algorithm.update(algorithm.init(row(1, -1)), row(0.5, 0.5), 0)) == {1}


def lamp(state, grads, step):
    def leaf(w):
        order = w.flatten().abs().sort()
        squares = order.values**2
        suffix = squares.flip(0).cumsum(0).flip(0)
        scores = torch.where(suffix > 0, squares / suffix, 0.0)
        return (
            torch.zeros_like(scores)
            .index_copy(0, order.indices, scores)
            .reshape(w.shape)
        )

    return optree.tree_map(leaf, state.params)


def test_lamp_is_a_score_in_a_global_competition():
    # Lee et al. 2021: scores 1/30, 4/29, 9/25, 1; free of scale, so that every layer
    # keeps its best.
    scores = lamp(sf.State(row(1, -2, 3, 4), {}), (), 0)["w"]
    torch.testing.assert_close(scores, torch.tensor([[1 / 30, 4 / 29, 9 / 25, 1.0]]))
    params = {
        "a": torch.tensor([[10.0, 20.0, 30.0]]),
        "b": torch.tensor([[1.0, 2.0, 3.0]]),
        "c": torch.zeros(1, 3),
    }
    algorithm = sf.one_shot(7 / 9, score=lamp, distribution=sf.budgets.global_())
    assert counts(algorithm.update(algorithm.init(params), params, 0)) == {
        "a": 1,
        "b": 1,
        "c": 0,
    }


def test_diagonal_fisher_means_squares_over_samples():
    # G = [1, 2], [3, 1], w = [1, -1]: .5 * F * w^2 = [2.5, 1.25]. The squared mean
    # would give [2, 1.125].
    fisher = sf.scores.mean(
        lambda state, grads, step: optree.tree_map(torch.square, grads)
    )

    def value(memory, state, grads, step):
        mean = fisher.value(memory, state, grads, step)
        return optree.tree_map(lambda f, w: 0.5 * f * w * w, mean, state.params)

    score = fisher._replace(value=value)
    algorithm = sf.one_shot(0.5, score=score, when=sf.at([1]))
    state = algorithm.init(row(1, -1))
    for step, grads in enumerate((row(1, 2), row(3, 1))):
        state = algorithm.update(state, grads, step)
    assert value(state.scores["score"], state._replace(params=row(1, -1)), (), 1)[
        "w"
    ].tolist() == [[2.5, 1.25]]
    assert kept(state) == {0}


def test_wanda_compares_inside_output_rows():
    # Sun et al. 2024: |W| * ||X|| = [[8.944, 5, 3], [2.236, 25, 2]]; by magnitude
    # columns 1 and 0 go.
    params = {"w": torch.tensor([[4.0, 1.0, 3.0], [1.0, 5.0, 2.0]])}
    inputs = torch.tensor([[1.0, 3.0, 0.0], [2.0, 4.0, 1.0]])

    def wanda(state, grads, step):
        return {"w": state.params["w"].abs() * torch.linalg.vector_norm(inputs, dim=0)}

    scores = wanda(sf.State(params, {}), (), 0)["w"]
    torch.testing.assert_close(
        scores, torch.tensor([[8.944, 5.0, 3.0], [2.236, 25.0, 2.0]]), atol=1e-3, rtol=0
    )
    for score, expected in ((wanda, {0, 1, 3, 4}), (sf.scores.magnitude, {0, 2, 4, 5})):
        algorithm = sf.one_shot(1 / 3, score=score, pattern=sf.patterns.row_balanced())
        assert kept(algorithm.update(algorithm.init(params), params, 0)) == expected


def test_taylor_sums_over_the_unit_before_it_squares():
    # Molchanov et al. 2019: per row (sum w * g)^2 = [0, .25]; the sum of squares has
    # the other order.
    params = {"w": torch.tensor([[1.0, -1.0], [2.0, 1.0]])}
    grads = {"w": torch.tensor([[0.5, 0.5], [0.2, 0.1]])}

    def taylor(state, grads, step):
        return optree.tree_map(
            lambda w, g: (w * g).sum(1, keepdim=True).square().expand_as(w),
            state.params,
            grads,
        )

    def squares(state, grads, step):
        return optree.tree_map(lambda w, g: (w * g).square(), state.params, grads)

    for score, expected in ((taylor, {2, 3}), (squares, {0, 1})):
        algorithm = sf.one_shot(0.5, score=score, pattern=sf.patterns.channel(0))
        assert kept(algorithm.update(algorithm.init(params), grads, 0)) == expected


def test_network_slimming_prunes_scales_of_one_dimension():
    # Liu et al. 2017: half of [.5, -.1], [.3, .05] over both layers.
    params = {
        "bn1.weight": torch.tensor([0.5, -0.1]),
        "bn2.weight": torch.tensor([0.3, 0.05]),
        "w": torch.ones(2, 2),
    }
    algorithm = sf.one_shot(0.5, where="bn*.weight", distribution=sf.budgets.global_())
    state = algorithm.update(algorithm.init(params), params, 0)
    assert (kept(state, "bn1.weight"), kept(state, "bn2.weight")) == ({0}, {0})
    assert state.masks["w"].ndim == 0


def test_geometric_median_removes_the_filter_nearest_to_all_others():
    # He et al. 2019: filters 0, 2, 3, 10, 11: sums of distances 26, 20, 19, 26, 29. By
    # norm the first would go.
    params = {"w": torch.tensor([[0.0], [2.0], [3.0], [10.0], [11.0]])}

    def distances(state, grads, step):
        return {
            "w": torch.cdist(state.params["w"], state.params["w"]).sum(1, keepdim=True)
        }

    assert distances(sf.State(params, {}), (), 0)["w"].flatten().tolist() == [
        26.0,
        20.0,
        19.0,
        26.0,
        29.0,
    ]
    algorithm = sf.gmp(
        0.2,
        score=distances,
        pattern=sf.patterns.channel(0),
        init="dense",
        pruned="train",
        regrow=True,
    )
    state = algorithm.update(algorithm.init(params), params, 0)
    assert kept(state) == {0, 1, 3, 4}
    assert sf.checkpoint.tree_equal(state.params, params)


# ---- gradients that are not numbers --------------------------------------------------


def test_nan_scores_lose_and_infinite_ones_win():
    nan, inf = float("nan"), float("inf")
    algorithm = sf.one_shot(0.5, score=sf.scores.gradient)
    state = algorithm.init(row(1, 1, 1, 1))
    assert kept(algorithm.update(state, row(nan, -inf, 1, 0), 0)) == {1, 2}
    assert kept(algorithm.update(state, row(nan, nan, nan, -1), 0)) == {0, 3}


# ---- gmp by the length of a run ------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100, 399, 1000])
def test_the_length_of_a_run_says_when_and_how_much_gmp_prunes(steps):
    params = {"w": torch.arange(400.0).reshape(20, 20).cos()}
    algorithm, seen = sf.gmp(0.9, steps=steps), {}
    state = algorithm.init(params)
    assert state.masks["w"].all() or steps < 3  # where masks change once, at step 0
    for step in range(steps):
        new = algorithm.update(state, params, step)
        if new is not state:
            seen[step] = int(new.masks["w"].sum())
        state = new
    n, stop = min(100, max(1, steps // 100)), max(1, 3 * steps // 4)
    assert list(seen) == list(range(0, stop, n))
    last = max(seen)
    for step, count in seen.items():
        level = 0.9 * (1 - (1 - step / last) ** 3) if last else 0.9
        assert count == sf.budgets.n_kept(400, level)
    assert seen[last] == 40


def test_gmp_by_the_length_of_a_run_is_the_same_with_its_parts_named():
    params = {"w": torch.arange(400.0).reshape(20, 20).cos()}
    rise = sf.schedules.polynomial(0.0, 0.8, begin=0, end=740)
    for ours, told in (
        (sf.gmp(0.8, steps=1000), sf.gmp(rise, when=sf.every(10, stop=750))),
        (sf.gmp(0.8, steps=1000, when=sf.every(7)), sf.gmp(rise, when=sf.every(7))),
        (
            sf.gmp(torch.tensor(0.8, dtype=torch.float64), steps=1000),
            sf.gmp(rise, when=sf.every(10, stop=750)),
        ),
    ):
        left, right = ours.init(params), told.init(params)
        for step in (0, 70, 140, 735, 740, 750, 994):
            left, right = (
                ours.update(left, params, step),
                told.update(right, params, step),
            )
            assert sf.checkpoint.tree_equal(left, right)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: sf.gmp(sf.schedules.linear(0.0, 0.1), steps=100),
            ValueError,
            "gmp: expected the sparsity of the end as a float or a 0-d tensor beside "
            "steps=100, got linear(0.0, 0.1), which says itself how many are kept at "
            "each step: leave steps out, and give `when`",
        ),
        (
            lambda: sf.gmp(sf.counts.above(0.1), steps=100),
            ValueError,
            "got above(0.1), which says itself",
        ),
        (
            lambda: sf.gmp(None, pattern=sf.patterns.nm(2, 4), steps=100),
            ValueError,
            "got None, which says itself",
        ),
        (lambda: sf.gmp(0.5, steps=0), ValueError, "gmp: expected steps >= 1, got 0"),
        (
            lambda: sf.gmp(0.5, steps=1.5),
            TypeError,
            "gmp: expected steps to be an int, got float",
        ),
        (
            lambda: sf.gmp(1, steps=100),
            TypeError,
            "expected sparsity to be a float in [0, 1], got the int 1",
        ),
        (
            lambda: sf.gmp(1.5, steps=100),
            ValueError,
            "expected sparsity in [0, 1], got 1.5",
        ),
    ],
)
def test_the_length_of_a_run_needs_a_sparsity_at_its_end(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()
