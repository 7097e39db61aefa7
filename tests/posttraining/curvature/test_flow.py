"""GraSP and SynFlow, against brute force on small nets; sensitivity, against SNIP,
SynFlow and ProsPr.
"""

import copy
import functools
import itertools
import re

import optree
import pytest
import torch
from small_losses import (
    C,
    X,
    Y,
    flat,
    hessian_and_gradient,
    loss,
    sparse_part,
    state_of,
)
from torch import nn

import sparsefn as sf


def test_grasp_is_weight_times_hessian_times_gradient():
    state = state_of()
    hessian, gradient = hessian_and_gradient(state)
    found = C.grasp(loss, (X, Y), temperature=1.0)(state, (), 0)
    assert torch.allclose(
        sparse_part(found), sparse_part(state.params) * (hessian @ gradient), atol=1e-13
    )
    assert not found["bias"].any()  # not sparsified, and a constant of the loss


def test_grasp_prunes_where_the_norm_of_the_gradient_falls_least():
    # S(-w) of the paper is, to first order, half the change of |gradient|^2 as the
    # weight is removed.
    state = state_of(masked=False)

    def half_norm(params):
        gradient = torch.func.grad(loss)(params, X, Y)
        return sum(gradient[name].square().sum() for name in ("a", "b")) / 2

    change = optree.tree_map(
        lambda w, d: -w * d, state.params, torch.func.grad(half_norm)(state.params)
    )
    algorithm = sf.one_shot(
        0.25, C.grasp(loss, (X, Y), 1.0), distribution=sf.budgets.global_()
    )
    after = algorithm.update(algorithm.init(state.params), state.params, 0)
    gone, kept = (
        sparse_part(change)[sparse_part(after.masks) == flag] for flag in (False, True)
    )
    assert len(gone) == 5 and gone.min() > kept.max()


def test_grasp_divides_the_logits_by_200_as_its_authors_do():
    state, batch = state_of(), (X, Y)
    found = C.grasp(loss, batch)(state, (), 0)
    by_hand = C.grasp(
        lambda *args: loss(*args, temperature=200.0), batch, temperature=None
    )(state, (), 0)
    assert sf.checkpoint.tree_equal(found, by_hand)
    assert sf.checkpoint.tree_equal(
        found, C.grasp(lambda *args, **rest: loss(*args, **rest), batch)(state, (), 0)
    )
    at_one = C.grasp(loss, batch, 1.0)(state, (), 0)
    assert not torch.allclose(
        found["a"] / found["a"].abs().sum(),
        at_one["a"] / at_one["a"].abs().sum(),
        rtol=0.1,
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: C.grasp(functools.partial(plain), (X, Y)),
            TypeError,
            "grasp: expected a loss that divides its logits by its keyword "
            "temperature, which GraSP sets to 200.0, got partial without this "
            "keyword; temperature=None calls it as it is",
        ),
        (
            lambda: sf.methods.grasp(0.5, plain, (X, Y), temperature=2),
            TypeError,
            "sets to 2.0, got plain without",
        ),
        (
            lambda: C.grasp(lambda params, temperature, /: 0.0, ()),
            TypeError,
            "without this keyword; temperature",
        ),
        (
            lambda: C.grasp(loss, (X, Y), 0.0),
            ValueError,
            "expected temperature > 0, got 0.0",
        ),
        (
            lambda: C.grasp(loss, (X, Y), "hot"),
            TypeError,
            "expected temperature to be a number or a 0-d float tensor",
        ),
    ],
)
def test_a_loss_without_a_temperature_is_refused(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def plain(params, x, y):
    return loss(params, x, y)


def mlp(*sizes, bias=False):
    layers = [nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(
        *[part for layer in layers for part in (layer, nn.ReLU())][:-1]
    )


def reference_synflow(module, shape):
    """On a copy whose weights and buffers are overwritten, with one backward pass."""
    twin = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        for value in twin.state_dict().values():
            value.abs_()
    twin(torch.ones(1, *shape, dtype=torch.float64)).sum().backward()
    return {name: (p * p.grad).detach().abs() for name, p in twin.named_parameters()}


def unpruned(params):
    return sf.State(
        params,
        {
            name: torch.ones_like(leaf, dtype=torch.bool)
            for name, leaf in params.items()
        },
    )


def test_synflow_is_one_backward_pass_of_the_absolute_network():
    net = mlp(5, 7, 4)
    state = unpruned(sf.modules.params_of(net))
    found = C.synflow(net, (5,))(state, (), 0)
    for name, expected in reference_synflow(net, (5,)).items():
        assert torch.allclose(found[name], expected, rtol=1e-12)
    sums = [score.sum().item() for score in found.values()]
    # every layer's scores sum to the flow
    assert sums == pytest.approx([sums[0]] * 2, rel=1e-12)


def test_synflow_of_a_function_and_where_weights_are_pruned():
    net = mlp(3, 4, 2)
    params = sf.modules.params_of(net)
    state = sf.static(0.5, where="*").init(params)

    def forward(params, x):
        return torch.relu(x @ params["0.weight"].T) @ params["2.weight"].T

    found, other = (C.synflow(run, (3,))(state, (), 0) for run in (net, forward))
    for name, mask in state.masks.items():
        assert torch.allclose(found[name], other[name])
        assert not found[name][~mask].any()


def test_synflow_leaves_a_module_in_training_as_it_is_and_draws_nothing():
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(12, 2),
    )
    net[1].running_mean.fill_(-0.5)
    before, generator = (
        {name: x.clone() for name, x in net.state_dict().items()},
        torch.get_rng_state(),
    )
    state = unpruned(sf.modules.params_of(net))
    score = C.synflow(net, (2, 4, 4))
    found = score(state, (), 0)
    assert net.training and net[1].training
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    for name, expected in reference_synflow(net, (2, 4, 4)).items():
        assert torch.allclose(found[name], expected, rtol=1e-9)
    net[1].running_var.fill_(9.0)
    assert sf.checkpoint.tree_equal(found, score(state, (), 0))  # nor is it read again


def test_synflow_scores_weights_alone_in_a_network_of_absolute_biases_and_norms():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    params = {
        name: w.neg() if "bias" in name else w
        for name, w in sf.modules.params_of(net).items()
    }
    params["1.bias"] = torch.tensor([-3.0, 1.0, -1.0, 0.0])
    net.load_state_dict({**net.state_dict(), **params})
    found = C.synflow(net, (3,))(
        sf.one_shot(0.5, where=["0.weight", "3.weight"]).init(params), (), 0
    )
    for name, expected in reference_synflow(net, (3,)).items():
        assert torch.allclose(
            found[name], expected if name in ("0.weight", "3.weight") else 0 * expected
        )


def test_synflow_does_not_overflow_in_a_deep_network():
    net = mlp(*[8] * 70)
    state = unpruned(
        optree.tree_map(lambda w: torch.full_like(w, 9.0), sf.modules.params_of(net))
    )
    scores = flat(C.synflow(net, (8,))(state, (), 0))
    assert (
        torch.isfinite(scores).all() and scores.min() > torch.finfo(torch.float32).max
    )


def test_synflow_in_a_hundred_rounds_reaches_the_count_and_keeps_every_layer():
    net, sparsity = mlp(20, 30, 30, 30, 10), 0.99
    params = sf.modules.params_of(net)

    def rounds(n):
        algorithm = sf.gmp(
            lambda step: 1 - (1 - sparsity) ** ((step + 1) / n),
            when=sf.every(1, stop=n),
            init="dense",
            score=C.synflow(net, (20,)),
            distribution=sf.budgets.global_(),
            where="*",
        )
        states = [algorithm.init(params)]
        for step in range(n + 1):
            states.append(algorithm.update(states[-1], params, step))
        return states

    total, states = sum(leaf.numel() for leaf in params.values()), rounds(100)
    counts = [int(flat(state.masks).sum()) for state in states]
    assert counts[1:101] == [
        sf.budgets.n_kept(total, 1 - (1 - sparsity) ** ((i + 1) / 100))
        for i in range(100)
    ]
    assert counts[-1] == counts[-2] == sf.budgets.n_kept(total, sparsity) == 27
    x = torch.ones(1, 20)
    flow = {
        n: sf.modules.call(
            net, optree.tree_map(torch.abs, sf.effective(rounds(n)[-1])), x
        ).sum()
        for n in (1, 100)
    }
    assert flow[100] > 0 and flow[100] > flow[1]  # a path is left from input to output


def scores():
    return {
        "fisher": C.fisher(loss, (X, Y), chunk_size=4),
        "obd": C.obd(C.fisher(loss, (X, Y))),
        "exact": C.hessian_diagonal(loss, (X, Y), chunk_size=8),
        "estimate": C.hessian_diagonal(loss, (X, Y), 2),
        "grasp": C.grasp(loss, (X, Y)),
        "synflow": C.synflow(
            lambda p, x: torch.relu(x @ p["a"].T + p["bias"]) @ p["b"].T, (2,)
        ),
    }


# ---- sensitivity ----

NET = nn.Sequential(
    nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)
).double()
PARAMS = sf.modules.params_of(NET)
INPUTS = torch.randn(
    8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)
LABELS = torch.arange(8) % 3
STATE = sf.one_shot(0.5).init(PARAMS)


def of_net(params, x, y):
    return nn.functional.cross_entropy(sf.modules.call(NET, params, x), y)


def test_sensitivity_of_a_loss_is_saliency():
    found = sf.curvature.sensitivity(of_net, (INPUTS, LABELS))(STATE, (), 0)
    expected = sf.scores.saliency(
        STATE, torch.func.grad(of_net)(PARAMS, INPUTS, LABELS), 0
    )
    assert all(torch.equal(found[path], expected[path]) for path in PARAMS)


def test_sensitivity_at_absolute_weights_is_synflow():
    def flow(params, ones):
        return sf.modules.call(NET, params, ones).sum()

    score = sf.curvature.sensitivity(
        flow,
        (torch.ones(1, 6).double(),),
        at=lambda params: optree.tree_map(torch.abs, params),
    )
    found, expected = score(STATE, (), 0), sf.curvature.synflow(NET, (6,))(STATE, (), 0)
    assert all(
        torch.allclose(found[path], expected[path], rtol=1e-12) for path in PARAMS
    )
    sums = [float(leaf.sum()) for leaf in found.values()]
    # what flows through a layer flows through every one
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def trained(steps):
    def objective(params, x, y):
        for _ in range(steps):
            grads = torch.func.grad(of_net)(params, x, y)
            params = optree.tree_map(lambda w, g: w - 0.1 * g, params, grads)
        return of_net(params, x, y)

    return sf.curvature.sensitivity(objective, (INPUTS, LABELS))


def test_prospr_without_inner_steps_is_snip():
    snip = sf.curvature.sensitivity(of_net, (INPUTS, LABELS))(STATE, (), 0)
    assert all(
        torch.equal(trained(0)(STATE, (), 0)[path], snip[path]) for path in PARAMS
    )
    assert not any(
        torch.equal(trained(2)(STATE, (), 0)[path], snip[path]) for path in PARAMS
    )


def test_sensitivity_under_masks_with_other_leaves_and_batches_by_step():
    params = {"w": torch.tensor([2.0, -1.0, 3.0]), "b": torch.ones(3)}
    masks = {"w": torch.tensor([True, True, False]), "b": torch.tensor(True)}
    score = sf.curvature.sensitivity(
        lambda p, x: x * (p["w"] + p["b"]).square().sum(), lambda step: (step + 1.0,)
    )
    found = score(sf.State(params, masks), None, 1)
    assert found["w"].tolist() == [24.0, 0.0, 12.0] and found["b"].tolist() == [
        0.0,
        0.0,
        0.0,
    ]


def test_errors_of_sensitivity():
    with pytest.raises(TypeError, match=r"expected loss to be a function"):
        sf.curvature.sensitivity("loss")
    with pytest.raises(
        TypeError, match=r"expected batch to be a tuple of the loss's arguments"
    ):
        sf.curvature.sensitivity(of_net, INPUTS)
    with pytest.raises(TypeError, match=r"expected at to be a function of \(params\)"):
        sf.curvature.sensitivity(of_net, (INPUTS, LABELS), at=lambda: 1)
    with pytest.raises(
        ValueError, match="expected the loss to be a 0-d tensor, got shape"
    ):
        sf.curvature.sensitivity(lambda p: p["0.weight"])(STATE, (), 0)
    with pytest.raises(ValueError, match="what `at` gives"):
        sf.curvature.sensitivity(
            of_net, (INPUTS, LABELS), at=lambda params: {"other": INPUTS}
        )(STATE, (), 0)
