"""The helpers of the laws: comparison by bits, runs, the counter of tensor
operations.
"""

import pytest
import torch
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.testing import harness


def test_bits_tell_zeros_apart_and_nans_alike():
    nan = torch.tensor([float("nan"), -float("nan")])
    assert harness.equal(nan[:1], nan[1:])
    assert not harness.equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not harness.equal(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def test_differences_are_named():
    with pytest.raises(AssertionError, match="masks: differs at a.w"):
        harness.assert_same(
            "masks", {"a": {"w": torch.ones(2)}}, {"a": {"w": torch.zeros(2)}}
        )
    with pytest.raises(AssertionError, match="masks: other leaves: \\['b'\\]"):
        harness.assert_same(
            "masks", {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
        )


def test_digests_are_of_bits_and_names():
    one = {"a": torch.tensor([0.0, 1.0])}
    assert harness.hash_of(one) == harness.hash_of({"a": torch.tensor([0.0, 1.0])})
    assert harness.hash_of(one) != harness.hash_of({"a": torch.tensor([-0.0, 1.0])})
    assert harness.hash_of(one) != harness.hash_of({"b": torch.tensor([0.0, 1.0])})


def test_work_is_counted():
    with harness.Operations() as work:
        torch.ones(2) + 1
    assert [name.split(".")[1] for name in work.operations] == ["ones", "add"]


def test_runs_go_through_all_updates():
    params = {"w": torch.ones(2, 2)}
    case = sf.testing.Case(params, (params, params), 0.5, 0)
    assert len(list(harness.updates(sf.gmp(0.5), case))) == 3


def test_holding_tries_the_same_examples_every_time():
    seen = [[], []]
    for found in seen:
        harness.hold("a name", found.append, st.integers(0, 10**9), 5)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 1
    with pytest.raises(AssertionError, match="odd"):
        harness.hold("a name", lambda n: _assert_even(n), st.integers(0, 100), 20)


def _assert_even(n):
    assert n % 2 == 0, "odd"
