"""`reparametrised`: the latents train exactly as they would by automatic
differentiation.
"""

import functools

import optree
import pytest
import torch
import torchopt

import sparsefn as sf
from sparsefn.algorithms.reparam import Reparametrisation

X, Y = (
    torch.randn(16, 5, generator=torch.Generator().manual_seed(1)),
    torch.arange(16) % 3,
)

OPTIMIZERS = {
    "sgd": lambda: sf.optimizers.sgd(0.2),
    "momentum": lambda: sf.optimizers.sgd(0.1, momentum=0.9, weight_decay=0.02),
    "adam": lambda: sf.optimizers.adam(0.02, weight_decay=0.05),
    "adamw": lambda: sf.optimizers.adamw(0.02, weight_decay=0.1),
    "torchopt-adamw": lambda: torchopt.adamw(0.02, weight_decay=0.1),
    "torchopt-nesterov": lambda: torchopt.sgd(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.02
    ),
}


def start():
    make = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=make)
    return {
        "0": {"weight": draw(7, 5) * 0.5, "bias": draw(7) * 0.1},
        "1": {"weight": draw(3, 7) * 0.5},
    }


def loss(params):
    hidden = torch.tanh(X @ params["0"]["weight"].T + params["0"]["bias"])
    return torch.nn.functional.cross_entropy(hidden @ params["1"]["weight"].T, Y)


def autograd(fn, tree):
    leaves, treedef = optree.tree_flatten(tree)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return optree.tree_unflatten(
        treedef, torch.autograd.grad(fn(optree.tree_unflatten(treedef, leaves)), leaves)
    )


def train_directly(weights_of, trained, optimizer, steps):
    """Automatic differentiation through the map, with no part of the library but the
    optimizer.
    """

    def whole(tree, step):
        made = weights_of(tree["latent"], step)
        return {
            "0": {"weight": made["0.weight"], "bias": tree["rest"]["0.bias"]},
            "1": {"weight": made["1.weight"]},
        }

    moments = optimizer.init(trained)
    for step in range(steps):
        grads = autograd(lambda tree, step=step: loss(whole(tree, step)), trained)
        updates, moments = optimizer.update(
            grads, moments, params=trained, inplace=False
        )
        trained = optree.tree_map(torch.add, trained, updates)
    return trained


def run(algorithm, steps, state=None):
    state = algorithm.init(start()) if state is None else state
    for step in range(steps):
        state = algorithm.update(state, autograd(loss, sf.effective(state)), step)
    return state


def soft(latents, step):
    return {
        path: torch.sign(v)
        * torch.relu(v.abs() - torch.sigmoid(latents["threshold"][path]))
        for path, v in latents["latent"].items()
    }


def power(alpha, latents, step):
    return {path: v * v.abs() ** (alpha - 1) for path, v in latents["latent"].items()}


MAPS = {
    "soft_threshold": (sf.reparam.soft_threshold(torch.sigmoid, init=-2.0), soft),
    "power-2": (sf.reparam.power(2.0), functools.partial(power, 2.0)),
    "power-3.5": (sf.reparam.power(3.5), functools.partial(power, 3.5)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MAPS)
def test_latents_train_bit_for_bit_as_by_autograd(name, optimizer):
    reparam, weights_of = MAPS[name]
    algorithm = sf.with_optimizer(sf.reparametrised(reparam), OPTIMIZERS[optimizer]())
    first = algorithm.init(start())
    trained = algorithm.view.get(first)
    assert set(trained["rest"]) == {"0.bias"}
    state = run(algorithm, 20)
    expected = train_directly(weights_of, trained, OPTIMIZERS[optimizer](), 20)
    assert sf.checkpoint.tree_equal(algorithm.view.get(state), expected)
    made = weights_of(expected["latent"], 20)
    assert torch.equal(sf.effective(state)["0"]["weight"], made["0.weight"])
    if name == "soft_threshold":
        assert 0 < sf.masks.sparsity(state.masks) < 1
        assert torch.equal(state.masks["1"]["weight"], made["1.weight"] != 0)


def test_without_decay_on_the_threshold_nothing_is_ever_pruned():
    # Kusupati et al. 2020 start at -3200, where sigmoid has no slope in float32.
    reparam = sf.reparam.soft_threshold(init=-3200.0)
    for decay, moved in ((0.0, False), (0.1, True)):
        algorithm = sf.with_optimizer(
            sf.reparametrised(reparam), sf.optimizers.sgd(0.5, weight_decay=decay)
        )
        state = run(algorithm, 5)
        thresholds = state.scores["latent"]["threshold"].values()
        assert all((float(s) > -3200.0) == moved for s in thresholds)
        assert sf.masks.sparsity(state.masks) == 0.0


# ---- maps that draw or follow a schedule ---------------------------------------------


def hard_concrete(beta=2 / 3, gamma=-0.1, zeta=1.1):
    """Gates of Louizos et al. 2018, with the draw given by the key, the path and the
    step.
    """

    def gate(log_alpha, u):
        s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + log_alpha) / beta)
        return (s * (zeta - gamma) + gamma).clamp(0, 1)

    def init(leaves, key):
        return {
            "latent": dict(leaves),
            "gate": {path: torch.zeros_like(leaf) for path, leaf in leaves.items()},
        }

    def apply(latents, step, key):
        weights, masks = {}, {}
        for path, v in latents["latent"].items():
            u = sf.random.uniform(sf.random.leaf_key(key, path, step), v.shape).clamp(
                1e-6, 1 - 1e-6
            )
            z = gate(latents["gate"][path], u)
            weights[path], masks[path] = z * v, (z > 0).detach()
        return weights, masks

    return gate, Reparametrisation(init, apply)


def test_hard_concrete_gates_have_the_values_of_the_paper():
    gates = hard_concrete()[0](torch.zeros(3), torch.tensor([0.5, 0.9, 0.05]))
    torch.testing.assert_close(gates, torch.tensor([0.5, 1.0, 0.0]))


def test_random_maps_are_differentiated_at_the_step_they_were_drawn_at():
    reparam, key = hard_concrete()[1], sf.random.key(7)
    algorithm = sf.with_optimizer(
        sf.reparametrised(reparam, key=key), sf.optimizers.adam(0.05)
    )
    first = algorithm.init(start())
    state = run(algorithm, 10)
    assert int(state.scores["step"]) == 10
    expected = train_directly(
        lambda latents, step: reparam.apply(latents, step, key)[0],
        algorithm.view.get(first),
        sf.optimizers.adam(0.05),
        10,
    )
    assert sf.checkpoint.tree_equal(algorithm.view.get(state), expected)


def test_a_skipped_step_draws_anew_and_trains_nothing():
    algorithm = sf.with_optimizer(
        sf.reparametrised(hard_concrete()[1]),
        sf.optimizers.sgd(0.1, momentum=0.9),
        skip=sf.at([1]),
    )
    one = run(algorithm, 1)
    two = algorithm.update(one, autograd(loss, sf.effective(one)), 1)
    assert sf.checkpoint.tree_equal(one.scores["latent"], two.scores["latent"])
    assert sf.checkpoint.tree_equal(one.opt, two.opt)
    assert not sf.checkpoint.tree_equal(one.masks, two.masks)


def test_a_map_may_follow_a_schedule():
    def apply(latents, step, key):
        scale = sf.schedules.piecewise({0: 1.0, 2: 0.5})(step)
        return {path: v * scale for path, v in latents["latent"].items()}, {}

    reparam = Reparametrisation(lambda leaves, key: {"latent": dict(leaves)}, apply)
    algorithm = sf.reparametrised(reparam)
    params = {"w": torch.tensor([[8.0, -4.0]])}
    state, seen = algorithm.init(params), []
    for step in range(3):
        seen.append(sf.effective(state)["w"][0, 0].item())
        state = algorithm.update(state, params, step)
    assert seen == [8.0, 8.0, 4.0]
    assert state.masks["w"].ndim == 0


# ---- an algorithm inside -------------------------------------------------------------

INSIDE = {
    "dense": sf.dense,
    "static": lambda: sf.static(0.5),
    "keep": lambda: sf.static(0.5, pruned="keep"),
    "train": lambda: sf.static(0.5, pruned="train"),
    "gmp": lambda: sf.gmp(sf.schedules.polynomial(0.0, 0.8, 0, 8), when=sf.every(2)),
    "ste": lambda: sf.ste(0.5),
    "force": lambda: sf.gmp(
        0.5, when=sf.every(2), pruned="keep", regrow=True, score=sf.scores.saliency
    ),
    "partition": lambda: sf.partition([("0.*", sf.ste(0.5)), ("1.*", sf.static(0.3))]),
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_power_1_is_the_algorithm_itself(name):
    optimizer = sf.optimizers.sgd(0.3, momentum=0.9, weight_decay=0.05)
    plain = run(sf.with_optimizer(INSIDE[name](), optimizer, skip=sf.never()), 9)
    inside = sf.reparametrised(sf.reparam.power(1.0), INSIDE[name]())
    algorithm = sf.with_optimizer(inside, optimizer, skip=sf.never())
    latent = run(algorithm, 9)
    assert sf.checkpoint.tree_equal(latent.masks, plain.masks)
    assert sf.checkpoint.tree_equal(sf.effective(latent), sf.effective(plain))
    moments = latent.opt.momentum
    assert sf.checkpoint.tree_equal(
        moments["latent"]["latent"]["0.weight"], plain.opt.momentum["0"]["weight"]
    )
    assert sf.checkpoint.tree_equal(
        moments["rest"]["0.bias"], plain.opt.momentum["0"]["bias"]
    )


def test_pruned_latents_are_frozen_with_no_moments_and_resume_when_they_grow_back():
    params = {"w": torch.tensor([[9.0, 4.0, 1.0, 0.25]])}
    inner = sf.rigl(0.5, drop_fraction=0.5, init="magnitude", when=sf.at([1]))
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9, weight_decay=0.1)
    algorithm = sf.with_optimizer(
        sf.reparametrised(sf.reparam.power(2.0), inner), optimizer
    )
    state = algorithm.init(params)
    assert state.params["w"].tolist() == [[9.0, 4.0, 0.0, 0.0]]
    grads = {"w": torch.tensor([[0.1, 0.1, 0.0, 5.0]])}
    state = algorithm.update(state, grads, 0)
    assert state.scores["latent"]["latent"]["w"][0, 2:].tolist() == [1.0, 0.5]
    assert not state.opt.momentum["latent"]["latent"]["w"][0, 2:].any()
    state = algorithm.update(state, grads, 1)
    assert state.masks["w"].tolist() == [[True, False, False, True]]
    frozen = state.scores["latent"]["latent"]["w"][0, 1].item()
    state = algorithm.update(state, {"w": torch.zeros(1, 4)}, 2)
    assert state.scores["latent"]["latent"]["w"][0, 1].item() == frozen
    # Weight decay alone moved the latent of .5: .5 - .1 * .1 * .5.
    assert sf.effective(state)["w"][0, 3].item() == pytest.approx(0.495**2)


def test_leaves_that_are_not_chosen_train_directly_under_the_masks_inside():
    params = start()
    reparam = sf.reparametrised(
        sf.reparam.power(2.0), sf.static(0.5, init="magnitude"), where="0.weight"
    )
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9, weight_decay=0.1)
    algorithm = sf.with_optimizer(reparam, optimizer)
    state = run(algorithm, 3)
    assert set(algorithm.view.get(state)["rest"]) == {"0.bias", "1.weight"}
    mask = state.masks["1"]["weight"]
    assert torch.equal(mask, sf.masks.topk_mask(params["1"]["weight"].abs(), 11))
    assert not state.params["1"]["weight"][~mask].any()
    assert not state.opt.momentum["rest"]["1.weight"][~mask].any()
    assert state.opt.momentum["rest"]["1.weight"][mask].all()


def test_effective_weights_and_masks_intersect_both():
    reparam = sf.reparam.soft_threshold(torch.sigmoid, init=0.0)
    algorithm = sf.reparametrised(reparam, sf.static(0.5, init="magnitude"))
    state = algorithm.init({"w": torch.tensor([[0.1, 0.2, 2.0, -3.0, 0.3, 4.0]])})
    assert state.masks["w"].tolist() == [[False, False, True, True, False, True]]
    assert sf.effective(state)["w"].tolist() == [[0.0, 0.0, 1.5, -2.5, 0.0, 3.5]]
    few = sf.reparametrised(reparam, sf.static(0.0, init="magnitude"))
    assert sf.masks.n_kept(few.init({"w": torch.tensor([[0.1, 2.0]])}).masks) == 1


@pytest.mark.deep
def test_all_leaves_may_have_latents_in_compiled_code():
    algorithm = sf.with_optimizer(
        sf.reparametrised(sf.reparam.power(2.0)), sf.optimizers.sgd(0.1)
    )
    params = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}
    state = algorithm.init(params)
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    assert sf.checkpoint.tree_equal(
        compiled(state, params, 0), algorithm.update(state, params, 0)
    )


def test_settled_is_the_state_itself_where_nothing_differs():
    plain = sf.with_optimizer(sf.rigl(0.5), sf.optimizers.sgd(0.1))
    state = plain.init(start())
    assert sf.settled(plain, state) is state
    power = sf.reparametrised(sf.reparam.power(2.0))
    assert sf.settled(power, power.init(start())).params["0"]["weight"].shape == (7, 5)
    with pytest.raises(
        TypeError,
        match="settled: expected an Algorithm and its State, got Algorithm and dict",
    ):
        sf.settled(plain, start())


def test_settled_inside_others_and_with_an_algorithm_inside():
    gates = sf.reparametrised(
        sf.reparam.sigmoid_gate(1.0, init=0.0), sf.static(0.5, init="magnitude")
    )
    with_terms = sf.with_optimizer(
        sf.with_terms(gates, sf.terms.l2(0.1)), sf.optimizers.sgd(0.1)
    )
    state = with_terms.init({"w": torch.tensor([[1.0, 2.0, 3.0, 4.0]])})
    opened = {
        **state.scores["latent"],
        "gate": {"w": torch.tensor([[1.0, 1.0, -1.0, 1.0]])},
    }
    state = state._replace(scores={**state.scores, "latent": opened})
    settled = sf.settled(with_terms, state)
    assert settled.masks["w"].tolist() == [[False, False, False, True]]
    assert sf.effective(settled)["w"].tolist() == [[0.0, 0.0, 0.0, 8.0]]
    parts = sf.partition(
        [
            ("a.*", sf.reparametrised(sf.reparam.sigmoid_gate(1.0))),
            ("*", sf.static(0.5)),
        ]
    )
    parts = sf.with_optimizer(parts, sf.optimizers.sgd(0.1))
    state = parts.init({"a": {"w": torch.ones(2, 2)}, "b": {"w": torch.ones(2, 2)}})
    settled = sf.settled(parts, state)
    assert not settled.masks["a"]["w"].any() and torch.equal(
        settled.masks["b"]["w"], state.masks["b"]["w"]
    )
    assert sf.checkpoint.tree_equal(settled.opt, state.opt)
    assert sf.checkpoint.tree_equal(
        (settled.scores, settled.key), (state.scores, state.key)
    )
