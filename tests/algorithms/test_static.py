"""Masks that never change: `dense`, `static`, `from_masks`."""

import pytest
import torch

import sparsefn as sf

W = torch.tensor([[4.0, -3.0, 2.0, 1.0], [-0.5, 0.6, 0.7, -0.8]])


def test_dense_sparsifies_nothing_and_trains_like_the_optimizer_alone():
    params = {"w": W, "b": torch.ones(2)}
    optimizer = sf.optimizers.adam(0.1)
    algorithm = sf.with_optimizer(sf.dense(), optimizer)
    state, moments, bare = algorithm.init(params), optimizer.init(params), params
    assert state.masks["w"].ndim == state.masks["b"].ndim == 0
    for step in range(3):
        grads = {name: 0.5 * leaf for name, leaf in bare.items()}
        state = algorithm.update(state, grads, step)
        updates, moments = optimizer.update(grads, moments, params=bare)
        bare = {name: leaf + updates[name] for name, leaf in bare.items()}
    assert sf.checkpoint.tree_equal(sf.effective(state), bare)


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_static_keeps_the_exact_count_and_its_mask(sparsity):
    algorithm = sf.static(sparsity, key=sf.random.key(3))
    state = algorithm.init({"w": torch.ones(9, 5), "b": torch.ones(9)})
    assert int(state.masks["w"].sum()) == 45 - round(sparsity * 45)
    assert state.masks["b"].ndim == 0
    assert algorithm.update(state, state.params, 0) is state


def test_random_masks_with_erk_have_its_counts_and_depend_on_nothing_but_the_path():
    # Evci et al. 2020, Liu et al. 2022: a random mask per layer with the counts of ERK.
    params = {"a": torch.ones(64, 32, 3, 3), "b": torch.ones(10, 64)}
    state = sf.static(0.9, distribution=sf.budgets.erk()).init(params)
    assert {path: int(mask.sum()) for path, mask in state.masks.items()} == {
        "a": 1267,
        "b": 640,
    }

    alone = sf.static(0.5, key=sf.random.key(1)).init({"a": params["a"]}).masks["a"]
    more = (
        sf.static(0.5, key=sf.random.key(1))
        .init({"0": torch.ones(3, 3), **params})
        .masks["a"]
    )
    other = sf.static(0.5, key=sf.random.key(2)).init(params).masks["a"]
    assert torch.equal(alone, more)
    assert not torch.equal(alone, other)


def test_a_schedule_is_read_at_step_0():
    schedule = sf.schedules.linear_decay(0.75, 10)
    assert int(sf.static(schedule).init({"w": W}).masks["w"].sum()) == 2


def test_pruned_says_what_becomes_of_the_weights_off_the_mask():
    grads = {"w": torch.ones(2, 4)}
    mask = torch.tensor([[True] * 4, [False] * 4])
    after = {}
    for pruned in ("zero", "keep", "train"):
        algorithm = sf.static(0.5, init="magnitude", pruned=pruned)
        algorithm = sf.with_optimizer(
            algorithm, sf.optimizers.sgd(0.5, weight_decay=0.1)
        )
        state = algorithm.init({"w": W})
        for step in range(2):
            state = algorithm.update(state, grads, step)
        after[pruned] = state.params["w"]
        assert torch.equal(state.masks["w"], mask)
        assert torch.equal(
            sf.effective(state)["w"], torch.where(mask, state.params["w"], 0.0)
        )
    dense = W
    for _ in range(2):
        dense = dense + -0.5 * (grads["w"] + 0.1 * dense)
    assert torch.equal(after["zero"], torch.where(mask, dense, 0.0))
    assert torch.equal(after["keep"], torch.where(mask, dense, W))
    assert torch.equal(after["train"], dense)


def test_pruned_weights_become_positive_zero():
    weights = torch.tensor([[-1.0, float("nan"), float("-inf"), 2.0]])
    state = sf.from_masks({"w": torch.tensor([[False, False, False, True]])}).init(
        {"w": weights}
    )
    assert sf.checkpoint.tree_equal(
        state.params["w"], torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    )


def test_from_masks_takes_full_and_0d_masks_on_any_leaf():
    masks = {"embedding": torch.tensor([True, False]), "w": torch.tensor(True)}
    state = sf.from_masks(masks).init({"embedding": torch.ones(2), "w": W})
    assert state.params["embedding"].tolist() == [1.0, 0.0]
    assert torch.equal(state.params["w"], W)


def test_0d_masks_of_leaves_that_are_not_trained_are_left_out():
    masks = {"a": torch.tensor(True), "w": W > 0, "z": torch.tensor(True)}
    for algorithm in (sf.from_masks(masks), sf.static(None, init=masks)):
        state = algorithm.init({"w": W})
        assert list(state.masks) == ["w"]
        assert torch.equal(state.masks["w"], W > 0)
    nested = sf.from_masks([masks]).init([{"w": W}])
    assert sf.tree.paths(nested.masks) == ["0.w"]
    assert torch.equal(nested.params[0]["w"], W.clamp(min=0.0))


def test_masks_of_dimensions_need_their_leaf():
    masks = {"a": torch.tensor(True), "v": W > 0, "w": W > 0}
    with pytest.raises(ValueError, match="an unknown leaf at 'v' in masks, which"):
        sf.from_masks(masks).init({"w": W})
    with pytest.raises(ValueError, match="leaf at 'bias' .* at 'bais', which params"):
        sf.from_masks({"bais": torch.tensor(True)}).init({"bias": W})


def test_parameters_are_detached_and_plain_tensors_stay_in_the_graph():
    state = sf.static(0.5, init="magnitude").init({"w": torch.nn.Parameter(W)})
    assert type(state.params["w"]) is torch.Tensor
    assert not state.params["w"].requires_grad

    def kept_sum(weights):
        return sf.static(0.5, init="magnitude").init({"w": weights}).params["w"].sum()

    assert torch.func.grad(kept_sum)(W).tolist() == [[1.0] * 4, [0.0] * 4]
