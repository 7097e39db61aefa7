"""Promises: their defaults, and what follows from them."""

import sparsefn as sf
from sparsefn.testing import Layout, Meta


def test_the_defaults_promise_what_the_library_does():
    meta = Meta()
    assert meta.exact_count
    assert not meta.needs_grads
    assert not meta.stochastic
    assert meta.layout.pattern == sf.patterns.unstructured()
    assert not meta.joint
    assert Meta(distribution=sf.budgets.global_()).joint


def test_a_layout_may_be_given_as_the_pattern():
    layout = Layout(sf.patterns.nm(2, 4), group=lambda grid: (1, 4), fixed=2)
    assert Meta(pattern=layout).layout is layout
    assert Meta(pattern=sf.patterns.nm(2, 4)).layout.fixed == 2
