"""Held against recorded outputs of the authors' code: GraSP's own repository, and
SynFlow's, which has SNIP too.
"""

import itertools

import pytest
import torch
from golden_data import cases
from torch import nn
from torch.nn import functional

import sparsefn as sf


def named(system, fn):
    return pytest.mark.parametrize("case", cases(system, fn), ids=lambda case: case.id)


def under(tensors, prefix):
    return {
        name.removeprefix(prefix + "/"): x
        for name, x in tensors.items()
        if name.startswith(prefix + "/")
    }


def linears(*sizes, bias=True, activations=(nn.ReLU, nn.ReLU)):
    first, second, third = (
        nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)
    )
    return nn.Sequential(first, activations[0](), second, activations[1](), third)


def module_of(case):
    module = {
        "mlp": lambda: linears(6, 8, 7, 4),
        "mlp_nobias": lambda: linears(6, 8, 7, 4, bias=False),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(20, 3),
        ),
    }[case.args["model"]]()
    module = module.double().eval()
    module.load_state_dict(under(case.inputs, "param"), strict=False)
    return module, sf.modules.params_of(module)


def cross_entropy(module):
    def loss(params, x, y, temperature=1.0):
        return functional.cross_entropy(
            sf.modules.call(module, params, x) / temperature, y
        )

    return loss


def check(case, score, params, grads, scale):
    """The scores of the weights, and the masks of one round over all weights
    together.
    """
    recorded, masks = under(case.outputs, "score"), under(case.outputs, "mask")
    state = sf.one_shot(0.5, where=list(masks)).init(params)
    found = score(state, grads, 0)
    total = scale(sum(found[name].sum() for name in masks))
    for name, expected in recorded.items():
        assert torch.allclose(found[name] / total, expected, rtol=1e-5, atol=1e-12)
    assert same_masks(pruned_once(score, params, grads, masks), masks)


def pruned_once(score, params, grads, masks):
    total = sum(mask.numel() for mask in masks.values())
    sparsity = torch.tensor(
        1 - sum(int(mask.sum()) for mask in masks.values()) / total, dtype=torch.float64
    )
    algorithm = sf.one_shot(
        sparsity, score, where=list(masks), distribution=sf.budgets.global_()
    )
    return algorithm.update(algorithm.init(params), grads, 0).masks


def same_masks(found, recorded):
    return all(torch.equal(found[name], mask) for name, mask in recorded.items())


def summed_loss(case, module):
    x, y = under(case.inputs, "x"), under(case.inputs, "y")
    return lambda params, **rest: sum(
        cross_entropy(module)(params, x[i], y[i], **rest) for i in x
    )


@named("synflow_repo", "SNIP")
def test_snip(case):
    module, params = module_of(case)
    grads = torch.func.grad(summed_loss(case, module))(params)
    check(case, sf.scores.saliency, params, grads, lambda total: total)


@named("synflow_repo", "GraSP")
def test_grasp_of_the_repository_of_synflow(case):
    module, params = module_of(case)
    score = sf.curvature.grasp(summed_loss(case, module), ())
    check(case, score, params, params, lambda total: total.abs() + 1e-10)


@named("synflow_repo", "SynFlow")
def test_synflow(case):
    module, params = module_of(case)
    score = sf.curvature.synflow(module, tuple(case.inputs["x/0"].shape[1:]))
    check(case, score, params, params, lambda total: 1.0)


@named("synflow_repo", "SynFlow_rounds")
def test_synflow_in_rounds(case):
    module, params = module_of(case)
    recorded, rounds, density = (
        under(case.outputs, "mask"),
        case.args["rounds"],
        case.args["density"],
    )
    n = sum(mask.numel() for mask in recorded.values())

    def level(step):  # their count of what goes is truncated
        return torch.tensor(
            int((1 - density ** ((step + 1) / rounds)) * n) / n, dtype=torch.float64
        )

    algorithm = sf.gmp(
        level,
        when=sf.every(1, stop=rounds),
        init="dense",
        score=sf.curvature.synflow(
            module, (6,) if case.args["model"].startswith("mlp") else (2, 4, 4)
        ),
        distribution=sf.budgets.global_(),
        where=list(recorded),
    )
    state = algorithm.init(params)
    for step in range(rounds):
        state = algorithm.update(state, params, step)
    # Theirs drops everything at the threshold, so that a tie may cost a weight more.
    assert not any((mask & ~state.masks[name]).any() for name, mask in recorded.items())
    assert (
        sum(int((state.masks[name] & ~mask).sum()) for name, mask in recorded.items())
        <= 1
    )


@named("grasp", "GraSP")
def test_grasp(case):
    module = linears(6, 10, 8, 4, activations=(nn.Tanh, nn.ReLU)).double()
    params, masks = under(case.inputs, "param"), under(case.outputs, "mask")
    x, y = case.inputs["x"], case.inputs["y"]
    half = len(y) // 2
    loss = cross_entropy(module)

    def both(params, **rest):  # they take the batch in halves, and add the two losses
        return loss(params, x[:half], y[:half], **rest) + loss(
            params, x[half:], y[half:], **rest
        )

    assert same_masks(
        pruned_once(
            sf.curvature.grasp(both, (), case.args["T"]), params, params, masks
        ),
        masks,
    )
