"""The axis of N:M runs and blocks against the axis that a layer sums over."""

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.nn.modules.weights import run_axes

nm, block = sf.patterns.nm, sf.patterns.block


class Conv1D(nn.Module):
    """As in transformers: y = x @ weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 16))


LAYERS = {
    "linear": (nn.Linear(16, 8), "weight", {1}),
    "bilinear": (nn.Bilinear(8, 16, 4), "weight", {1, 2}),
    "conv": (nn.Conv2d(16, 8, 4), "weight", {1}),
    "conv1": (nn.Conv1d(16, 8, 4), "weight", {1}),
    "transposed": (nn.ConvTranspose2d(16, 8, 4), "weight", {0}),
    "transformers": (Conv1D(), "weight", {0}),
    "lstm": (nn.LSTM(8, 4), "weight_ih_l0", {1}),
    "cell": (nn.GRUCell(8, 4), "weight_hh", {1}),
    "attention": (nn.MultiheadAttention(8, 2), "in_proj_weight", {1}),
    "attention.out": (nn.MultiheadAttention(8, 2), "out_proj.weight", {1}),
}
FREE = {
    "embedding": (nn.Embedding(8, 8), "weight"),
    "bag": (nn.EmbeddingBag(8, 8), "weight"),
    "bias": (nn.Linear(8, 8), "bias"),
    "norm": (nn.LayerNorm((8, 8)), "weight"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_runs_lie_along_the_input_channels(name):
    layer, param, inputs = LAYERS[name]
    net = nn.ModuleDict({"body": nn.Sequential(layer)})
    ndim = layer.get_parameter(param).ndim
    for axis in range(ndim):
        for same in (axis, axis - ndim):  # a negative axis is the same axis
            assert sf.modules.check_pattern_axis(
                net, f"body.0.{param}", nm(2, 4, axis=same)
            ) == (axis in inputs)
            assert sf.modules.check_pattern_axis(layer, param, nm(2, 4, axis=same)) == (
                axis in inputs
            )


@pytest.mark.parametrize("name", LAYERS)
def test_the_axes_of_inputs_and_outputs(name):
    layer, param, inputs = LAYERS[name]
    net = nn.ModuleDict({"body": nn.Sequential(layer)})
    assert (
        sf.modules.pattern_axis(net, f"body.0.{param}")
        == sf.modules.pattern_axis(layer, param)
        == max(inputs)
    )
    outputs = 1 if inputs == {0} else 0
    assert (
        sf.modules.channel_axis(net, f"body.0.{param}")
        == sf.modules.channel_axis(layer, param)
        == outputs
    )


def test_channels_are_the_outputs():
    for layer, x in (
        (nn.ConvTranspose2d(2, 3, 2), torch.ones(1, 2, 4, 4)),
        (nn.Linear(2, 3), torch.ones(1, 4, 4, 2)),
    ):
        axis = sf.modules.channel_axis(layer, "weight")
        state = sf.static(1 / 3, pattern=sf.patterns.channel(axis)).init(
            sf.modules.params_of(layer)
        )
        out = sf.modules.call(layer, state, x).movedim(
            -1 if isinstance(layer, nn.Linear) else 1, 0
        )
        assert (
            sum(
                bool((channel == bias).all())
                for channel, bias in zip(out, layer.bias, strict=True)
            )
            == 1
        )


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_no_product_sums_over_what_a_weight_is_computed_from():
    made = (
        (
            nn.utils.parametrizations.weight_norm,
            ("parametrizations.weight.original0", "parametrizations.weight.original1"),
        ),
        (nn.utils.weight_norm, ("weight_g", "weight_v")),
    )
    for make, names in made:
        net = nn.Sequential(make(nn.ConvTranspose1d(4, 8, 3)))
        for name in names:
            assert sf.modules.check_pattern_axis(net, f"0.{name}", nm(2, 4, axis=0))
            with pytest.raises(
                ValueError,
                match="expected the weight of a layer that multiplies with it, got "
                "'0.*'",
            ):
                sf.modules.pattern_axis(net, f"0.{name}")


def test_blocks():
    layer = nn.Linear(16, 8)
    found = [
        sf.modules.check_pattern_axis(layer, "weight", block(shape))
        for shape in ((1, 4), (4, 1), (4, 4), (1, 1))
    ]
    assert found == [True, False, True, True]


@pytest.mark.parametrize("name", FREE)
def test_weights_that_no_product_sums_over_pass(name):
    layer, param = FREE[name]
    for axis_of in (sf.modules.pattern_axis, sf.modules.channel_axis):
        text = (
            f"^expected the weight of a layer that multiplies with it, got '{param}'$"
        )
        with pytest.raises(ValueError, match=text):
            axis_of(layer, param)
    for axis in range(layer.get_parameter(param).ndim):
        assert sf.modules.check_pattern_axis(layer, param, nm(2, 4, axis=axis))


@pytest.mark.parametrize(
    "pattern",
    [
        sf.patterns.unstructured(),
        sf.patterns.channel(0),
        sf.patterns.channel(1),
        sf.patterns.kernel(),
        sf.patterns.row_balanced(),
        sf.patterns.out_groups(2),
        sf.patterns.in_groups(2),
        nm(1, 1, axis=0),
    ],
    ids=repr,
)
def test_patterns_without_runs_of_a_fixed_length_pass(pattern):
    assert run_axes(pattern, (4, 16, 3, 3)) == set()
    assert sf.modules.check_pattern_axis(nn.Conv2d(16, 4, 3), "weight", pattern)


def test_a_run_as_long_as_the_dimension_is_a_run():
    assert run_axes(nm(2, 4, axis=0), (4, 16)) == {0}
    assert run_axes(block((4, 1)), (4, 16)) == {0}


def test_tied_weights_are_found_by_both_names():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    assert not sf.modules.check_pattern_axis(net, "1.weight", nm(2, 4, axis=0))


@pytest.mark.parametrize(
    ("path", "pattern", "text"),
    [
        (
            "0",
            nm(2, 4),
            "expected the path of a parameter, got '0'; they are '0.weight', '0.bias'",
        ),
        (
            "0.weight",
            nm(2, 3),
            "nm(2, 3, axis=-1): expected axis -1 divisible by 3, got shape (4, 8)",
        ),
    ],
)
def test_errors(path, pattern, text):
    with pytest.raises(ValueError) as raised:
        sf.modules.check_pattern_axis(nn.Sequential(nn.Linear(8, 4)), path, pattern)
    assert str(raised.value) == text


class GatedExperts(nn.Module):
    """As transformers has them: `is_transposed` says how their weights are stored."""

    def __init__(self, is_transposed):
        super().__init__()
        self.is_transposed = is_transposed
        self.up, self.up_bias = (
            nn.Parameter(torch.zeros(2, 8, 16)),
            nn.Parameter(torch.zeros(2, 16)),
        )


@pytest.mark.parametrize(("turned", "inputs", "outputs"), [(False, 2, 1), (True, 1, 2)])
def test_experts_in_one_leaf_sum_over_the_axis_that_they_say(turned, inputs, outputs):
    module = GatedExperts(turned)
    assert (
        sf.modules.pattern_axis(module, "up") == inputs
        and sf.modules.channel_axis(module, "up") == outputs
    )
    assert [
        sf.modules.check_pattern_axis(module, "up", nm(2, 4, axis=a))
        for a in (inputs, outputs)
    ] == [True, False]
    with pytest.raises(
        ValueError,
        match="expected the weight of a layer that multiplies with it, got 'up_bias'",
    ):
        sf.modules.pattern_axis(module, "up_bias")


def test_experts_of_gpt_oss():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = transformers.GptOssConfig(
        vocab_size=64, num_local_experts=2, num_key_value_heads=2, head_dim=8, **sizes
    )
    module = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    assert [
        sf.modules.pattern_axis(module, name) for name in ("gate_up_proj", "down_proj")
    ] == [1, 1]
