"""The tensors that graphs read, and what their results are."""

import pytest
import torch

import sparsefn as sf
from property_tests.tape import Tape
from sparsefn.algorithms.combine import cuda_graphs
from sparsefn.algorithms.combine.replays import Replays, Target

CPU = Target(torch.device("cpu"), 0)
PARAMS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    monkeypatch.setitem(cuda_graphs.GRAPHS, "cpu", lambda device: Tape)


def replayed(change):
    """The state after `change(params, grads, step)` of two steps, by replays."""

    def inner(state, grads, step):
        return state._replace(params=change(state.params, grads, step))

    algorithm = sf.dense()
    replays = Replays(algorithm, inner)
    state = algorithm.init(PARAMS)
    for step in range(2):
        state = replays.update(state, PARAMS, step, CPU)
    return state.params


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda p, g, step: {"a": p["b"], "b": p["a"]}, PARAMS),
        (lambda p, g, step: {"a": p["b"] + 1, "b": p["a"]}, {"a": [2, 3], "b": [4, 5]}),
        (lambda p, g, step: {"a": p["a"][:1], "b": p["b"]}, {"a": [1], "b": [3, 4]}),
        (
            lambda p, g, step: {"a": g["a"], "b": g["b"] * step},
            {"a": [1, 2], "b": [3, 4]},
        ),
        (
            lambda p, g, step: {"a": p["a"], "b": torch.ones(2)},
            {"a": [1, 2], "b": [1, 1]},
        ),
        (
            lambda p, g, step: {"a": p["a"] + step, "b": p["a"] + step},
            {"a": [2, 3], "b": [2, 3]},
        ),
    ],
    ids=["swap", "swap and change", "a view", "a gradient", "a constant", "the step"],
)
def test_results_are_those_of_the_function(change, wanted):
    new = replayed(change)
    for name, want in wanted.items():
        assert torch.equal(new[name], torch.as_tensor(want).float())


def test_results_share_no_memory_with_each_other_or_the_next():
    def inner(state, grads, step):
        x = state.params["a"] + 1
        return state._replace(params={"a": x, "b": x})

    algorithm = sf.dense()
    replays = Replays(algorithm, inner)
    state = algorithm.init(PARAMS)
    found = []
    for step in range(3):
        state = replays.update(state, PARAMS, step, CPU)
        found += [state.params["a"], state.params["b"]]
    assert len({x.data_ptr() for x in found}) == len(found)
    assert [x[0].item() for x in found] == [2, 2, 3, 3, 4, 4]


def test_a_structure_that_an_update_changes_is_another_one():
    def inner(state, grads, step):
        return state._replace(scores={"n": grads})

    algorithm = sf.dense()
    replays = Replays(algorithm, inner)
    state = algorithm.init(PARAMS)
    before = Tape.captures
    for step in range(3):
        state = replays.update(state, PARAMS, step, CPU)
    assert Tape.captures == before + 2
    assert state.scores == {"n": PARAMS}


def test_results_of_a_closure_with_gradients_have_none():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    new = replayed(lambda p, g, step: {"a": p["a"] * weight, "b": p["b"]})
    assert not new["a"].requires_grad
    assert torch.equal(new["a"], torch.tensor([1.0, 8.0]))


def test_a_donated_leaf_that_goes_to_another_place_is_not_written_over():
    def turn(state, grads, step):
        old = state.params
        return state._replace(params={"a": old["b"] + 1, "b": old["a"]})

    algorithm = sf.Algorithm(sf.dense().init, turn)
    donated = sf.donated(sf.captured(algorithm))
    state = donated.init(PARAMS)
    for step in range(2):
        state = donated.update(state, PARAMS, step)
    assert torch.equal(state.params["a"], torch.tensor([2.0, 3.0]))
    assert torch.equal(state.params["b"], torch.tensor([4.0, 5.0]))
