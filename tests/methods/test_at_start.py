"""Pruning at initialisation by name: the authors' recordings, worked examples,
identities.
"""

import math

import pytest
import torch
from golden_data import cases
from test_golden_literature import (
    cross_entropy,
    linears,
    module_of,
    named,
    same_masks,
    summed_loss,
    under,
)
from torch import nn
from torch.nn import functional

import sparsefn as sf


def sparsity_of(masks):
    """The sparsity that keeps as many as these masks: the authors' code truncates, so
    that counts are given.
    """
    total = sum(mask.numel() for mask in masks.values())
    return torch.tensor(
        1 - sum(int(mask.sum()) for mask in masks.values()) / total, dtype=torch.float64
    )


def rounds_of(algorithm, params, grads_at, rounds):
    state = algorithm.init(params)
    for step in range(rounds):
        state = algorithm.update(state, grads_at(state), step)
    return state


# ---- SNIP ----------------------------------------------------------------------------


@named("synflow_repo", "SNIP")
def test_snip_keeps_what_its_recording_keeps(case):
    module, params = module_of(case)
    masks, x, y = (
        under(case.outputs, "mask"),
        under(case.inputs, "x"),
        under(case.inputs, "y"),
    )
    algorithm = sf.methods.snip(sparsity_of(masks), batches=len(x), where=list(masks))
    state = algorithm.init(params)
    for step, i in enumerate(x):
        assert all(state.masks[name].all() for name in masks)
        state = algorithm.update(
            state, torch.func.grad(cross_entropy(module))(params, x[i], y[i]), step
        )
    assert same_masks(state.masks, masks)


def test_gradients_of_opposite_sign_cancel_over_batches():
    algorithm = sf.methods.snip(0.5, batches=2, where="*")
    state = algorithm.init({"w": torch.tensor([2.0, -1.0, 0.5, 3.0])})
    grad = torch.tensor([0.1, -0.4, 1.0, -0.05])
    state = algorithm.update(state, {"w": grad}, 0)
    # All scores are 0, so that the lowest indices stay; by |w g| of each batch the
    # second and third would.
    assert algorithm.update(state, {"w": -grad}, 1).masks["w"].tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_rescaled_layers_have_the_same_scores():
    x, y = (
        torch.randn(16, 6, dtype=torch.float64),
        torch.randn(16, 4, dtype=torch.float64),
    )
    params = {
        "a": torch.randn(5, 6, dtype=torch.float64),
        "b": torch.randn(4, 5, dtype=torch.float64),
    }
    scaled = {"a": 4.0 * params["a"], "b": params["b"] / 4}

    def loss(p):
        return (torch.relu(x @ p["a"].T) @ p["b"].T - y).square().mean()

    algorithm = sf.methods.snip(0.5)
    found = [
        algorithm.update(algorithm.init(p), torch.func.grad(loss)(p), 0).masks
        for p in (params, scaled)
    ]
    assert same_masks(*found)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: sf.methods.snip(0.5, batches=0),
            ValueError,
            "snip: expected batches >= 1, got 0",
        ),
        (
            lambda: sf.methods.snip(0.5, batches=1.0),
            TypeError,
            "snip: expected batches to be an int, got float",
        ),
        (
            lambda: sf.methods.force(0.5, rounds=0),
            ValueError,
            "force: expected rounds >= 1, got 0",
        ),
        (
            lambda: sf.methods.force(1.5),
            ValueError,
            r"in \[0, 1\], got 1.5",
        ),
        (
            lambda: sf.methods.synflow(0.5, len, (1,), rounds=0),
            ValueError,
            "synflow: expected rounds >= 1, got 0",
        ),
        (
            lambda: sf.methods.synflow(0.5, len, (0,)),
            TypeError,
            "expected input_shape to be positive ints",
        ),
        (lambda: sf.methods.grasp(0.5, None), TypeError, "loss"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- FORCE ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", cases("force", "iterative_pruning"), ids=lambda case: case.id
)
def test_force_keeps_what_its_recording_keeps(case):
    module = linears(6, 10, 8, 4)
    module = nn.Sequential(*module, nn.LogSoftmax(-1)).double()
    params, masks = under(case.inputs, "param"), under(case.outputs, "mask")
    total, steps, factor = (
        sum(mask.numel() for mask in masks.values()),
        case.args["steps"],
        case.args["factor"],
    )

    def level(step):  # their counts, which are truncated
        part = (int(step) + 1) / steps
        share = (
            math.exp(part * math.log(factor))
            if case.args["mode"] == "exp"
            else 1 - part * (1 - factor)
        )
        return torch.tensor(1 - int(total * share) / total, dtype=torch.float64)

    def grads_at(state):
        def loss(p):
            return functional.nll_loss(
                sf.modules.call(module, p, case.inputs["x"]), case.inputs["y"]
            )

        return torch.func.grad(loss)(sf.effective(state))

    # GraSP-It: the same rounds, by the square of the gradient
    if case.args["method"] == 2:

        @sf.scores.absolute
        def squared(state, grads, step):
            return {name: g * g for name, g in grads.items()}

        rounds = sf.every(1, stop=steps)
        algorithm = sf.gmp(
            level,
            score=squared,
            when=rounds,
            init="dense",
            distribution=sf.budgets.global_(),
            where=list(masks),
        )
    else:
        algorithm = sf.methods.force(
            level, rounds=steps, recover=case.args["method"] == 3, where=list(masks)
        )
    state = rounds_of(algorithm, params, grads_at, steps)
    assert same_masks(state.masks, masks)
    if case.args["method"] == 3:
        assert all(torch.equal(state.params[name], w) for name, w in params.items())


def test_a_weight_may_come_back_only_with_recover():
    params = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    grads = [torch.tensor([0.1, 0.3, 0.21, 0.05]), torch.tensor([0.9, 0.01, 0.2, 0.3])]
    kept = []
    for recover in (True, False):
        algorithm = sf.methods.force(0.75, rounds=2, recover=recover, where="*")
        state = algorithm.init(params)
        for step, g in enumerate(grads):
            state = algorithm.update(state, {"w": g}, step)
        kept.append(state.masks["w"].tolist())
    assert kept == [[False, False, False, True], [False, False, True, False]]


# ---- GraSP ---------------------------------------------------------------------------


@named("grasp", "GraSP")
def test_grasp_keeps_what_its_recording_keeps(case):
    module = linears(6, 10, 8, 4, activations=(nn.Tanh, nn.ReLU)).double()
    params, masks = under(case.inputs, "param"), under(case.outputs, "mask")
    x, y, loss = case.inputs["x"], case.inputs["y"], cross_entropy(module)
    half = len(y) // 2

    def both(params, **rest):  # they take the batch in halves, and add the two losses
        return loss(params, x[:half], y[:half], **rest) + loss(
            params, x[half:], y[half:], **rest
        )

    algorithm = sf.methods.grasp(
        sparsity_of(masks), both, temperature=case.args["T"], where=list(masks)
    )
    assert same_masks(algorithm.update(algorithm.init(params), params, 0).masks, masks)


@named("synflow_repo", "GraSP")
def test_grasp_keeps_what_the_repository_of_synflow_keeps(case):
    module, params = module_of(case)
    masks = under(case.outputs, "mask")
    algorithm = sf.methods.grasp(
        sparsity_of(masks), summed_loss(case, module), where=list(masks)
    )
    assert same_masks(algorithm.update(algorithm.init(params), params, 0).masks, masks)


def test_scores_of_grasp_sum_to_the_gradient_times_the_hessian_times_the_weights():
    n = 6
    a = torch.randn(n, n, dtype=torch.float64)
    params = {"w": torch.randn(2, 3, dtype=torch.float64)}

    def loss(p):
        w = p["w"].reshape(-1)
        return torch.tanh(a @ w).square().sum()

    score = sf.curvature.grasp(loss, (), None)(sf.one_shot(0.5).init(params), (), 0)[
        "w"
    ]
    flat = params["w"].reshape(-1)
    hessian = torch.func.hessian(lambda w: loss({"w": w}))(flat)
    gradient = torch.func.grad(lambda w: loss({"w": w}))(flat)
    assert torch.allclose(score.sum(), gradient @ hessian @ flat, rtol=1e-10)
    found = [
        sf.methods.grasp(0.5, lambda p, c=c: c * loss(p), temperature=None)
        for c in (1.0, 8.0)
    ]
    assert same_masks(
        *(
            algorithm.update(algorithm.init(params), params, 0).masks
            for algorithm in found
        )
    )


# ---- SynFlow -------------------------------------------------------------------------


@named("synflow_repo", "SynFlow_rounds")
def test_synflow_keeps_what_its_recording_keeps(case):
    module, params = module_of(case)
    masks, rounds, density = (
        under(case.outputs, "mask"),
        case.args["rounds"],
        case.args["density"],
    )
    n = sum(mask.numel() for mask in masks.values())
    shape = (6,) if case.args["model"].startswith("mlp") else (2, 4, 4)

    def level(step):  # their count of what goes is truncated
        return torch.tensor(
            int((1 - density ** ((step + 1) / rounds)) * n) / n, dtype=torch.float64
        )

    algorithm = sf.methods.synflow(
        level, module, shape, rounds=rounds, where=list(masks)
    )
    state = rounds_of(algorithm, params, lambda state: state.params, rounds)
    # Theirs drops everything at the threshold, so that a tie may cost a weight more.
    assert not any((mask & ~state.masks[name]).any() for name, mask in masks.items())
    assert (
        sum(int((state.masks[name] & ~mask).sum()) for name, mask in masks.items()) <= 1
    )


def test_what_flows_is_conserved():
    net = linears(5, 7, 6, 3, bias=False)
    params = sf.modules.params_of(net)
    state = rounds_of(
        sf.methods.synflow(0.6, net, (5,), rounds=4),
        params,
        lambda state: state.params,
        3,
    )
    scores = sf.curvature.synflow(net, (5,))(state, (), 0)
    absolute = {name: w.double().abs() for name, w in sf.effective(state).items()}
    flow = sf.modules.call(
        net.double(), absolute, torch.ones(1, 5, dtype=torch.float64)
    ).sum()
    assert flow > 0
    assert all(
        torch.allclose(score.sum(), flow, rtol=1e-12) for score in scores.values()
    )


def test_the_last_round_has_the_sparsity_itself():
    # 1 - (1 - 0.05) is more than 0.05, and would prune 1 of 10, where 0.05 rounds to
    # none.
    weights = {"w": torch.arange(1.0, 11.0)}
    for sparsity in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        for step in (2, torch.tensor(2)):
            algorithm = sf.methods.force(sparsity, rounds=3, where="*")
            state = algorithm.update(algorithm.init(weights), weights, step)
            assert int(state.masks["w"].sum()) == 10


def test_the_share_that_is_kept_shrinks_by_the_same_factor():
    net = linears(5, 10, 10, 5, bias=False)
    algorithm, counts = sf.methods.synflow(0.75, net, (5,), rounds=2), []
    state = algorithm.init(sf.modules.params_of(net))
    for step in range(3):
        state = algorithm.update(state, state.params, step)
        counts.append(sum(int(mask.sum()) for mask in state.masks.values()))
    assert counts == [100, 50, 50]
