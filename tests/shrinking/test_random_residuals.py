"""Random residual networks lose layers with the outputs of the masked ones."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsefn as sf
from tests.shrinking.compare import check_sizes, masked_weights, random_units
from tests.shrinking.residual_nets import (
    WORDS,
    check_equal,
    check_without_layers,
    random_layers,
    residual_nets,
)

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


SEEDS = st.integers(0, 99)


@settings(SETTINGS, max_examples=10)
@given(residual_nets(), SEEDS, st.sampled_from([None, "program"]))
def test_small_equals_masked_and_costs_what_is_said(net, seed, form):
    check_without_layers(net, seed, form)


@settings(SETTINGS, max_examples=3)
@given(residual_nets(["attention", "not read"]), SEEDS)
def test_what_nothing_reads_goes_with_its_branch(net, seed):
    check_without_layers(net, seed)


@settings(SETTINGS, max_examples=10)
@given(residual_nets(), SEEDS, st.sampled_from([None, "program"]))
def test_layers_and_units_go_at_once(net, seed, form):
    widths = sf.shrinking.groups(net, WORDS)
    drawn = random_layers(net, seed, widths)
    if drawn is None:
        return
    layers, gone, _ = drawn
    params, narrow = masked_weights(net, widths, random_units(widths, seed))
    short = layers.masks(gone)
    masks = {name: narrow[name] & short[name] for name in narrow}
    state = sf.State(params, masks)
    made = sf.shrinking.smaller(net, state, WORDS, form=form)
    check_equal(net, state, WORDS, made.module)
    left = {made.names.get(name, name): mask for name, mask in masks.items()}
    check_sizes(made.module, left, f"form={form}", exact=form == "program")
