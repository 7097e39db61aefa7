"""Every algorithm of the registry reads like the call that made it, and pickles where its parts do."""

import builtins
import copy
import math
import pickle

import pytest
import torch

import sparsefn as sf
from property_tests import registry
from sparsefn.testing import Row
from sparsefn.testing.harness import algorithm_of, assert_same, updates
from sparsefn.testing.strategies import large

# What the reprs are written in. Of two things of one name, the registry means the later one.
MODULES = (builtins, registry, math, torch, sf.schedules, sf.patterns, sf.terms, sf.reparam, sf.budgets, sf.counts)
MODULES = (*MODULES, sf.curvature, sf, sf.redistribute, sf.scores, sf.optimizers)
NAMES = {name: value for module in MODULES for name, value in vars(module).items()}

# Some part of these is a function that was made inside another, which has no name to pickle it by.
LOCAL = {"one_shot global grasp", "drop_grow current", "torchopt gmp"}
ALGORITHMS = {row.name: algorithm_of(row, large(row.meta.layout.form)) for row in registry.ROWS}
# These are given large tensors as well.
UNSPOKEN = {*LOCAL, "from_masks"}


def test_the_rows_exist() -> None:
    assert set(ALGORITHMS) >= UNSPOKEN


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - UNSPOKEN))
def test_the_repr_is_a_call_that_makes_the_algorithm(name: str) -> None:
    text = repr(ALGORITHMS[name])
    assert repr(eval(text, dict(NAMES))) == text


@pytest.mark.parametrize("row", [row for row in registry.ROWS if row.name not in LOCAL], ids=lambda row: row.name)
def test_a_pickled_algorithm_has_the_same_bits(row: Row) -> None:
    run, algorithm = large(row.meta.layout.form), ALGORITHMS[row.name]
    states = list(updates(algorithm, run))
    for other in (pickle.loads(pickle.dumps(algorithm)), copy.deepcopy(algorithm)):
        assert repr(other) == repr(algorithm)
        for old, new in zip(states, updates(other, run), strict=True):
            assert_same("a copy", old, new)


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_what_does_not_pickle_is_named(name: str) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        pickle.dumps(ALGORITHMS[name])
