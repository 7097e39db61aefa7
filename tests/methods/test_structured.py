"""Structured methods: held against recordings, the conditions of an optimum, all masks,
and the shrunk model.
"""

import math
import re

import pytest
import torch
from golden_data import cases
from torch import nn

import sparsefn as sf

methods = sf.methods
SGD = sf.optimizers.sgd


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    for norm in (model[1], model[4]):
        for x in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(x)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return model.eval()


def run(algorithm, model, steps):
    x, y = torch.randn(16, 2, 6, 6), torch.randint(3, (16,))

    def loss(params):
        return nn.functional.cross_entropy(sf.modules.call(model, params, x), y)

    algorithm = sf.with_optimizer(algorithm, SGD(0.05), skip=sf.never())
    state = algorithm.init(sf.modules.params_of(model))
    for step in range(steps):
        state = algorithm.update(
            state, torch.func.grad(loss)(sf.effective(state)), step
        )
    return state


CONVS = ["0.weight", "3.weight"]


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda: methods.taylor(3, when=sf.at([1, 3]), where=CONVS), 14 - 6),
        (
            lambda: methods.slimming(
                0.5, ["1.weight", "4.weight"], steps=3, strength=0.01
            ),
            14 - 7,
        ),
        (lambda: methods.fpgm(0.25, epoch=2, steps=4, where=CONVS), 6 + 4),
        (
            lambda: methods.proximal(
                2.8, rate=0.05, pattern=sf.patterns.channel(0), where="0.weight"
            ),
            None,
        ),
    ],
    ids=["taylor", "slimming", "fpgm", "proximal"],
)
def test_the_shrunk_model_has_the_outputs_of_the_masked_one(make, left):
    model = net()
    state = run(make(), model, 4)
    x = torch.randn(5, 2, 6, 6)
    small = sf.shrink(model, state, x)
    torch.testing.assert_close(
        small(x), sf.modules.call(model, state, x), rtol=1e-4, atol=1e-5
    )
    width = small[0].weight.shape[0] + small[3].weight.shape[0]
    assert width == left if left else 6 < width < 14


def taylor_by_force(weights, steps):
    means = dict.fromkeys(weights, 0.0)
    for grads in steps:
        for path, w in weights.items():
            means[path] = means[path] + (w * grads[path]).sum(1).square() / len(steps)
    return means


def test_taylor_takes_the_mean_of_the_squares_since_the_last_pruning_over_all_leaves():
    torch.manual_seed(0)
    weights = {"a": torch.randn(5, 3), "b": torch.randn(4, 2)}
    algorithm = methods.taylor(2, when=sf.every(3, start=2))
    state, gone = algorithm.init(weights), set()
    for first in (0, 3):
        steps = [
            {path: torch.randn_like(w) for path, w in weights.items()} for _ in range(3)
        ]
        for step, grads in enumerate(steps, first):
            state = algorithm.update(state, grads, step)
        means = taylor_by_force(weights, steps)
        order = sorted(
            (float(m[i]), path, i) for path, m in means.items() for i in range(len(m))
        )
        gone |= set([unit[1:] for unit in order if unit[1:] not in gone][:2])
        pruned = {
            (p, i)
            for p, mask in state.masks.items()
            for i, row in enumerate(mask)
            if not row.any()
        }
        assert pruned == gone
        assert all(mask.any(1).equal(mask.all(1)) for mask in state.masks.values())


def test_taylor_sums_before_it_squares():
    # Molchanov et al. 2019: 0 and 0.25, where the sums of squares are 0.5 and 0.17.
    algorithm = methods.taylor(1, when=sf.at([0]))
    state = algorithm.init({"w": torch.tensor([[1.0, -1.0], [2.0, 1.0]])})
    state = algorithm.update(state, {"w": torch.tensor([[0.5, 0.5], [0.2, 0.1]])}, 0)
    assert state.masks["w"].tolist() == [[False, False], [True, True]]
    with pytest.raises(ValueError, match=re.escape("got 3")):
        bad = methods.taylor(3, when=sf.at([0]))
        bad.update(bad.init(state.params), state.params, 0)


def test_slimming_by_hand():
    # One threshold for (0.5, -0.1) and (0.3, 0.05): the first of each stay.
    params = {
        "1.weight": torch.tensor([0.5, -0.1]),
        "4.weight": torch.tensor([0.3, 0.05]),
        "w": torch.ones(2, 2),
    }
    algorithm = methods.slimming(0.5, ["1.weight", "4.weight"], steps=2, strength=0.01)
    state = algorithm.init(params)
    zeros = {path: torch.zeros_like(x) for path, x in params.items()}
    for step in range(2):
        found = algorithm.view.grads(state, zeros, step)
        torch.testing.assert_close(found["1.weight"], torch.tensor([0.01, -0.01]))
        assert not found["w"].any()
        assert state.masks["1.weight"].all() and state.masks["4.weight"].all()
        state = algorithm.update(state, zeros, step)
    assert (
        state.masks["1.weight"].tolist()
        == state.masks["4.weight"].tolist()
        == [True, False]
    )
    for step in (2, torch.tensor(2)):  # fine-tuned without the term
        assert not any(
            x.any() for x in algorithm.view.grads(state, zeros, step).values()
        )


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases("fpgm", "get_filter_similar")
        if case.args["compress_rate"] == 1
    ],  # no choice by norm
    ids=lambda case: case.id,
)
def test_fpgm_prunes_the_filters_that_its_authors_prune(case):
    weight, kept = case.inputs["weight"], case.outputs["kept"].bool()
    algorithm = methods.fpgm(1 - float(kept.double().mean()), epoch=1, steps=1)
    state = algorithm.update(algorithm.init({"w": weight}), {"w": weight}, 0)
    assert torch.equal(
        state.masks["w"].flatten(1), kept[:, None].expand(len(kept), weight[0].numel())
    )


def test_fpgm_prunes_the_median_and_lets_it_recover_until_the_last_epoch():
    # Sums of distances 26, 20, 19, 26 and 29: the third goes, where a norm would prune
    # the first.
    weight = torch.tensor([[0.0], [2.0], [3.0], [10.0], [11.0]])
    algorithm = sf.with_optimizer(
        methods.fpgm(0.2, epoch=2, steps=7), SGD(1.0, momentum=0.5)
    )
    state = algorithm.init({"w": weight})
    still, push = (
        {"w": torch.zeros(5, 1)},
        {"w": torch.tensor([[0.0], [0.0], [-1.0], [0.0], [0.0]])},
    )
    for step, grads in enumerate([still, still, push, still]):
        state = algorithm.update(state, grads, step)
        assert state.masks["w"].all()
        if step == 1:
            assert state.params["w"].flatten().tolist() == [0, 2, 0, 10, 11]
        if step == 2:
            assert state.params["w"].flatten().tolist() == [0, 2, 1, 10, 11]
    for step in range(4, 7):
        state = algorithm.update(state, push, step)
        assert int(state.masks["w"].sum()) == (5 if step < 5 else 4)
    assert not state.params["w"][~state.masks["w"]].any()


def least_squares():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    true = torch.tensor(
        [[3.0, 0, 0, -2.0, 0, 0, 0, 1.0], [0.0] * 8, [1.0, 0, 0, 1.0, 0, 0, 0, 0]],
        dtype=torch.float64,
    )
    y = x @ true.T + 0.3 * torch.randn(60, 3, generator=generator, dtype=torch.float64)
    return lambda params: {"w": (params["w"] @ x.T - y.T) @ x / 60}


def test_proximal_steps_solve_lasso_and_group_lasso():
    slope_of = least_squares()
    for pattern in (
        sf.patterns.unstructured(),
        sf.patterns.channel(0),
        sf.patterns.channel(1),
    ):
        algorithm = sf.with_optimizer(
            methods.proximal(0.2, rate=0.1, pattern=pattern), SGD(0.1)
        )
        state = algorithm.init({"w": torch.zeros(3, 8, dtype=torch.float64)})
        for step in range(400):
            state = algorithm.update(state, slope_of(sf.effective(state)), step)
        weight, slope, mask = (
            state.params["w"],
            slope_of(sf.effective(state))["w"],
            state.masks["w"],
        )
        assert 0 < int(mask.sum()) < 24 and torch.equal(mask, weight != 0)
        axis = {
            "unstructured()": None,
            "channel(axis=0, norm=1)": 1,
            "channel(axis=1, norm=1)": 0,
        }[str(pattern)]
        length = (
            weight.abs()
            if axis is None
            else weight.norm(dim=axis, keepdim=True).expand_as(weight)
        )
        steep = (
            slope.abs()
            if axis is None
            else slope.norm(dim=axis, keepdim=True).expand_as(slope)
        )
        torch.testing.assert_close(
            slope[mask], -0.2 * (weight / length)[mask], rtol=1e-5, atol=1e-8
        )
        assert (steep[~mask] <= 0.2 + 1e-9).all()


def test_proximal_by_hand_with_a_schedule_and_in_16_bits():
    algorithm = methods.proximal(1.0, rate=sf.schedules.piecewise({0: 0.5, 1: 2.0}))
    state = algorithm.init({"w": torch.tensor([[2.0, -0.25, -1.0, math.nan]])})
    state = algorithm.update(state, state.params, 0)
    assert state.params["w"].tolist() == [[1.5, 0.0, -0.5, 0.0]]
    assert state.masks["w"].tolist() == [[True, False, True, False]]
    assert not algorithm.update(state, state.params, 1).masks["w"].any()
    half = methods.proximal(1.0, rate=2.5, pattern=sf.patterns.channel(0))
    state = half.init(
        {"w": torch.tensor([[3.0, 4.0], [1.0, 2.0]], dtype=torch.bfloat16)}
    )
    state = half.update(state, state.params, 0)
    assert state.params["w"].dtype == torch.bfloat16 and state.params["w"].tolist() == [
        [1.5, 2.0],
        [0.0, 0.0],
    ]


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: methods.slimming(0.5, "*", steps=0),
            ValueError,
            "slimming: expected steps >= 1, got 0",
        ),
        (
            lambda: methods.fpgm(0.5, epoch=0, steps=5),
            ValueError,
            "fpgm: expected epoch >= 1, got 0",
        ),
        (
            lambda: methods.fpgm(0.5, epoch=6, steps=5),
            ValueError,
            "fpgm: expected steps >= 6, got 5",
        ),
        (
            lambda: methods.proximal(0.5, rate="high"),
            TypeError,
            "expected a float or a schedule, got str",
        ),
        (
            lambda: methods.taylor(-1),
            ValueError,
            "iterative: expected count >= 0, got -1",
        ),
    ],
)
def test_bad_arguments(make, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        make()
