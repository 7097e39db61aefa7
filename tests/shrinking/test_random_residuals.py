"""Random residual networks lose layers with the outputs of the masked ones."""

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsefn as sf
from tests.shrinking.compare import check_sizes, masked_weights, random_units
from tests.shrinking.residual_nets import WORDS, check_equal, residual_nets

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


def random_layers(net, data, widths=None):
    """The layers of a network with random weights, and which of them go; nothing where
    none can.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
    try:
        layers = sf.shrinking.layers(net, WORDS, widths=widths)
    except ValueError as error:
        assert "got none of such layers" in str(error)
        return None
    if len(layers) < 2:
        return None
    numbers = range(len(layers))
    gone = data.draw(st.sets(st.sampled_from(numbers), min_size=1))
    inner = {i for i in numbers if layers[i].inside & gone}
    if len(gone | inner) == len(layers):
        return None
    return layers, gone, inner


@settings(SETTINGS, max_examples=10)
@given(residual_nets(), st.sampled_from([None, "program"]), st.data())
def test_small_equals_masked_and_costs_what_is_said(net, form, data):
    drawn = random_layers(net, data)
    if drawn is None:
        return
    layers, gone, inner = drawn
    state = sf.State(sf.modules.params_of(net), layers.masks(gone))
    alive = layers.alive(state.masks).tolist()
    assert alive == [i not in gone | inner for i in range(len(layers))]
    made = sf.shrinking.smaller(net, state, WORDS, groups=layers, form=form)
    check_equal(net, state, WORDS, made.module)
    params = sum(p.numel() for p in made.module.parameters())
    assert params == layers.cost(gone)
    flops = sf.shrinking.weights(made.module, WORDS).priced("flops", None, False, None)
    assert flops.cost(list(flops.sizes.values())) == layers.cost(gone, "flops")


@settings(SETTINGS, max_examples=10)
@given(residual_nets(), st.sampled_from([None, "program"]), st.data())
def test_layers_and_units_go_at_once(net, form, data):
    widths = sf.shrinking.groups(net, WORDS)
    drawn = random_layers(net, data, widths)
    if drawn is None:
        return
    layers, gone, _ = drawn
    units = random_units(widths, data.draw(st.integers(0, 99)))
    params, narrow = masked_weights(net, widths, units)
    short = layers.masks(gone)
    masks = {name: narrow[name] & short[name] for name in narrow}
    state = sf.State(params, masks)
    made = sf.shrinking.smaller(net, state, WORDS, form=form)
    check_equal(net, state, WORDS, made.module)
    left = {made.names.get(name, name): mask for name, mask in masks.items()}
    check_sizes(made.module, left, f"form={form}", exact=form == "program")
