import optree
import pytest
import torch
from torch.nn import functional

import sparsefn as sf

NET = torch.nn.Sequential(
    torch.nn.Linear(6, 5, bias=False), torch.nn.ReLU(), torch.nn.Linear(5, 3, bias=False)
).double()
PARAMS = sf.modules.params_of(NET)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
STATE = sf.one_shot(0.5).init(PARAMS)


def loss(params, x, y):
    return functional.cross_entropy(sf.modules.call(NET, params, x), y)


def test_of_a_loss_it_is_saliency():
    found = sf.curvature.sensitivity(loss, (X, Y))(STATE, (), 0)
    expected = sf.scores.saliency(STATE, torch.func.grad(loss)(PARAMS, X, Y), 0)
    assert all(torch.equal(found[path], expected[path]) for path in PARAMS)


def test_at_absolute_weights_it_is_synflow():
    def flow(params, ones):
        return sf.modules.call(NET, params, ones).sum()

    score = sf.curvature.sensitivity(
        flow, (torch.ones(1, 6).double(),), at=lambda params: optree.tree_map(torch.abs, params)
    )
    found, expected = score(STATE, (), 0), sf.curvature.synflow(NET, (6,))(STATE, (), 0)
    assert all(torch.allclose(found[path], expected[path], rtol=1e-12) for path in PARAMS)
    sums = [float(leaf.sum()) for leaf in found.values()]
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)  # what flows through a layer flows through every one


def trained(steps):
    def objective(params, x, y):
        for _ in range(steps):
            grads = torch.func.grad(loss)(params, x, y)
            params = optree.tree_map(lambda w, g: w - 0.1 * g, params, grads)
        return loss(params, x, y)

    return sf.curvature.sensitivity(objective, (X, Y))


def test_prospr_without_inner_steps_is_snip():
    snip = sf.curvature.sensitivity(loss, (X, Y))(STATE, (), 0)
    assert all(torch.equal(trained(0)(STATE, (), 0)[path], snip[path]) for path in PARAMS)
    assert not any(torch.equal(trained(2)(STATE, (), 0)[path], snip[path]) for path in PARAMS)


def test_masks_other_leaves_and_batches_by_step():
    params = {"w": torch.tensor([2.0, -1.0, 3.0]), "b": torch.ones(3)}
    masks = {"w": torch.tensor([True, True, False]), "b": torch.tensor(True)}
    score = sf.curvature.sensitivity(lambda p, x: x * (p["w"] + p["b"]).square().sum(), lambda step: (step + 1.0,))
    found = score(sf.State(params, masks), None, 1)
    assert found["w"].tolist() == [24.0, 0.0, 12.0] and found["b"].tolist() == [0.0, 0.0, 0.0]


def test_errors():
    with pytest.raises(TypeError, match=r"expected loss to be a function"):
        sf.curvature.sensitivity("loss")
    with pytest.raises(TypeError, match=r"expected batch to be a tuple of the loss's arguments"):
        sf.curvature.sensitivity(loss, X)
    with pytest.raises(TypeError, match=r"expected at to be a function of \(params\)"):
        sf.curvature.sensitivity(loss, (X, Y), at=lambda: 1)
    with pytest.raises(ValueError, match="expected the loss to be a 0-d tensor, got shape"):
        sf.curvature.sensitivity(lambda p: p["0.weight"])(STATE, (), 0)
    with pytest.raises(ValueError, match="what `at` gives"):
        sf.curvature.sensitivity(loss, (X, Y), at=lambda params: {"other": X})(STATE, (), 0)
