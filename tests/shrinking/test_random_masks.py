"""Random networks under masks of all kinds get smaller with equal outputs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shrinking import by_masks, zoo
from tests.shrinking.networks import networks
from tests.shrinking.test_random_networks import SETTINGS


@settings(SETTINGS, max_examples=25)
@given(networks(), st.integers(0, 9))
def test_small_equals_masked(net, seed):
    by_masks.check(*net, seed)


@settings(SETTINGS, max_examples=1000)
@given(networks(most_steps=8), st.integers(0, 99))
def test_small_equals_masked_for_many_networks(net, seed):
    by_masks.check(*net, seed)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_small_equals_masked_in_the_zoo(name):
    model, example = zoo.MODELS[name]()
    for seed in range(3):
        by_masks.check(model, example, seed)


@pytest.mark.parametrize("name", ["vgg", "lstm classifier"])
def test_something_goes(name):
    assert sum(by_masks.check(*zoo.MODELS[name](), seed) for seed in range(3)) > 0
