"""Scores of weights and gradients."""

import math

import pytest
import torch

import sparsefn as sf

S = sf.scores
NONE = sf.State((), ())


def vector(*values, dtype=torch.float32):
    return {"w": torch.tensor(values, dtype=dtype)}


def state_of(*values, **fields):
    return sf.State(vector(*values), {"w": torch.tensor(True)}, **fields)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_products_of_16_bits_are_told_apart(dtype):
    weights, grads = (
        vector(1e-2, 2e-2, 3e-2, dtype=dtype),
        vector(-1e-6, -1e-6, -1e-6, dtype=dtype),
    )
    state = sf.State(weights, {"w": torch.ones(3, dtype=torch.bool)})

    def loss(params):
        return -(params["w"].double() * 1e-6).sum()

    for score in (S.saliency, S.movement, sf.curvature.sensitivity(loss)):
        made = score(state, grads, 0)["w"]
        assert (
            made.dtype == torch.float32
            and made.argsort().tolist() == [0, 1, 2]
            and (made > 0).all()
        )


def test_plain_scores():
    state, grads = state_of(2.0, -1.0, 0.5, -0.0), vector(-0.5, 3.0, -1.0, 4.0)
    for score, expected in (
        (S.magnitude, [2.0, 1.0, 0.5, 0.0]),
        (S.gradient, [0.5, 3.0, 1.0, 4.0]),
        (S.saliency, [1.0, 3.0, 0.5, 0.0]),
        (S.movement, [1.0, 3.0, 0.5, 0.0]),
    ):
        assert score(state, grads, 0)["w"].tolist() == expected
    assert S.movement(state, vector(1.0, 1.0, 1.0, 1.0), 0)["w"].tolist() == [
        -2.0,
        1.0,
        -0.5,
        0.0,
    ]


def test_gradients_are_scored_off_the_mask_too():
    masks = {"w": torch.tensor([True, False])}
    state = sf.State(vector(1.0, 0.0), masks)
    assert S.gradient(state, vector(1.0, -7.0), 0)["w"].tolist() == [1.0, 7.0]


def test_values_that_are_not_numbers_pass_through():
    nan, inf = math.nan, math.inf
    scores = S.gradient(NONE, vector(nan, -inf, 0.0), 0)["w"]
    assert math.isnan(scores[0])
    assert scores[1:].tolist() == [inf, 0.0]


def test_random_scores_depend_on_key_path_step_and_index_alone():
    tree = {"a": torch.zeros(50), "b": torch.zeros(50)}
    state = sf.State(tree, {}, key=sf.random.key(0))
    draws = S.random(state, (), 3)
    assert not torch.equal(draws["a"], draws["b"])
    reordered = state._replace(params={"b": tree["b"], "a": tree["a"]})
    assert sf.checkpoint.tree_equal(S.random(reordered, (), torch.tensor(3)), draws)
    longer = S.random(state._replace(params={"a": torch.zeros(90)}), (), 3)
    assert torch.equal(longer["a"][:50], draws["a"])
    for other in (
        S.random(state, (), 4),
        S.random(state._replace(key=sf.random.key(1)), (), 3),
    ):
        assert not torch.equal(other["a"], draws["a"])
    assert 0.3 < float(draws["a"].mean()) < 0.7


def test_random_scores_need_a_key():
    with pytest.raises(
        ValueError,
        match=r"expected a state with a PRNG key for random scores, got none; pass "
        r"key=",
    ):
        S.random(state_of(1.0), (), 0)
