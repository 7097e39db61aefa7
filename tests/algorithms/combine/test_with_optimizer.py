"""`with_optimizer`: any optimizer, its weights and moments kept in step with the
masks.
"""

import itertools
import math

import optree
import pytest
import torch
import torchopt

import sparsefn as sf
from sparsefn.testing.harness import assert_same

MAKE = torch.Generator().manual_seed(0)
# Every leaf has a shape of its own, so that moments can be told apart without the
# library.
PARAMS = {
    path: torch.randn(shape, generator=MAKE)
    for path, shape in (("w", (6, 8)), ("v", (5, 4)), ("b", (5,)))
}

OPTIMIZERS = {
    "sgd": lambda: torchopt.sgd(0.05, weight_decay=0.1),
    "momentum": lambda: torchopt.sgd(0.05, momentum=0.9, weight_decay=0.1),
    "dampened": lambda: torchopt.sgd(0.05, momentum=0.9, dampening=0.5),
    "nesterov": lambda: torchopt.sgd(
        0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda: torchopt.adam(0.02, weight_decay=0.1),
    "adamw": lambda: torchopt.adamw(0.02, weight_decay=0.1),
    "rmsprop": lambda: torchopt.rmsprop(
        0.01, momentum=0.9, centered=True, weight_decay=0.1
    ),
    "adagrad": lambda: torchopt.adagrad(0.05, weight_decay=0.1),
    "clipped": lambda: torchopt.chain(
        torchopt.clip.clip_grad_norm(0.5), torchopt.adamw(0.02, weight_decay=0.1)
    ),
    "scheduled": lambda: torchopt.adam(
        torchopt.schedule.linear_schedule(0.05, 0.001, 80, 10), weight_decay=0.1
    ),
    "own sgd": lambda: sf.optimizers.sgd(
        lambda step: 0.1 / (1 + step), momentum=0.9, weight_decay=0.1
    ),
    "own adamw": lambda: sf.optimizers.adamw(0.02, weight_decay=0.1),
}
ALGORITHMS = {
    "rigl": lambda: sf.rigl(
        0.6, when=sf.every(7, stop=80), drop_fraction=sf.schedules.cosine_decay(0.5, 80)
    ),
    "gmp": lambda: sf.gmp(sf.schedules.polynomial(0.0, 0.9, 10, 70), when=sf.every(10)),
}


def slopes(params):
    """The gradient of a bumpy bowl: dense, also where a weight is pruned."""
    return optree.tree_map(lambda p: 0.5 * p + torch.sin(5 * p) + 0.1, params)


def zero_moments(opt, live):
    """Zero the moments of an optimizer's state where `live` (by shape) is False."""
    by_shape = {tuple(PARAMS[path].shape): mask for path, mask in live.items()}

    def fits(x):
        mask = by_shape.get(tuple(x.shape))
        return x if mask is None else torch.where(mask, x, 0.0)

    return optree.tree_map(fits, opt)


def prune_by_hand(algorithm, optimizer, steps):
    """A masked training loop without `with_optimizer`."""
    state = algorithm.init(PARAMS)
    opt = optimizer.init(state.params)
    # TorchOpt's sgd treats its very first call apart; a resumed run could not repeat
    # that.
    optimizer.update(
        optree.tree_map(torch.zeros_like, PARAMS),
        opt,
        params=state.params,
        inplace=False,
    )
    for step in range(steps):
        params, masks = state.params, state.masks
        grads = slopes(params)
        masked = optree.tree_map(lambda g, m: torch.where(m, g, 0.0), grads, masks)
        updates, opt = optimizer.update(masked, opt, params=params, inplace=False)
        params = optree.tree_map(
            lambda p, u, m: torch.where(m, p + u, 0.0), params, updates, masks
        )
        state = algorithm.update(state._replace(params=params), grads, step)
        opt = zero_moments(
            opt, {path: state.masks[path] & masks[path] for path in ("w", "v")}
        )
    return state._replace(opt=opt)


@pytest.mark.deep(but=["rigl-*"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_pruned_weights_and_moments_are_zero_for_100_steps_as_in_a_loop_by_hand(
    name, optimizer
):
    algorithm = sf.with_optimizer(ALGORITHMS[name](), OPTIMIZERS[optimizer]())
    state = algorithm.init(PARAMS)
    shapes = {tuple(PARAMS[path].shape): path for path in ("w", "v")}
    for step in range(100):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
        for path in ("w", "v"):
            assert not state.params[path][~state.masks[path]].any(), step
        for leaf in optree.tree_leaves(state.opt):
            if tuple(leaf.shape) in shapes:
                assert not leaf[~state.masks[shapes[tuple(leaf.shape)]]].any(), step
    expected = prune_by_hand(ALGORITHMS[name](), OPTIMIZERS[optimizer](), 100)
    assert sf.checkpoint.tree_equal(state, expected)
    assert sf.masks.sparsity(state.masks) > 0.55


def test_moments_are_found_in_every_optimizer_that_has_them():
    for name, make in OPTIMIZERS.items():
        algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), make())
        state = algorithm.init(PARAMS)
        for step in range(3):
            state = algorithm.update(state, slopes(sf.effective(state)), step)
        shaped = [
            leaf
            for leaf in optree.tree_leaves(state.opt)
            if leaf.shape == PARAMS["w"].shape
        ]
        assert len(shaped) == {
            "sgd": 0,
            "momentum": 1,
            "dampened": 1,
            "nesterov": 1,
            "own sgd": 1,
            "adagrad": 1,
        }.get(name, 3 if name == "rmsprop" else 2)
        assert all(torch.equal(leaf != 0, state.masks["w"]) for leaf in shaped), name


def test_leaves_of_one_shape_keep_their_own_moments():
    params = {
        "a": torch.tensor([[4.0, 3.0, 2.0, 1.0]]),
        "b": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
    }
    algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), torchopt.adam(0.1))
    state = algorithm.update(
        algorithm.init(params), optree.tree_map(torch.ones_like, params), 0
    )
    moments = [leaf for leaf in optree.tree_leaves(state.opt) if leaf.shape == (1, 4)]
    assert [(leaf != 0).tolist() for leaf in moments] == [
        [[True, True, False, False]],
        [[False, False, True, True]],
    ] * 2


# ---- order in one update -------------------------------------------------------------


def test_drop_sees_stepped_weights_and_growth_the_gradient_of_that_step():
    # The step turns [3, 2] into [.5, 2]: index 0 is dropped, though it was the larger
    # before.
    algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", exclude_dropped=True)
    algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(1.0))
    state = algorithm.init({"w": torch.tensor([[3.0, 2.0, 0.0, 0.0]])})
    state = algorithm.update(state, {"w": torch.tensor([[2.5, 0.0, 1.0, 9.0]])}, 0)
    assert state.masks["w"].tolist() == [[False, True, False, True]]
    assert state.params["w"].tolist() == [[0.0, 2.0, 0.0, 0.0]]


def test_grown_weights_start_with_zero_moments_and_survivors_keep_theirs():
    inner = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", when=sf.at([1]))
    algorithm = sf.with_optimizer(inner, sf.optimizers.sgd(0.1, momentum=0.5))
    state = algorithm.init({"w": torch.tensor([[9.0, 1.0, 0.0, 0.0]])})
    state = algorithm.update(state, {"w": torch.tensor([[1.0, 1.0, 1.0, 1.0]])}, 0)
    assert state.opt.momentum["w"].tolist() == [[1.0, 1.0, 0.0, 0.0]]
    state = algorithm.update(state, {"w": torch.tensor([[1.0, 1.0, 5.0, 1.0]])}, 1)
    assert state.opt.momentum["w"].tolist() == [[1.5, 0.0, 0.0, 0.0]]
    state = algorithm.update(state, {"w": torch.tensor([[1.0, 1.0, 5.0, 1.0]])}, 2)
    assert state.opt.momentum["w"].tolist() == [[1.75, 0.0, 5.0, 0.0]]


def test_a_weight_that_grows_back_at_once_keeps_weight_and_moments():
    inner = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", when=sf.at([1]))
    algorithm = sf.with_optimizer(inner, sf.optimizers.sgd(0.1, momentum=0.5))
    state = algorithm.init({"w": torch.tensor([[9.0, 1.0, 0.0, 0.0]])})
    for step in range(2):
        state = algorithm.update(
            state, {"w": torch.tensor([[1.0, 9.0, 1.0, 1.0]])}, step
        )
    assert state.masks["w"].tolist() == [[True, True, False, False]]
    assert state.opt.momentum["w"].tolist() == [[1.5, 13.5, 0.0, 0.0]]


# ---- what becomes of pruned weights --------------------------------------------------


@pytest.mark.parametrize("pruned", ["keep", "train"])
@pytest.mark.parametrize("algorithm", ["gmp", "static"])
def test_latents_equal_a_loop_by_hand_across_mask_flips(algorithm, pruned):
    make = {
        "gmp": lambda: sf.gmp(0.5, pruned=pruned, regrow=True, when=sf.every(2)),
        "static": lambda: sf.static(0.5, pruned=pruned, init="magnitude"),
    }[algorithm]
    wrapped = sf.with_optimizer(
        make(), sf.optimizers.sgd(0.3, momentum=0.9, weight_decay=0.01)
    )
    state = wrapped.init({"w": PARAMS["w"]})
    w, buffer = PARAMS["w"], torch.zeros(6, 8)
    mask = sf.masks.topk_mask(w.abs(), 24)
    flips = 0
    for step in range(20):
        grads = slopes(torch.where(mask, w, 0.0))
        state = wrapped.update(state, {"w": grads}, step)
        moves = torch.ones_like(mask) if pruned == "train" else mask
        buffer = 0.9 * buffer + (torch.where(moves, grads, 0.0) + 0.01 * w)
        w = torch.where(moves, w + -0.3 * buffer, w)
        if algorithm == "gmp" and step % 2 == 0:
            new = sf.masks.topk_mask(w.abs(), 24)
            flips += int((new != mask).sum())
            mask = new
        if pruned == "keep":
            buffer = torch.where(mask & moves, buffer, 0.0)
        assert torch.equal(state.masks["w"], mask)
        assert torch.equal(state.params["w"], w)
        assert torch.equal(state.opt.momentum["w"], buffer)
        assert torch.equal(sf.effective(state)["w"], torch.where(mask, w, 0.0))
    assert flips > 0 or algorithm == "static"


def test_straight_through_with_momentum_equals_a_loop_by_hand():
    algorithm = sf.with_optimizer(
        sf.ste(0.5), torchopt.sgd(0.3, momentum=0.9, weight_decay=0.01)
    )
    state = algorithm.init({"w": PARAMS["w"]})
    w, buffer, masks = PARAMS["w"], torch.zeros(6, 8), []
    for step in range(30):
        mask = sf.masks.topk_mask(w.abs(), 24)
        masks.append(mask)
        grads = slopes(torch.where(mask, w, 0.0))
        assert torch.equal(state.masks["w"], mask)
        state = algorithm.update(state, {"w": grads}, step)
        # TorchOpt steps along -(g + decay * w).
        buffer = 0.9 * buffer + grads.add(w, alpha=0.01).neg()
        w = w + buffer * 0.3
        assert torch.equal(state.params["w"], w)
    assert sum(int((a != b).sum()) for a, b in itertools.pairwise(masks)) > 10


# ---- options -------------------------------------------------------------------------


def test_skip_leaves_weights_and_optimizer_and_still_updates_the_masks():
    # Lee et al. 2019: at the step of SNIP the gradient prunes and does not train.
    inner = sf.one_shot(0.5, score=sf.scores.saliency)
    algorithm = sf.with_optimizer(
        inner, sf.optimizers.sgd(0.1, momentum=0.9), skip=sf.at([0])
    )
    params, grads = (
        {"w": torch.tensor([[2.0, -1.0, 0.5, 3.0]])},
        {"w": torch.tensor([[0.1, -0.4, 1.0, -0.05]])},
    )
    state = algorithm.update(algorithm.init(params), grads, 0)
    assert state.params["w"].tolist() == [[0.0, -1.0, 0.5, 0.0]]
    assert (int(state.opt.count), state.opt.momentum["w"].any().item()) == (0, False)
    state = algorithm.update(state, grads, 1)
    assert state.params["w"].tolist() == [
        [0.0, pytest.approx(-0.96), pytest.approx(0.4), 0.0]
    ]


def test_reset_starts_the_whole_optimizer_afresh():
    for optimizer in (sf.optimizers.adam(0.1), torchopt.adam(0.1)):
        algorithm = sf.with_optimizer(sf.static(0.5), optimizer, reset=sf.at([2]))
        state = algorithm.init(PARAMS)
        for step in range(3):
            assert sf.checkpoint.tree_equal(
                state.opt, optimizer.init(state.params)
            ) == (step == 0)
            state = algorithm.update(state, slopes(sf.effective(state)), step)
        assert sf.checkpoint.tree_equal(state.opt, optimizer.init(state.params))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Momentum after the update that moves the mask from {0, 1} to {0, 2}: before it
        # was [1, 1, 0, 0]; outside the support the optimizer itself still multiplies by
        # .5.
        ({}, [1.5, 0.0, 0.0, 0.0]),
        ({"reset_grown": False}, [1.5, 0.0, 0.0, 0.0]),
        ({"mask_moments": False}, [1.5, 1.5, 0.0, 0.0]),
        ({"mask_moments": False, "reset_grown": False}, [1.5, 1.5, 0.0, 0.0]),
    ],
)
def test_moments_of_dropped_weights(options, expected):
    inner = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", when=sf.at([1]))
    algorithm = sf.with_optimizer(
        inner, sf.optimizers.sgd(0.1, momentum=0.5), **options
    )
    state = algorithm.init({"w": torch.tensor([[9.0, 1.0, 0.0, 0.0]])})
    for step in range(2):
        state = algorithm.update(
            state, {"w": torch.tensor([[1.0, 1.0, 5.0, 1.0]])}, step
        )
    assert state.opt.momentum["w"].tolist() == [expected]


def test_without_masks_on_moments_a_grown_weight_may_resume_its_own():
    # The momentum of index 1 fades while it is pruned, and is there again when it
    # grows: unless reset.
    for reset_grown, expected in ((True, 0.0), (False, 0.25)):
        inner = sf.gmp(
            sf.schedules.piecewise({0: 0.0, 1: 0.5, 2: 0.0}),
            regrow=True,
            pruned="keep",
            when=sf.at([1, 2]),
        )
        optimizer = sf.optimizers.sgd(0.1, momentum=0.5)
        algorithm = sf.with_optimizer(
            inner, optimizer, mask_moments=False, reset_grown=reset_grown
        )
        state = algorithm.init({"w": torch.tensor([[9.0, 1.0]])})
        state = algorithm.update(state, {"w": torch.ones(1, 2)}, 0)
        for step in (1, 2):
            state = algorithm.update(state, {"w": torch.zeros(1, 2)}, step)
        assert state.opt.momentum["w"][0, 1] == expected


# ---- robustness ----------------------------------------------------------------------


def test_gradients_that_are_not_numbers_stay_out_of_pruned_weights():
    for make in OPTIMIZERS.values():
        algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), make())
        state = algorithm.init({"w": PARAMS["w"]})
        bad = torch.where(state.masks["w"], 1.0, math.nan)
        bad[~state.masks["w"]] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(8)
        for step in range(3):
            state = algorithm.update(state, {"w": bad}, step)
        assert all(leaf.isfinite().all() for leaf in optree.tree_leaves(state))
        assert not state.params["w"][~state.masks["w"]].any()


def test_a_fresh_torchopt_optimizer_resumes_the_run():
    # TorchOpt's sgd skips the momentum factor at the first call of a closure.
    def make():
        optimizer = torchopt.sgd(0.05, momentum=0.9)
        return sf.with_optimizer(sf.rigl(0.5, when=sf.every(3)), optimizer)

    algorithm = make()
    state = algorithm.init(PARAMS)
    for step in range(8):
        state = algorithm.update(state, slopes(sf.effective(state)), step)
        if step == 3:
            saved = sf.checkpoint.state_dict(state)
    resumed = make()
    again = sf.checkpoint.load_state_dict(
        resumed.init(optree.tree_map(torch.zeros_like, PARAMS)), saved
    )
    fresh = make()  # not even `init` was called on this one
    third = sf.checkpoint.load_state_dict(again, saved)
    for step in range(4, 8):
        again = resumed.update(again, slopes(sf.effective(again)), step)
        third = fresh.update(third, slopes(sf.effective(third)), step)
    assert sf.checkpoint.tree_equal(again, state)
    assert sf.checkpoint.tree_equal(third, state)


def test_one_optimizer_may_serve_trees_of_different_structures():
    optimizer = torchopt.adam(0.1)
    algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), optimizer)
    for params in (
        PARAMS,
        {"w": PARAMS["w"]},
        [PARAMS["v"], {"x": PARAMS["w"]}],
        PARAMS,
    ):
        state = algorithm.update(algorithm.init(params), params, 0)
        moments = [
            leaf for leaf in optree.tree_leaves(state.opt) if leaf.shape == (6, 8)
        ]
        mask = next(
            mask for mask in optree.tree_leaves(state.masks) if mask.shape == (6, 8)
        )
        assert all(torch.equal(moment != 0, mask) for moment in moments)


def test_any_pure_pair_in_the_shape_of_optax_is_an_optimizer():
    class Signed:
        """A sign descent that remembers the last gradient, in a state of plain
        dicts.
        """

        @staticmethod
        def init(params):
            return {
                "last": optree.tree_map(torch.zeros_like, params),
                "count": torch.zeros(()),
            }

        @staticmethod
        def update(grads, state, *, params, inplace):
            assert not inplace
            return optree.tree_map(lambda g: -0.5 * g.sign(), grads), {
                "last": grads,
                "count": state["count"] + 1,
            }

    algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), Signed)
    state = algorithm.init({"w": torch.tensor([[2.0, 1.0]])})
    for step in range(2):
        state = algorithm.update(state, {"w": torch.tensor([[3.0, 4.0]])}, step)
    assert state.params["w"].tolist() == [[1.0, 0.0]]
    assert state.opt["last"]["w"].tolist() == [[3.0, 0.0]]
    assert state.opt["count"] == 2.0


def test_a_weight_pruned_and_regrown_in_one_update_starts_anew():
    prune = sf.gmp(
        sf.schedules.piecewise({0: 0.0, 1: 0.5}), when=sf.at([1]), init="dense"
    )
    algorithm = sf.with_optimizer(
        sf.sequence(prune, sf.rigl("current", drop_fraction=0.5, when=sf.at([1]))),
        sf.optimizers.sgd(0.01, momentum=0.9),
    )
    state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    grads = {"w": torch.tensor([[0.1, 0.1, 0.1, 9.0]])}
    state = algorithm.update(algorithm.update(state, grads, 0), grads, 1)
    assert state.masks["w"].tolist() == [[True, False, False, True]]
    assert state.params["w"][0, 3] == 0 and state.opt.momentum["w"][0, 3] == 0
    assert state.opt.momentum["w"][0, 0] != 0


def test_dense_gradients_reach_the_moments_and_not_the_weights():
    params, grads = {"w": torch.tensor([[2.0, 1.0]])}, {"w": torch.tensor([[1.0, 4.0]])}
    for algorithm in (
        sf.static(0.5, init="magnitude"),
        sf.static(0.5, init="magnitude", pruned="keep"),
    ):
        dense = sf.with_optimizer(
            sf.with_dense_gradients(algorithm), sf.optimizers.sgd(0.25, momentum=0.5)
        )
        state = dense.init(params)
        for step in range(2):
            state = dense.update(state, grads, step)
        assert state.opt.momentum["w"].tolist() == [[1.5, 6.0]]
        assert sf.effective(state)["w"].tolist() == [[2.0 - 0.625, 0.0]]
    assert state.params["w"][0, 1] == 1.0


def test_a_grown_weight_keeps_its_dense_momentum_or_starts_anew():
    grads = {"w": torch.tensor([[0.0, 0.0, 1.0, 4.0]])}
    for reset in (True, False):
        rigl = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", when=sf.at([1]))
        algorithm = sf.with_optimizer(
            sf.with_dense_gradients(rigl),
            sf.optimizers.sgd(0.25, momentum=0.5),
            reset_grown=reset,
        )
        state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
        for step in range(2):
            state = algorithm.update(state, grads, step)
        assert state.masks["w"].tolist() == [[True, False, False, True]]
        # A dense leaf has no support to enter: its momentum continues, unless the
        # update wrote the weight itself.
        assert state.opt.momentum["w"].tolist() == [[0.0, 0.0, 1.5, 6.0]]


def test_dense_gradients_need_an_algorithm_that_trains_params():
    text = (
        "with_dense_gradients: expected an algorithm that trains params, got one with "
        "its own view"
    )
    for algorithm in (
        sf.reparametrised(sf.reparam.power(2.0)),
        sf.with_terms(sf.dense(), sf.terms.l2(0.1)),
    ):
        with pytest.raises(ValueError, match=text):
            sf.with_dense_gradients(algorithm)


def test_scores_see_the_state_of_the_optimizer_and_leave_it_alone():
    seen = []

    def momentum(state, grads, step):
        seen.append(state.opt)
        return optree.tree_map(torch.abs, state.opt.momentum)

    algorithm = sf.with_optimizer(
        sf.one_shot(0.5, momentum, when=sf.at([1])),
        sf.optimizers.sgd(0.1, momentum=0.5),
        mask_moments=False,
    )
    state = algorithm.init({"w": torch.tensor([[1.0, 2.0]])})
    for step, grads in enumerate(([[4.0, 0.0]], [[0.0, 1.0]])):
        state = algorithm.update(state, {"w": torch.tensor(grads)}, step)
    # Momenta 2 and 1 after the step of the same update: the first stays.
    assert state.masks["w"].tolist() == [[True, False]]
    assert sf.checkpoint.tree_equal(seen[0], state.opt)


@pytest.mark.parametrize(
    "wrap", [sf.chain, sf.sequence, lambda *parts: sf.phases(list(enumerate(parts)))]
)
def test_scores_see_it_inside_compositions(wrap):
    def momentum(state, grads, step):
        return optree.tree_map(torch.abs, state.opt.momentum)

    shot = sf.one_shot(0.5, momentum, when=sf.at([1]))
    algorithm = sf.with_optimizer(
        wrap(sf.static(0.0), shot), sf.optimizers.sgd(0.1, momentum=0.5)
    )
    state = algorithm.init(PARAMS)
    vmapped = torch.func.vmap(
        lambda sign: algorithm.update(
            state, optree.tree_map(lambda p: sign * p, PARAMS), 1
        )
    )
    expected = {
        path: sf.masks.topk_mask(leaf.abs(), leaf.numel() // 2)
        for path, leaf in PARAMS.items()
        if leaf.ndim > 1
    }
    for step in (1, torch.tensor(1)):
        masks = algorithm.update(state, PARAMS, step).masks
        assert all(torch.equal(masks[path], mask) for path, mask in expected.items())
    masks = vmapped(torch.tensor([1.0, -1.0])).masks
    assert all(torch.equal(masks[path][1], mask) for path, mask in expected.items())


def test_an_optimizer_around_a_partition_may_have_a_state_of_any_form():
    for optimizer in (
        sf.optimizers.adam(0.1),
        torchopt.adam(0.1),
        torchopt.sgd(0.1, momentum=0.9),
    ):
        parts = sf.partition(
            [("w", sf.rigl(0.5, when=sf.always())), ("v", sf.static(0.5))]
        )
        algorithm = sf.with_optimizer(parts, optimizer)
        state = algorithm.init(PARAMS)
        structure = optree.tree_structure(state)
        for step in range(2):
            state = algorithm.update(state, PARAMS, step)
        assert optree.tree_structure(state) == structure


# ---- gradients that are not finite ---------------------------------------------------

SKIPPING = {
    "rigl": lambda: sf.rigl(0.6, when=sf.always(), key=sf.random.key(3)),
    "snfs": lambda: sf.snfs(0.6, when=sf.always(), key=sf.random.key(3)),
    "ste": lambda: sf.ste(0.6),
    "supermask": lambda: sf.supermask(0.6, mode="joint"),
    "partition": lambda: sf.partition(
        [("w", sf.set(0.5, when=sf.always())), ("v", sf.reparametrised(POWER))]
    ),
}
POWER = sf.reparam.power(2.0)


def spoiled(grads, path, at, value):
    return {**grads, path: grads[path].index_fill(0, torch.tensor(at), value)}


@pytest.mark.parametrize("name", SKIPPING)
def test_a_step_with_gradients_that_are_not_finite_changes_nothing(name):
    algorithm = sf.with_optimizer(
        SKIPPING[name](),
        sf.optimizers.adamw(0.02),
        skip_nonfinite=True,
        reset=lambda step: step == 5,
    )
    always = sf.with_optimizer(
        SKIPPING[name](), sf.optimizers.adamw(0.02), reset=lambda step: step == 5
    )
    state = algorithm.init(PARAMS)
    for step in range(7):
        grads = slopes(sf.effective(state))
        for path, at, value in (
            ("w", 5, math.nan),
            ("v", 0, math.inf),
            ("b", 4, -math.inf),
        ):
            same = algorithm.update(state, spoiled(grads, path, at, value), step)
            assert sf.checkpoint.tree_equal(same, state)
        new = algorithm.update(state, grads, step)
        assert sf.checkpoint.tree_equal(new, always.update(state, grads, step))
        state = new


def test_a_gradient_that_is_not_finite_counts_at_a_pruned_weight_too():
    algorithm = sf.with_optimizer(
        sf.rigl(0.6, when=sf.always()), sf.optimizers.sgd(0.1), skip_nonfinite=True
    )
    state = algorithm.init(PARAMS)
    grads = {**PARAMS, "w": torch.where(state.masks["w"], PARAMS["w"], math.nan)}
    assert sf.checkpoint.tree_equal(algorithm.update(state, grads, 0), state)


@pytest.mark.deep
def test_steps_are_skipped_member_by_member_and_in_compiled_code():
    torch._dynamo.reset()
    algorithm = sf.with_optimizer(
        sf.static(0.5), sf.optimizers.sgd(0.1, momentum=0.9), skip_nonfinite=True
    )
    state, grads = algorithm.init(PARAMS), slopes(PARAMS)
    members = [
        grads,
        spoiled(grads, "b", 1, math.nan),
        spoiled(grads, "w", 2, math.inf),
    ]
    loop = [algorithm.update(state, member, 0) for member in members]
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *members)
    batched = torch.vmap(lambda grads: algorithm.update(state, grads, 0))(stacked)
    assert sf.checkpoint.tree_equal(
        batched, optree.tree_map(lambda *leaves: torch.stack(leaves), *loop)
    )
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    for member, want in zip(members, loop, strict=True):
        assert sf.checkpoint.tree_equal(compiled(state, member, 0), want)


def test_elsewhere_than_on_the_cpu_the_gradients_are_not_read():
    params = optree.tree_map(lambda p: p.to("meta"), PARAMS)
    algorithm = sf.with_optimizer(
        sf.static(0.5, key=sf.random.key(0)),
        sf.optimizers.sgd(0.1),
        skip_nonfinite=True,
    )
    state = sf.State(
        params, optree.tree_map(lambda p: torch.ones_like(p, dtype=torch.bool), params)
    )
    state = state._replace(
        key=algorithm.init(PARAMS).key, opt=sf.optimizers.sgd(0.1).init(params)
    )
    # a value of the meta device cannot be read
    new = algorithm.update(state, params, 0)
    assert all(leaf.is_meta for leaf in optree.tree_leaves(new.params))


def test_a_skipped_step_needs_no_gradients():
    algorithm = sf.with_optimizer(
        sf.gmp(0.5), sf.optimizers.sgd(0.1), skip=sf.always(), skip_nonfinite=True
    )
    assert algorithm.update(algorithm.init(PARAMS), None, 0).masks["w"].sum() == 24


# ---- compiled ------------------------------------------------------------------------

ODD = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, 1e-30, 2.0, -0.5])


def masked_leaves():
    """A sparse and a dense leaf: gradients, moments and params that are odd off the
    mask, too, and the masks.
    """
    draw = torch.Generator().manual_seed(5)
    mask = torch.rand(33, 7, generator=draw) < 0.5
    on, off = (
        torch.randn(33, 7, generator=draw),
        ODD[torch.randint(0, len(ODD), (33, 7), generator=draw)],
    )
    leaf, dense = torch.where(mask, on, off), torch.randn(5, generator=draw)
    trees = [
        {"b": dense.roll(i), "w": torch.where(mask, on.roll(i, 0), off.roll(i, 0))}
        for i in range(3)
    ]
    grads, mu, params = trees
    nu = {"b": dense.square(), "w": leaf.square()}
    return grads, mu, nu, params, {"b": torch.tensor(True), "w": mask}


def odd_state(algorithm, optimizer):
    """A state of a stepped algorithm whose params and moments are odd off the masks,
    and gradients as odd.
    """
    grads, mu, nu, params, masks = masked_leaves()
    state = algorithm.init(params)
    moments = (
        {"momentum": mu} if "momentum" in state.opt._fields else {"mu": mu, "nu": nu}
    )
    return state._replace(
        params=params, masks=masks, opt=state.opt._replace(**moments)
    ), grads


STEPPED = {
    "adam": sf.optimizers.adam(0.01),
    "adam, decay": sf.optimizers.adam(0.01, weight_decay=0.1),
    "adamw": sf.optimizers.adamw(0.01),
    "sgd": sf.optimizers.sgd(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", STEPPED)
def test_compiled_steps_have_the_bits_of_eager_ones(name, backend):
    masks = masked_leaves()[-1]
    for options in (
        {},
        {"mask_moments": False},
        {"mask_moments": False, "reset_grown": False},
    ):
        algorithm = sf.with_optimizer(sf.from_masks(masks), STEPPED[name], **options)
        state, grads = odd_state(algorithm, STEPPED[name])
        got = torch.compile(algorithm.update, fullgraph=True, backend=backend)(
            state, grads, torch.tensor(1)
        )
        assert_same("states", got, algorithm.update(state, grads, 1))


@pytest.mark.deep
@pytest.mark.parametrize(
    "options",
    [{}, {"reset_grown": False}, {"skip": sf.at([1])}, {"skip": sf.at([2])}],
    ids=str,
)
def test_compiled_scores_see_moments_off_the_masks_and_grown_weights_start_anew(
    options,
):
    def moment(state, grads, step):
        # no optimizer yet while masks are made
        return state.opt.mu if state.opt else grads

    grads, mu, nu, params, _ = (
        optree.tree_map(
            lambda x: x.nan_to_num(1.0, 2.0, 3.0) if x.is_floating_point() else x, tree
        )
        for tree in masked_leaves()
    )
    drop, starts = sf.scores.magnitude, {"init": "magnitude", "drop_fraction": 0.3}
    inner = sf.drop_grow(0.5, drop=drop, grow=moment, when=sf.at([1]), **starts)
    algorithm = sf.with_optimizer(inner, sf.optimizers.adam(0.01), **options)
    state = algorithm.init(params)
    state = state._replace(opt=state.opt._replace(mu=mu, nu=nu))
    update = torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")
    for step in range(1, 4):
        want = algorithm.update(state, grads, step)
        assert step > 1 or not torch.equal(want.masks["w"], state.masks["w"])
        assert_same("states", update(state, grads, torch.tensor(step)), want)
        state = want


@pytest.mark.deep
@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
def test_without_guards_on_globals_every_step_has_the_bits_of_the_eager_one(kind):
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
    algorithm = sf.with_optimizer(
        sf.rigl(0.5, when=sf.every(3)), sf.optimizers.adam(0.01)
    )
    update = torch.compile(
        algorithm.update, fullgraph=True, backend="aot_eager", options=options
    )
    for params in (PARAMS, {"w": PARAMS["v"], "b": PARAMS["b"]}):
        state, changes = algorithm.init(params), 0
        for step in range(20):
            grads = slopes(state.params)
            want = algorithm.update(state, grads, step)
            assert_same(f"step {step}", update(state, grads, kind(step)), want)
            changes += not torch.equal(want.masks["w"], state.masks["w"])
            state = want
        assert changes > 3


@pytest.mark.deep
def test_gradients_through_a_compiled_step_are_finite():
    # The whole gradient has infinities off the mask, whose slope is NaN.
    mask, rate = torch.tensor([True, False]), torch.tensor(0.5, dtype=torch.float64)

    def stepped(g, rate):
        algorithm = sf.with_optimizer(
            sf.from_masks({"w": mask}), sf.optimizers.adam(rate)
        )
        return (
            algorithm.update(algorithm.init({"w": torch.ones(2)}), {"w": g}, 1)
            .params["w"]
            .sum()
        )

    g = torch.tensor([2.0, math.inf])
    by_rate, by_gradient = (
        torch.compile(
            torch.func.grad(stepped, argnums=i), fullgraph=True, backend="eager"
        )(g, rate)
        for i in (1, 0)
    )
    leaves = [x.clone().requires_grad_() for x in (g, rate)]
    torch.compile(stepped, fullgraph=True, backend="eager")(*leaves).backward()
    for slope, size in ((by_gradient, by_rate), [x.grad for x in leaves]):
        assert (
            slope[1] == 0
            and slope.isfinite().all()
            and size.item() == pytest.approx(-1)
        )
