"""Rows: what an algorithm is called and where another process finds it."""

import functools

import torch

import sparsefn as sf
from sparsefn.testing.rows import reference, row_of


def made(sparsity, key):
    return sf.static(sparsity, key=key)


def test_names_and_references():
    row = row_of(made)
    assert row.name == "made"
    assert row.reference == f"{__name__}:made"
    assert reference(functools.partial(made)) is None
    assert row_of(functools.partial(made)).name == "partial"


def test_params_are_given_to_those_who_take_them():
    params = {"w": torch.ones(1, 1)}
    taken = []
    row_of(lambda s, key, params: taken.append(params)).make(0.5, None, params)
    row_of(lambda s, key, least=0: taken.append(least)).make(0.5, None, params)
    assert taken == [params, 0]
