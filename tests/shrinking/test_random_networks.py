"""Random networks get smaller with the outputs of the masked ones, whatever units
go.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.shrinking import compare
from tests.shrinking.networks import networks
from tests.shrinking.steps import KINDS

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
SLOW = list(HealthCheck)
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=SLOW,
    phases=PHASES,
)


@settings(SETTINGS, max_examples=25)
@given(networks(), st.booleans(), st.integers(0, 9))
def test_small_equals_masked(net, counted, seed):
    compare.check(*net, seed=seed, counted=counted, forms=())


@pytest.mark.deep
@settings(SETTINGS, max_examples=60)
@given(
    networks(most_steps=8),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from([None, "program"]),
)
def test_small_equals_masked_for_many_networks(net, counted, seed, form):
    compare.check(*net, seed=seed, counted=counted, forms=(form,))


@pytest.mark.deep
def test_every_step_is_drawn():
    drawn = set()

    @settings(SETTINGS, max_examples=1000)
    @given(networks())
    def look(net):
        drawn.update(step.kind for step in net[0].steps)

    look()
    assert drawn >= set(KINDS)
