"""Promises: their defaults, and what follows from them; rows: their names, and where another process finds them."""

import functools

import torch

import sparsefn as sf
from sparsefn.testing import Layout, Meta
from sparsefn.testing.meta import import_name, row_of


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


def made(sparsity, key):
    return sf.static(sparsity, key=key)


def test_names_and_references():
    row = row_of(made)
    assert row.name == "made"
    assert row.reference == f"{__name__}:made"
    assert import_name(functools.partial(made)) is None
    assert row_of(functools.partial(made)).name == "partial"


def test_params_are_given_to_those_who_take_them():
    params = {"w": torch.ones(1, 1)}
    taken = []
    row_of(lambda s, key, params: taken.append(params)).make(0.5, None, params)
    row_of(lambda s, key, least=0: taken.append(least)).make(0.5, None, params)
    assert taken == [params, 0]
