"""Random residual networks lose layers with the outputs of the masked ones."""

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsefn as sf
from tests.shrinking.residual_nets import X, check_equal, residual_nets

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


@settings(SETTINGS, max_examples=12)
@given(residual_nets(), st.data())
def test_small_equals_masked_and_costs_what_is_said(net, data):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
    try:
        layers = sf.shrinking.layers(net, X)
    except ValueError as error:
        assert "got none of such layers" in str(error)
        return
    if len(layers) < 2:
        return
    numbers = range(len(layers))
    gone = data.draw(st.sets(st.sampled_from(numbers), min_size=1))
    inner = {i for i in numbers if layers[i].inside & gone}
    if len(gone | inner) == len(layers):
        return
    state = sf.State(sf.modules.params_of(net), layers.masks(gone))
    alive = layers.alive(state.masks).tolist()
    assert alive == [i not in gone | inner for i in numbers]
    made = sf.shrinking.smaller(net, state, X, groups=layers)
    check_equal(net, state, X, made.module)
    params = sum(p.numel() for p in made.module.parameters())
    assert params == layers.cost(gone)
    flops = sf.shrinking.weights(made.module, X).priced("flops", None, False, None)
    assert flops.cost(list(flops.sizes.values())) == layers.cost(gone, "flops")
