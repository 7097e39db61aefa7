"""Scores by role, and where what they remember lies in a state."""

import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.memory import Memory, Reader
from sparsefn.masks.scores import pointwise

draw = pointwise.drawn_leaves

PARAMS = {"w": torch.tensor([[1.0, -2.0], [3.0, 4.0]])}
GRADS = {"w": torch.tensor([[4.0, -2.0], [0.0, 1.0]])}


def state_of(memory, key=()):
    masks = {"w": torch.ones(2, 2, dtype=torch.bool)}
    return sf.State(PARAMS, masks, memory.init(PARAMS), key)


def test_memories_lie_by_role_and_others_nowhere():
    assert Memory({"score": sf.scores.magnitude}, "zero").init(PARAMS) == ()
    memory = Memory(
        {"drop": sf.scores.magnitude, "grow": sf.scores.momentum(0.5)}, "zero"
    )
    assert list(memory.init(PARAMS)) == ["grow"]
    state = memory.accumulate(state_of(memory), GRADS, 0)
    assert torch.equal(state.scores["grow"]["w"], 0.5 * GRADS["w"])
    plain = Memory({"score": sf.scores.magnitude}, "zero")
    before = state_of(plain)
    assert plain.accumulate(before, GRADS, 0) is before


def test_a_role_is_read_signed_where_that_is_asked_for():
    memory = Memory(
        {
            "drop": sf.scores.magnitude,
            "grow": sf.scores.momentum(0.5),
            "share": sf.scores.saliency,
        },
        "zero",
    )
    state = memory.accumulate(state_of(memory), GRADS, 0)
    reader = Reader(memory, ["w"], state, GRADS, 0)
    read = {role: reader.of(["w"])(role) for role in memory.scores}
    assert [scores.absolute for scores in read.values()] == [True, True, False]
    assert torch.equal(read["drop"].signed["w"], PARAMS["w"])
    assert torch.equal(read["grow"].signed["w"], 0.5 * GRADS["w"])
    assert torch.equal(read["drop"].values["w"], PARAMS["w"].abs())


def test_each_role_draws_its_own_numbers():
    memory = Memory({"drop": sf.scores.random, "grow": sf.scores.random}, "zero")
    state = state_of(memory, sf.random.key(0))
    drop, grow = (
        Reader(memory, ["w"], state, GRADS, 0).of(["w"])(role).values["w"]
        for role in ("drop", "grow")
    )
    assert not torch.equal(drop, grow)


def test_scores_are_checked():
    for score, error, text in (
        (
            lambda state, grads, step: {},
            ValueError,
            "expected scores with the structure of params, but there is no leaf",
        ),
        (
            lambda state, grads, step: {"w": torch.ones(2)},
            ValueError,
            r"expected scores of shape \(2, 2\) at 'w', got",
        ),
        (
            lambda state, grads, step: {"w": torch.ones(2, 2, dtype=torch.int64)},
            TypeError,
            "expected floating-point scores, got torch.int64 at 'w'",
        ),
    ):
        memory = Memory({"score": score}, "zero")
        with pytest.raises(error, match=text):
            Reader(memory, ["w"], state_of(memory), GRADS, 0).of(["w"])("score")


def test_draws_of_some_leaves_are_made_without_those_of_the_others(monkeypatch):
    memory = Memory({"drop": sf.scores.magnitude, "grow": sf.scores.random}, "zero")
    params = {"a": torch.zeros(40), "b": torch.zeros(30), "c": torch.zeros(5)}
    state = sf.State(params, {}, key=sf.random.key(0))
    whole = sf.scores.random(
        state._replace(key=sf.random.fold_in(state.key, "grow")), (), 3
    )
    drawn = []
    monkeypatch.setattr(
        pointwise,
        "drawn_leaves",
        lambda key, leaves, *rest: drawn.append([*leaves]) or draw(key, leaves, *rest),
    )
    for some in (["c", "a"], ["b"]):
        scores = Reader(memory, params, state, (), 3).of(some)("grow")
        read = scores.signed
        assert (
            not scores.absolute
            and list(read) == some
            and all(torch.equal(read[path], whole[path]) for path in some)
        )
    assert drawn == [["c", "a"], ["b"]]
