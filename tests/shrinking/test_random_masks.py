"""Random networks under masks of all kinds get smaller with equal outputs."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn.shrinking import plan, products
from sparsefn.shrinking.trace import traced
from tests.shrinking import by_masks, zoo
from tests.shrinking.networks import networks
from tests.shrinking.test_random_networks import SETTINGS


@pytest.mark.deep
@settings(SETTINGS, max_examples=25)
@given(networks(), st.integers(0, 9))
def test_small_equals_masked(net, seed):
    by_masks.check(*net, seed)


@pytest.mark.deep
@settings(SETTINGS, max_examples=60)
@given(networks(most_steps=8), st.integers(0, 99))
def test_small_equals_masked_for_many_networks(net, seed):
    by_masks.check(*net, seed)


# The rows of a weight that is divided by its norm are 0 / 0 where they are masked.
@pytest.mark.deep(but=["vgg"])
@pytest.mark.parametrize(
    "name", [name for name in zoo.MODELS if name != "parametrized weights"]
)
def test_small_equals_masked_in_the_zoo(name):
    model, example = zoo.MODELS[name]()
    trace = traced(model, example, dynamic=False)  # takes seconds, and else three times
    for seed in range(3):
        by_masks.check(model, example, seed, trace)


@pytest.mark.deep(but=["vgg"])
@pytest.mark.parametrize("name", ["vgg", "lstm classifier"])
def test_something_goes(name):
    assert sum(by_masks.check(*zoo.MODELS[name](), seed) for seed in range(3)) > 0


BUGS = {
    "constants ignore padding": (
        "efficientnet",
        products,
        "_known",
        lambda x, at, plain, real=products._known: real(x, at, True),
    ),
    "folded biases are not added": (
        "vgg",
        plan,
        "folded_biases",
        lambda made, params: {},
    ),
    "groups of a grouped convolution are pruned unevenly": (
        "resnext",
        products,
        "divided",
        lambda step, label, m, n, ranks=(1, 2): (
            step.channels.new(m),
            step.channels.new(n),
        ),
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS)
def test_masks_show_the_bug(bug):
    name, owner, attribute, put = BUGS[bug]
    model, example = zoo.MODELS[name]()
    failed = 0
    for seed in range(4):
        with mock.patch.object(owner, attribute, put):
            try:
                by_masks.check(model, example, seed)
            except Exception:  # a bug fails in any way
                failed += 1
    assert failed
