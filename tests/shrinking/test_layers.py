"""Constants of a layer's outputs, and layers with fewer channels; whole modules are in test_shrinking.py."""

import pytest
import torch
from torch import nn

from sparsefn.shrinking.channels import UNKNOWN, Channels, Plan
from sparsefn.shrinking.layers import GATES, LAYERS

NAN = torch.nan


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def rule(layer, x, **masks):
    """The plan and the value of a layer whose parameters are whole but for the masks given."""
    plan = Plan(count=len(x.ids) if isinstance(x, Channels) else 0)

    def kept(name):
        return masks.get(name, torch.ones_like(layer.get_parameter(name), dtype=torch.bool))

    for name, mask in masks.items():
        layer.get_parameter(name).data *= mask
    return plan, LAYERS[type(layer)].rule(plan, "layer", layer, kept, x)


def channels(*const, axis=-1, rank=2):
    return Channels(torch.arange(len(const)), torch.tensor(const), axis, rank)


def without(layer, *rows):
    mask = torch.ones_like(layer.weight, dtype=torch.bool)
    mask[list(rows)] = False
    return mask


def pinned(plan):
    return sorted(torch.cat([ids for ids, _ in plan.pins]).tolist()) if plan.pins else []


def test_rows_of_a_linear_layer():
    layer = nn.Linear(3, 3)
    mask = without(layer, 0)
    mask[1, 2] = False
    plan, out = rule(layer, channels(2.0, -1.0, NAN), weight=mask)
    wanted = layer.bias[1] + 2 * layer.weight[1, 0] - layer.weight[1, 1]
    torch.testing.assert_close(out.const, torch.stack([layer.bias[0], wanted, torch.tensor(NAN)]), equal_nan=True)
    assert pinned(plan) == [2] and plan.sizes["layer"][1] is out


@pytest.mark.parametrize(("bias", "pins"), [(True, [1]), (False, [0, 1])])
def test_a_layer_without_bias_pins_what_is_not_zero(bias, pins):
    plan, _ = rule(nn.Linear(3, 2, bias=bias), channels(2.0, NAN, 0.0))
    assert pinned(plan) == pins


@pytest.mark.parametrize(
    ("kwargs", "pins"),
    [
        ({}, [1]),
        ({"padding": (0, 1)}, [0, 1]),
        ({"padding": "same"}, [0, 1]),
        ({"padding": "valid"}, [1]),
        ({"padding": 1, "padding_mode": "reflect"}, [1]),
        ({"stride": 2, "dilation": 2}, [1]),
        ({"groups": 3}, []),
        ({"groups": 1, "bias": False}, [0, 1]),
    ],
    ids=str,
)
def test_columns_of_a_convolution(kwargs, pins):
    plan, out = rule(nn.Conv2d(3, 3, 3, **kwargs), channels(2.0, NAN, 0.0, axis=-3, rank=4))
    assert pinned(plan) == pins and (out.axis, out.rank) == (-3, 4)


def test_depthwise_constants():
    layer, x = nn.Conv2d(4, 4, 3, padding=1, groups=4), channels(2.0, 0.0, NAN, NAN, axis=-3, rank=4)
    plan, out = rule(layer, x, weight=without(layer, 3))
    bias = layer.bias.detach()
    torch.testing.assert_close(out.const, torch.stack([bias[0] * NAN, bias[1], bias[2] * NAN, bias[3]]), equal_nan=True)
    assert torch.equal(out.ids, x.ids) and not plan.pins


@pytest.mark.parametrize("x", [channels(0.0, 0.0), channels(*[0.0] * 4), UNKNOWN], ids=["width", "axis", "unknown"])
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions_that_are_not_followed(groups, x):
    plan, out = rule(nn.Conv2d(4, 4, 1, groups=groups), x)
    assert out is UNKNOWN and not plan.sizes and pinned(plan) == ([] if x is UNKNOWN else x.ids.tolist())


def test_constants_of_a_batch_norm():
    layer = nn.BatchNorm1d(4).eval()
    layer.running_mean[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer.running_var[:] = 4 - layer.eps
    layer.bias.data[:] = torch.arange(4.0)
    mask = torch.tensor([True, True, False, False])
    plan, out = rule(layer, channels(3.0, NAN, 5.0, NAN), weight=mask)
    torch.testing.assert_close(out.const, torch.tensor([1.0, NAN, 2.0, 3.0]), equal_nan=True)
    assert not plan.pins
    plan, out = rule(nn.BatchNorm1d(2, affine=False).eval(), channels(0.0, NAN))
    torch.testing.assert_close(out.const, torch.tensor([0.0, NAN]), equal_nan=True)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.BatchNorm1d(2, track_running_stats=False).eval(), channels(0.0, 0.0)),
        (nn.BatchNorm1d(3).eval(), channels(0.0, 0.0)),
        (nn.BatchNorm1d(2).eval(), channels(0.0, 0.0, rank=3)),
        (nn.BatchNorm2d(2).eval(), UNKNOWN),
    ],
    ids=["statistics of the batch", "width", "channels elsewhere", "unknown"],
)
def test_batch_norms_that_are_not_followed(layer, x):
    plan, out = rule(layer, x)
    assert out is UNKNOWN and not plan.sizes


@pytest.mark.parametrize("kind", GATES)
def test_a_hidden_unit_needs_no_weight_and_no_bias_to_stay_zero(kind):
    gates, candidate = GATES[kind]
    units = 6
    layer = kind(2, units)
    rows = range(candidate * units, (candidate + 1) * units)
    kept = {name: torch.ones_like(p, dtype=torch.bool) for name, p in layer.named_parameters()}
    kept["weight_hh_l0"][:, 5] = False  # unit 5 moves, and only a reader outside would miss it
    # Unit 0 lacks all four parts, units 1 to 4 all but one.
    for part, name in enumerate(kept, start=1):
        kept[name][[rows[unit] for unit in range(5) if unit != part]] = False
    plan, (out, state) = rule(layer, UNKNOWN, **kept)
    assert out.const.isnan().tolist() == [False, True, True, True, True, True]
    assert pinned(plan) == [1, 2, 3, 4]
    assert state is out if kind is not nn.LSTM else state == (out, out)
    x = torch.randn(4, 3, 2)
    assert (layer(x)[0].abs().amax((0, 1)) == 0).tolist() == [True, False, False, False, False, False]
    small = kind(2, units)
    small.load_state_dict(layer.state_dict())
    removed = torch.arange(units) == 0
    LAYERS[kind].cut(small, UNKNOWN, out, removed)
    torch.testing.assert_close(small(x)[0], layer(x)[0][..., 1:])
    assert len(small.weight_hh_l0) == gates * 5


def test_cut_layers_keep_their_flags():
    layer = nn.Linear(3, 4).double()
    layer.weight.requires_grad_(False)
    x, out = channels(1.0, NAN, 0.0), Channels(torch.arange(3, 7), torch.zeros(4), -1, 2)
    brought = layer.bias.detach() + layer.weight[:, 0]
    LAYERS[nn.Linear].cut(layer, x, out, torch.tensor([True, False, False, False, True, False, False]))
    assert torch.equal(layer.bias, brought[[0, 2, 3]]) and layer.bias.requires_grad
    assert layer.weight.shape == (3, 2) and not layer.weight.requires_grad and layer.weight.dtype == torch.float64
