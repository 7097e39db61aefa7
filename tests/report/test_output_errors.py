"""Errors of layers' outputs are those of the outputs themselves."""

import math

import pytest
import torch
from torch import nn

import sparsefn as sf


def data(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Linear(8, 4, bias=False),
        nn.Tanh(),
        nn.Linear(4, 3),
    ).double()


def pruned(model, sparsity=0.5):
    return sf.static(sparsity, init="magnitude").init(sf.modules.params_of(model))


def test_errors_are_those_of_the_outputs_of_each_layer(net):
    x = data(50, 6)
    stats, state = sf.calibration.inputs(net, None, x), pruned(net)
    found = sf.report.output_errors(
        sf.modules.params_of(net), state, stats, ["0.*", "[24].*"]
    )
    squares = {}
    with torch.no_grad():
        for name, inputs in (("0", x), ("2", net[:2](x)), ("4", net[:4](x))):
            weight = net.get_parameter(f"{name}.weight")
            own, change = (
                inputs @ weight.T,
                inputs @ (weight - sf.effective(state)[f"{name}.weight"]).T,
            )
            squares[name] = change.square().sum(), own.square().sum()
    for name, (change, own) in squares.items():
        assert found.layers[f"{name}.weight"] == pytest.approx(
            float((change / own).sqrt()), rel=1e-9
        )
    assert found.blocks["0.*"] == found.layers["0.weight"]
    both = (squares["2"][0] + squares["4"][0]) / (squares["2"][1] + squares["4"][1])
    assert found.blocks["[24].*"] == pytest.approx(float(both.sqrt()), rel=1e-9)
    assert list(found.layers) == ["0.weight", "2.weight", "4.weight"]
    assert [line.split()[0] for line in str(found).splitlines()] == [
        "layer",
        *found.layers,
        *found.blocks,
    ]


def test_nothing_changed_is_no_error_and_all_gone_is_one(net):
    stats, params = (
        sf.calibration.inputs(net, None, data(9, 6)),
        sf.modules.params_of(net),
    )
    assert {*sf.report.output_errors(params, params, stats).layers.values()} == {0.0}
    gone = {path: torch.zeros_like(x) for path, x in params.items()}
    assert all(
        error == 1.0
        for error in sf.report.output_errors(params, gone, stats).layers.values()
    )
    assert all(
        error == math.inf
        for error in sf.report.output_errors(gone, params, stats).layers.values()
    )


def test_kernels_with_groups_are_matrices_of_patches():
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3, groups=2, bias=False).double(), data(2, 4, 5, 5)
    stats, state = sf.calibration.inputs(layer, None, x), pruned(layer)
    other = sf.modules.call(layer, state, x)
    with torch.no_grad():
        expected = float((other - layer(x)).norm() / layer(x).norm())
    found = sf.report.output_errors(sf.modules.params_of(layer), state, stats)
    assert found.layers["weight"] == pytest.approx(expected, rel=1e-9)


def test_what_does_not_fit_is_told_with_its_path(net):
    params, x = sf.modules.params_of(net), data(9, 6)
    stats = sf.calibration.inputs(net, None, x)
    few = {path: leaf for path, leaf in params.items() if path != "2.weight"}
    other = params | {"2.weight": torch.zeros(2, 2)}
    for before, after, message in (
        (
            few,
            params,
            "expected a weight at '2.weight' in before, as stats have, got none",
        ),
        (params, few, "expected a weight at '2.weight' in after"),
        (
            params,
            other,
            r"expected weights of one shape at '2.weight', got \(4, 8\) and \(2, 2\)",
        ),
        (other, other, "at '2.weight', expected the statistics of a weight of shape"),
    ):
        with pytest.raises(ValueError, match=f"output_errors: {message}"):
            sf.report.output_errors(before, after, stats)
    with pytest.raises(
        ValueError,
        match="expected 'gram' in the statistics at '0.weight', got count, square",
    ):
        sf.report.output_errors(
            params, params, sf.calibration.inputs(net, None, x, of="square")
        )
    unseen = sf.calibration.inputs(net, None, x)
    unseen["4.weight"]["count"] = torch.tensor(0)
    with pytest.raises(
        ValueError,
        match="no data for '4.weight': no input of the calibration data reached it",
    ):
        sf.report.output_errors(params, params, unseen)
    with pytest.raises(ValueError, match=r"blocks: no path matches '\*.bias'"):
        sf.report.output_errors(params, params, stats, ["*.bias"])
    for before, given, blocks, message in (
        (
            net,
            stats,
            (),
            r"expected weights by path, got a Sequential: take "
            r"sf.modules.params_of\(model\)",
        ),
        (
            params,
            [stats],
            (),
            "expected stats by path, of sf.calibration.inputs, got list",
        ),
        (
            params,
            stats,
            "0.*",
            r"expected blocks to be a sequence, with a glob a block, got '0.\*'",
        ),
    ):
        with pytest.raises(TypeError, match=f"output_errors: {message}"):
            sf.report.output_errors(before, params, given, blocks)
