"""`supermask` and `rescore`: masks that follow trained scores."""

import functools

import optree
import pytest
import torch
import torchopt

import sparsefn as sf

MAKE = torch.Generator().manual_seed(0)
draw = functools.partial(torch.randn, generator=MAKE)
PARAMS = {"0": {"weight": draw(6, 8), "bias": draw(6)}, "1": {"weight": draw(4, 6)}}
SLOPES = {"0": {"weight": draw(6, 8), "bias": draw(6)}, "1": {"weight": draw(4, 6)}}
MODES = ("supermask", "joint", "ste")


def one(*values):
    return {"w": torch.tensor([values])}


def equal(a, b):
    return sf.checkpoint.tree_equal(a, b)


def slopes(params):
    return optree.tree_map(lambda p: 0.5 * p + torch.sin(5 * p) + 0.1, params)


def advance(algorithm, state, steps):
    for step in steps:
        state = algorithm.update(state, slopes(sf.effective(state)), step)
    return state


# ---- worked numbers of the papers ----------------------------------------------------


def test_edge_popup():
    # Ramanujan et al. 2020: best |s|, gradient g * w * sign(s) for every score, weights
    # frozen.
    w, s, g = (
        one(0.5, -2.0, 1.0, 3.0),
        one(-0.9, 0.2, 0.5, -0.1),
        one(1.0, 1.0, -1.0, 2.0),
    )
    algorithm = sf.supermask(0.5, link=torch.abs, init=s)
    state = algorithm.init(w)
    assert state.masks["w"].tolist() == [[True, False, True, False]]
    grads = algorithm.view.grads(state, g, 0)
    assert (
        grads["scores"]["w"].tolist() == [[-0.5, -2.0, -1.0, -6.0]]
        and not grads["params"]
    )
    gated = sf.supermask(0.5, link=torch.abs, init=s, mask_gradient=True)
    assert gated.view.grads(gated.init(w), g, 0)["scores"]["w"].tolist() == [
        [-0.5, 0.0, -1.0, 0.0]
    ]
    signed = sf.supermask(0.5, init=s)
    assert signed.init(w).masks["w"].tolist() == [[False, True, True, False]]


def test_movement():
    # Sanh et al. 2020: scores from 0, weights and scores train, and what moves away
    # from 0 is kept.
    algorithm = sf.with_optimizer(
        sf.supermask(0.5, mode="joint", init="zeros"), sf.optimizers.sgd(1.0)
    )
    state = algorithm.init(one(1.0, -1.0))
    assert state.masks["w"].tolist() == [[True, False]]
    state = algorithm.update(state, one(0.5, 0.5), 0)
    assert state.scores["learned"]["w"].tolist() == [[-0.5, 0.5]]
    assert state.masks["w"].tolist() == [[False, True]]
    # the gradient on the mask, as it was
    assert state.params["w"].tolist() == [[0.5, -1.0]]


def test_a_cubic_schedule_of_movement():
    level = sf.schedules.polynomial(0.0, 0.75, begin=0, end=4)
    algorithm = sf.with_optimizer(
        sf.supermask(level, mode="joint", init="zeros"), sf.optimizers.sgd(0.1)
    )
    state = algorithm.init(PARAMS)
    assert sf.masks.n_kept(state.masks) == sf.masks.n_total(state.masks)
    for step in range(6):
        state = advance(algorithm, state, [step])
        kept = {
            path: int(sf.budgets.n_kept(n, level(step)))
            for path, n in {"0": 48, "1": 24}.items()
        }
        assert {path: int(state.masks[path]["weight"].sum()) for path in kept} == kept


def test_bernoulli_is_fixed_by_key_path_and_step():
    algorithm = sf.supermask(
        "bernoulli", link=torch.sigmoid, init="zeros", key=sf.random.key(4)
    )
    state = algorithm.init(PARAMS)

    def expected(path, step):
        leaf = PARAMS[path]["weight"]
        probs = torch.full_like(leaf, 0.5)
        return sf.masks.bernoulli_mask(
            probs, sf.random.leaf_key(sf.random.key(4), f"{path}.weight", step)
        )

    for path in ("0", "1"):
        assert torch.equal(state.masks[path]["weight"], expected(path, 0))
    for step in (0, 7, torch.tensor(7)):
        new = algorithm.update(state, SLOPES, step)
        for path in ("0", "1"):
            assert torch.equal(new.masks[path]["weight"], expected(path, int(step) + 1))
    assert not equal(
        state.masks,
        sf.supermask("bernoulli", link=torch.sigmoid, init="zeros").init(PARAMS).masks,
    )


def test_bernoulli_probabilities():
    sure = torch.tensor([[-200.0, 200.0, 200.0, -200.0]])
    algorithm = sf.supermask("bernoulli", link=torch.sigmoid, init={"w": sure})
    state = algorithm.init({"w": torch.ones(1, 4)})
    for step in range(3):
        state = algorithm.update(state, state.params, step)
        assert torch.equal(state.masks["w"], sure > 0)
    # Without a link a score is the probability, clamped to [0, 1].
    many = sf.supermask(
        "bernoulli", init=lambda params: {"w": torch.full_like(params["w"], 0.3)}
    )
    masks = many.init({"w": torch.ones(64, 64)}).masks["w"]
    assert abs(float(masks.double().mean()) - 0.3) < 0.03
    clamped = sf.supermask("bernoulli", init=one(-1.0, 2.0, 0.0, 1.0)).init(
        one(1.0, 1.0, 1.0, 1.0)
    )
    assert clamped.masks["w"].tolist() == [[False, True, False, True]]


def test_the_slope_of_a_link_goes_into_the_gradient():
    s = torch.tensor([[0.3, -1.0, 2.0, 0.0]])
    algorithm = sf.supermask("bernoulli", link=torch.sigmoid, init={"w": s})
    state, g = algorithm.init(one(1.0, 2.0, -3.0, 4.0)), one(0.5, 1.0, 1.0, -1.0)
    p = torch.sigmoid(s)
    torch.testing.assert_close(
        algorithm.view.grads(state, g, 0)["scores"]["w"],
        g["w"] * state.params["w"] * p * (1 - p),
    )


# ---- what trains ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gated", [False, True])
def test_the_view_shows_what_the_mode_trains(mode, gated):
    algorithm = sf.supermask(0.5, mode=mode, mask_gradient=gated)
    state = algorithm.init(PARAMS)
    tree, moves = algorithm.view.get(state), algorithm.view.support(state)
    grads = algorithm.view.grads(state, SLOPES, 0)
    both = ["0.weight", "1.weight"]
    # () where there is none
    assert sorted(tree["scores"]) == (both if mode != "ste" else [])
    assert sorted(tree["params"]) == (
        ["0.bias"] if mode == "supermask" else ["0.bias", *both]
    )
    for other in (moves, grads):
        assert sf.tree.same_structure(other, tree)
    assert all(leaf.ndim == 0 and bool(leaf) for leaf in optree.tree_leaves(moves))
    assert torch.equal(grads["params"]["0.bias"], SLOPES["0"]["bias"])
    for path, score in dict(grads["scores"]).items():
        w, g, m = (tree_[path[0]]["weight"] for tree_ in (PARAMS, SLOPES, state.masks))
        assert torch.equal(score, torch.where(m, g * w, 0.0) if gated else g * w)
    for path in set(grads["params"]) - {"0.bias"}:
        g, m = SLOPES[path[0]]["weight"], state.masks[path[0]]["weight"]
        assert torch.equal(grads["params"][path], torch.where(m, g, 0.0))
    assert equal(algorithm.view.put(state, tree), state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "optimizer",
    [lambda: sf.optimizers.adam(0.1), lambda: torchopt.sgd(0.1, momentum=0.9)],
)
def test_a_run_equals_one_through_autograd(mode, optimizer):
    # The same network with `sparsify` inside the loss, and no algorithm at all.
    x, y = draw(16, 8), torch.arange(16) % 4

    def loss(params):
        hidden = torch.tanh(x @ params["0"]["weight"].T + params["0"]["bias"])
        return torch.nn.functional.cross_entropy(hidden @ params["1"]["weight"].T, y)

    algorithm = sf.with_optimizer(sf.supermask(0.5, mode=mode), optimizer())
    state = algorithm.init(PARAMS)
    trained, moments = algorithm.view.get(state), optimizer()
    frozen = {"0.weight": PARAMS["0"]["weight"], "1.weight": PARAMS["1"]["weight"]}
    (given,) = state.scores.values()
    scores = {f"{path}.weight": given[path]["weight"] for path in ("0", "1")}

    def direct(tree):
        weights, s = frozen | dict(tree["params"]), scores | dict(tree["scores"])
        made = {
            path: sf.masks.sparsify(w, s[path], w.numel() // 2, mode=mode)
            for path, w in weights.items()
            if path in s
        }
        return loss(
            {
                "0": {"weight": made["0.weight"], "bias": weights["0.bias"]},
                "1": {"weight": made["1.weight"]},
            }
        )

    opt = moments.init(trained)
    for step in range(8):
        grads = torch.func.grad(loss)(sf.effective(state))
        state = algorithm.update(state, grads, step)
        updates, opt = moments.update(
            torch.func.grad(direct)(trained), opt, params=trained, inplace=False
        )
        trained = optree.tree_map(torch.add, trained, updates)
    assert equal(algorithm.view.get(state), trained)
    if mode == "supermask":
        assert equal(state.params["1"], PARAMS["1"]) and not equal(
            state.params["0"], PARAMS["0"]
        )


def test_weights_off_the_mask_keep_their_moments():
    # Momentum carries a weight on after its mask is gone: masks may come back to it.
    algorithm = sf.with_optimizer(
        sf.supermask(0.5, mode="ste", init=one(1.0, 0.0)),
        sf.optimizers.sgd(1.0, momentum=0.5),
    )
    state = algorithm.update(algorithm.init(one(4.0, 4.0)), one(1.0, 1.0), 0)
    assert state.params["w"].tolist() == [[3.0, 4.0]]
    state = algorithm.update(sf.rescore(state, lambda s, w: -s), one(0.0, 0.0), 1)
    assert state.params["w"].tolist() == [[2.5, 4.0]]
    assert state.masks["w"].tolist() == [[False, True]]
    assert algorithm.update(state, one(0.0, 0.0), 2).params["w"].tolist() == [
        [2.25, 4.0]
    ]


# ---- scores at the start -------------------------------------------------------------


def test_scores_at_the_start():
    params = one(3.0, -4.0) | {"b": torch.ones(2)}
    make = functools.partial(sf.supermask, 0.5)
    assert make(init="zeros").init(params).scores["learned"]["w"].tolist() == [
        [0.0, 0.0]
    ]
    assert make(init="magnitude").init(params).scores["learned"]["w"].tolist() == [
        [3.0, 4.0]
    ]
    assert make(init=lambda p: optree.tree_map(torch.neg, p)).init(params).scores[
        "learned"
    ]["w"].tolist() == [[-3.0, 4.0]]
    given = {
        "w": torch.tensor([[0.25, 0.5]], dtype=torch.float64),
        "b": torch.zeros(()),
    }
    state = make(init=given).init(params)
    assert (
        torch.equal(state.scores["learned"]["w"], given["w"])
        and state.scores["learned"]["w"].dtype == torch.float64
    )
    for start in ("random", "zeros", "magnitude", given):
        scores = make(init=start).init(params).scores["learned"]
        assert sf.tree.same_structure(scores, params)
        assert torch.equal(scores["b"], torch.zeros(()))


def test_random_scores_lie_in_the_unit_interval_and_follow_the_key():
    params = {"w": torch.ones(32, 32)}
    scores = [
        sf.supermask(0.5, key=sf.random.key(i)).init(params).scores["learned"]["w"]
        for i in (0, 0, 1)
    ]
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])
    assert 0 <= float(scores[0].min()) < 0.05 and 0.95 < float(scores[0].max()) < 1
    half = sf.supermask(0.5).init({"w": torch.ones(4, 4, dtype=torch.bfloat16)})
    assert half.scores["learned"]["w"].dtype == torch.bfloat16


def test_masks_wait_for_their_trigger():
    algorithm = sf.with_optimizer(
        sf.supermask(0.5, init="zeros", when=sf.every(3)), sf.optimizers.sgd(1.0)
    )
    first = algorithm.init(PARAMS)
    state = advance(algorithm, first, [1, 2])
    assert equal(state.masks, first.masks) and not equal(state.scores, first.scores)
    state = advance(algorithm, state, [3])
    assert torch.equal(
        state.masks["0"]["weight"],
        sf.masks.topk_mask(state.scores["learned"]["0"]["weight"], 24),
    )


def test_patterns_and_global_competitions():
    nm = sf.supermask(0.5, pattern=sf.patterns.nm(1, 2)).init(PARAMS)
    assert torch.equal(
        nm.masks["0"]["weight"],
        sf.masks.topk_mask(
            nm.scores["learned"]["0"]["weight"], None, pattern=sf.patterns.nm(1, 2)
        ),
    )
    together = sf.supermask(0.75, distribution=sf.budgets.global_()).init(PARAMS)
    scores = {path: together.scores["learned"][path]["weight"] for path in ("0", "1")}
    assert equal(
        {path: together.masks[path]["weight"] for path in scores},
        sf.masks.topk_masks(scores, 18),
    )


def test_a_part_of_a_partition():
    algorithm = sf.with_optimizer(
        sf.partition([("1.*", sf.supermask(0.5)), ("*", sf.static(0.5))]),
        sf.optimizers.sgd(0.5),
    )
    state = advance(algorithm, algorithm.init(PARAMS), range(3))
    assert equal(state.params["1"], PARAMS["1"]) and not equal(
        state.params["0"], PARAMS["0"]
    )
    assert int(state.masks["1"]["weight"].sum()) == 12


# ---- rescore -------------------------------------------------------------------------


def test_new_scores_persist():
    # The original forgets the result after one forward and goes back to its random
    # scores.
    algorithm = sf.supermask(0.5, mode="ste")
    state = algorithm.init(PARAMS)
    new = sf.rescore(state, lambda s, w: w.abs())
    assert equal(new.masks, state.masks) and equal(new.params, state.params)
    assert torch.equal(new.scores["score"]["0"]["bias"], torch.zeros(()))
    for step in range(3):
        new = algorithm.update(new, SLOPES, step)
        for path in ("0", "1"):
            w = PARAMS[path]["weight"]
            assert torch.equal(new.scores["score"][path]["weight"], w.abs())
            assert torch.equal(
                new.masks[path]["weight"], sf.masks.topk_mask(w.abs(), w.numel() // 2)
            )


def test_a_stack_is_rescored_under_vmap():
    algorithm = sf.supermask(0.5)
    states = [sf.supermask(0.5, key=sf.random.key(i)).init(PARAMS) for i in range(3)]
    stack = torch.vmap(lambda state: sf.rescore(state, lambda s, w: s * w))(
        sf.ensemble.stack(states)
    )
    for i, state in enumerate(states):
        expected = algorithm.update(sf.rescore(state, lambda s, w: s * w), SLOPES, 0)
        assert equal(
            algorithm.update(sf.ensemble.member(stack, i), SLOPES, 0), expected
        )


# ---- transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.5, "bernoulli"])
def test_vmap_over_keys_equals_the_loop(sparsity):
    keys = sf.random.split(sf.random.key(9), 3)

    def run(key, step):
        algorithm = sf.with_optimizer(
            sf.supermask(sparsity, mode="joint", link=torch.abs, key=key),
            sf.optimizers.adam(0.1),
        )
        return advance(algorithm, algorithm.init(PARAMS), [step, step + 1])

    stack = torch.vmap(run, in_dims=(0, None))(keys, torch.tensor(0))
    for i, key in enumerate(keys):
        assert equal(sf.ensemble.member(stack, i), run(key, 0))


def test_vmap_over_states_reads_the_key_of_each():
    # One algorithm updates all members: what they draw comes from their own states.
    made = [sf.supermask("bernoulli", key=sf.random.key(i)) for i in range(3)]
    states = [algorithm.init(PARAMS) for algorithm in made]
    stack = torch.vmap(lambda state: made[0].update(state, SLOPES, 5))(
        sf.ensemble.stack(states)
    )
    for i, (algorithm, state) in enumerate(zip(made, states, strict=True)):
        assert equal(sf.ensemble.member(stack, i), algorithm.update(state, SLOPES, 5))


def test_vmap_over_sparsities_equals_the_loop():
    def run(sparsity):
        algorithm = sf.with_optimizer(
            sf.supermask(sparsity), sf.optimizers.sgd(0.5, momentum=0.9)
        )
        return advance(algorithm, algorithm.init(PARAMS), [0, 1])

    levels = [0.0, 0.3, 0.9, 1.0]
    stack = torch.vmap(run)(torch.tensor(levels, dtype=torch.float64))
    for i, level in enumerate(levels):
        assert equal(sf.ensemble.member(stack, i), run(level))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mode", "sparsity", "params"),
    [
        ("joint", "bernoulli", PARAMS),
        ("ste", 0.5, PARAMS["1"]),
        ("supermask", 0.5, PARAMS["1"]),
    ],
)
def test_compiled_updates_are_the_eager_ones(mode, sparsity, params):
    algorithm = sf.with_optimizer(
        sf.supermask(sparsity, mode=mode, link=torch.abs, when=sf.every(2)),
        sf.optimizers.sgd(0.5, momentum=0.9),
    )
    compiled = torch.compile(algorithm.update, backend="eager", fullgraph=True)
    state = other = algorithm.init(params)
    for step in range(3):
        grads = slopes(sf.effective(state))
        state, other = (
            algorithm.update(state, grads, step),
            compiled(other, grads, torch.tensor(step)),
        )
        assert equal(state, other)


def test_nothing_given_is_changed_and_states_can_be_saved():
    before = optree.tree_map(torch.clone, PARAMS)
    algorithm = sf.with_optimizer(
        sf.supermask(0.5, mode="joint"), sf.optimizers.adam(0.1)
    )
    first = algorithm.init(PARAMS)
    copy = optree.tree_map(torch.clone, first)
    middle = advance(algorithm, first, range(3))
    assert equal(first, copy) and equal(PARAMS, before)
    saved = sf.checkpoint.load_state_dict(
        algorithm.init(PARAMS), sf.checkpoint.state_dict(middle)
    )
    assert equal(
        advance(algorithm, saved, range(3, 6)), advance(algorithm, middle, range(3, 6))
    )


# ---- errors --------------------------------------------------------------------------


def given(**leaves):
    return sf.supermask(0.5, init=leaves).init(one(1.0, 2.0))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: sf.supermask(0.5, mode="both"),
            ValueError,
            "expected mode to be 'supermask', 'joint' or 'ste', got 'both'",
        ),
        (
            lambda: sf.supermask("bern"),
            ValueError,
            "expected sparsity to be a number, a schedule or 'bernoulli', got 'bern'",
        ),
        (
            lambda: sf.supermask(None),
            TypeError,
            "expected sparsity to be a float in [0, 1], a schedule, a 0-d tensor or "
            "'bernoulli', got None",
        ),
        (
            lambda: sf.supermask(1),
            TypeError,
            "expected sparsity to be a float in [0, 1], got the int 1; a fraction is "
            "written 1.0",
        ),
        (
            lambda: sf.supermask("bernoulli", pattern=sf.patterns.nm(2, 4)),
            ValueError,
            "supermask: 'bernoulli' draws each element by itself, without pattern or "
            "distribution",
        ),
        (
            lambda: sf.supermask("bernoulli", distribution=sf.budgets.erk()),
            ValueError,
            "supermask: 'bernoulli' draws each element by itself, without pattern or "
            "distribution",
        ),
        (
            lambda: sf.supermask(0.5, when=3),
            TypeError,
            "expected when to be a trigger such as every(100) or at([0]), got 3",
        ),
        (
            lambda: sf.supermask(0.5, init="ones").init(one(1.0, 2.0)),
            ValueError,
            "expected init to be 'random', 'zeros', 'magnitude', a function of params "
            "or a tree of scores, got 'ones'",
        ),
        (
            lambda: given(v=torch.ones(1, 2)),
            ValueError,
            "expected initial scores with the structure of params, but there is no "
            "leaf at 'w' in initial scores; params lack the one at 'v'",
        ),
        (
            lambda: given(w=torch.ones(2)),
            ValueError,
            "expected initial scores of shape (1, 2) at 'w', got (2,)",
        ),
        (
            lambda: given(w=torch.ones(1, 2, dtype=torch.int64)),
            TypeError,
            "expected initial scores that are floating-point tensors, got torch.int64 "
            "at 'w'",
        ),
        (
            lambda: sf.supermask(0.5, link=torch.sum).init(one(1.0, 2.0)),
            ValueError,
            "expected link to give scores of shape (1, 2) at 'w', got ()",
        ),
        (
            lambda: sf.supermask(0.5, link=lambda s: s > 0).init(one(1.0, 2.0)),
            TypeError,
            "expected link to give scores that are floating-point tensors, got "
            "torch.bool at 'w'",
        ),
        (
            lambda: sf.rescore(
                sf.supermask(0.5).init(one(1.0, 2.0)), lambda s, w: w.sum()
            ),
            ValueError,
            "expected fn to give scores of shape (1, 2) at 'w', got ()",
        ),
        (
            lambda: sf.rescore(sf.supermask(0.5).init(one(1.0, 2.0)), lambda s, w: 3),
            TypeError,
            "expected fn to give scores that are floating-point tensors, got int at "
            "'w'",
        ),
        (
            lambda: sf.rescore(sf.static(0.5).init(one(1.0, 2.0)), lambda s, w: s),
            ValueError,
            "rescore: expected a state of supermask, got one whose scores are ()",
        ),
        (
            lambda: sf.supermask(0.5, pattern=sf.patterns.nm(2, 4)).init(one(1.0, 2.0)),
            ValueError,
            "nm(2, 4, axis=-1): expected axis -1 divisible by 4, got shape (1, 2) at "
            "'w'; leave it out with where=lambda path, leaf: sf.default_where(path, "
            "leaf) and path not in ['w']",
        ),
        (
            lambda: sf.supermask(0.5).update(
                sf.supermask(0.5).init(one(1.0, 2.0)), one(1.0), 0
            ),
            ValueError,
            "expected grads of shape (1, 2) at 'w', got (1, 1)",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_a_pattern_that_fixes_the_sparsity_needs_none():
    pattern = sf.patterns.nm(2, 4)
    params = {"w": torch.randn(4, 8)}
    learned = sf.with_optimizer(
        sf.supermask(None, pattern=pattern, key=sf.random.key(1)),
        sf.optimizers.sgd(0.5),
    )
    told = sf.with_optimizer(
        sf.supermask(0.5, pattern=pattern, key=sf.random.key(1)), sf.optimizers.sgd(0.5)
    )
    a, b = learned.init(params), told.init(params)
    for step in range(3):
        grads = {"w": torch.randn(4, 8)}
        a, b = learned.update(a, grads, step), told.update(b, grads, step)
        assert sf.checkpoint.tree_equal(a, b)
        assert (a.masks["w"].unflatten(1, (2, 4)).sum(-1) == 2).all()


def test_bernoulli_masks_draw_at_the_last_step_and_refuse_the_one_after_it():
    algorithm, last = sf.supermask("bernoulli", key=sf.random.key(3)), 2**63 - 2
    params = {"w": sf.random.normal(sf.random.key(0), (6, 5))}
    state = algorithm.init(params)
    new = algorithm.update(state, params, last)
    assert sf.checkpoint.tree_equal(
        new, algorithm.update(state, params, torch.tensor(last))
    )
    assert not torch.equal(
        new.masks["w"], algorithm.update(state, params, last - 1).masks["w"]
    )
    with pytest.raises(
        ValueError,
        match="expected a step that fits int64, as the one after it must, got 92233",
    ):
        algorithm.update(state, params, last + 1)
