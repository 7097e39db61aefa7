"""Checkpoints of compositions by release 0.2.0: `release_0_2.pt` has the states of
`run` after 2 and 4 steps.
"""

from pathlib import Path

import optree
import pytest
import torch

import sparsefn as sf
from tests.nn.checkpoint.compositions import COMPOSITIONS, run

FILES = torch.load(Path(__file__).with_name("release_0_2.pt"), weights_only=True)


def nearly(x, y):
    """x where y is equal up to rounding, else y."""
    return x if x.is_floating_point() and torch.allclose(x, y, atol=1e-6) else y


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_run_goes_on_from_its_checkpoint(name):
    algorithm = COMPOSITIONS[name]()
    template = algorithm.init(run(sf.dense()).params)
    state = sf.checkpoint.load_state_dict(template, FILES[name]["saved"])
    again = run(algorithm)
    if name == "reparametrised":
        # it began with square roots of torch, which CPUs round differently
        again = optree.tree_map(nearly, state, again)
    assert sf.checkpoint.tree_equal(state, again)
    later = sf.checkpoint.load_state_dict(template, FILES[name]["later"])
    assert sf.checkpoint.tree_equal(run(algorithm, state, 2, 4), later)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_checkpoints_of_today_are_taken_as_they_are(name):
    algorithm = COMPOSITIONS[name]()
    state = run(algorithm)
    template = algorithm.init(run(sf.dense()).params)
    saved = sf.checkpoint.state_dict(state)
    assert not saved.keys() & {"scores.0.masks.a", "key.0", "scores.inner.0.masks.a"}
    assert sf.checkpoint.tree_equal(
        sf.checkpoint.load_state_dict(template, saved), state
    )


def test_a_state_inside_a_tree_is_found():
    algorithm = COMPOSITIONS["chain"]()
    state = run(algorithm)
    old = {f"a.0.{path}": x for path, x in FILES["chain"]["saved"].items()}
    (found,) = sf.checkpoint.load_state_dict({"a": [state]}, old)["a"]
    assert sf.checkpoint.tree_equal(found, state)


def test_what_is_missing_is_named_by_its_path_of_today():
    old = {
        path: x
        for path, x in FILES["chain"]["saved"].items()
        if path != "scores.1.scores.grow.a"
    }
    with pytest.raises(
        ValueError, match=r"missing are \['parts.1.scores.grow.a'\] and unexpected \[\]"
    ):
        sf.checkpoint.load_state_dict(run(COMPOSITIONS["chain"]()), old)
