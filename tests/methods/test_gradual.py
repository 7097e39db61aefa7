"""Gradual pruning by name, training that is sparse and dense by turns, and lottery
tickets.

These are held against the recorded masks of the authors' code, and against what a round
leaves.
"""

import math

import pytest
import torch
from golden_data import cases
from test_golden_literature import same_masks, under

import sparsefn as sf


def test_gmp_is_the_algorithm_of_the_top_level():
    assert sf.methods.gmp is sf.gmp


def test_dense_phases_start_at_zero_with_fresh_moments():
    sparse, dense = sf.at([2, 6, 10]), sf.at([4, 8])
    turns = sf.methods.ac_dc(0.9, sparse=sparse, dense=dense)
    algorithm = sf.with_optimizer(
        turns, sf.optimizers.sgd(0.1, momentum=0.9), reset=dense
    )
    params = {
        "a": torch.randn(10, 20),
        "b": torch.randn(20, 15),
        "bias": torch.randn(15),
    }
    state, counts = algorithm.init(params), []
    for step in range(12):
        old = state
        state = algorithm.update(
            state, {path: torch.randn_like(w) for path, w in params.items()}, step
        )
        counts.append(sum(int(state.masks[path].sum()) for path in ("a", "b")))
        if dense(step):
            assert all(
                not state.params[path][~old.masks[path]].any() for path in ("a", "b")
            )
            assert all(not moment.any() for moment in state.opt.momentum.values())
        elif not sparse(step):
            assert all(
                torch.equal(state.masks[path], old.masks[path]) for path in params
            )
    assert counts == [500, 500, 50, 50, 500, 500, 50, 50, 500, 500, 50, 50]


def test_without_an_optimizer_the_mask_comes_back():
    algorithm = sf.methods.ac_dc(0.5, sparse=sf.at([0, 2]), dense=sf.at([1]))
    params = {"w": torch.randn(6, 6)}
    state, masks = algorithm.init(params), []
    for step in range(3):
        state = algorithm.update(state, params, step)
        masks.append(state.masks["w"])
    assert (
        torch.equal(masks[0], masks[2]) and masks[1].all() and int(masks[0].sum()) == 18
    )


def test_dense_wins_where_both_fire_and_steps_may_be_tensors():
    algorithm = sf.methods.ac_dc(
        torch.tensor(0.5), sparse=sf.always(), dense=sf.at([1])
    )
    state, counts = algorithm.init({"w": torch.randn(4, 4)}), []
    for step in range(3):
        state = algorithm.update(state, state.params, torch.tensor(step))
        counts.append(int(state.masks["w"].sum()))
    assert counts == [8, 16, 8]


def test_bad_input():
    with pytest.raises(TypeError, match="dense"):
        sf.methods.ac_dc(0.5, sparse=sf.always(), dense=3)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        sf.methods.ac_dc(1.5, sparse=sf.always(), dense=sf.never())


@pytest.mark.parametrize(
    "case", cases("imp", "sparse_global"), ids=lambda case: case.id
)
def test_imp_keeps_what_its_recording_keeps(case):
    levels, fraction = case.args["levels"], case.args["fraction"]
    params = under(case.inputs, "weight/0")
    left = [sum(mask.numel() for mask in under(case.outputs, "mask/0").values())]
    for _ in range(levels):  # theirs rounds up, and drops what is at the threshold, too
        left.append(left[-1] - math.ceil(fraction * left[-1]) - 1)
    algorithm = sf.methods.imp(
        lambda step: 1 - left[step + 1] / left[step], when=sf.always(), where="*"
    )
    state = algorithm.init(params)
    for level in range(levels):
        state = algorithm.update(
            state._replace(params=under(case.inputs, f"weight/{level}")), params, level
        )
        assert same_masks(state.masks, under(case.outputs, f"mask/{level}"))


def test_a_round_leaves_early_weights_under_nested_masks_and_fresh_moments():
    rounds, optimizer = sf.every(3, start=3), sf.optimizers.sgd(0.1, momentum=0.9)
    algorithm = sf.with_optimizer(
        sf.methods.imp(0.2, when=rounds, to=sf.at([1])), optimizer, reset=rounds
    )
    params = {"a": torch.randn(5, 10), "b": torch.randn(10, 5), "bias": torch.randn(5)}
    state = algorithm.init(params)
    counts, early = [], None
    for step in range(16):
        grads = {path: torch.randn_like(w) for path, w in params.items()}
        old, state = state, algorithm.update(state, grads, step)
        if step == 1:
            early = state.params
        assert all(not (state.masks[path] & ~old.masks[path]).any() for path in params)
        if rounds(step):
            counts.append(sum(int(state.masks[path].sum()) for path in ("a", "b")))
            assert all(
                torch.equal(
                    state.params[path], torch.where(state.masks[path], early[path], 0.0)
                )
                for path in params
            )
            assert all(not moment.any() for moment in state.opt.momentum.values())
    assert counts == [80, 64, 51, 41, 33]


def test_bad_input_of_imp():
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        sf.methods.imp(1.5, when=sf.always())
    with pytest.raises(TypeError, match="expected when to be a trigger|when"):
        sf.methods.imp(0.5, when=3)


@pytest.mark.parametrize(("n", "kept"), [(18, 2), (42, 4), (66, 6)])  # halves, to even
def test_ac_dc_keeps_as_many_weights_at_a_step_that_is_a_tensor(n, kept):
    # not the same number in float32
    turns = sf.methods.ac_dc(11 / 12, sparse=sf.at([0]), dense=sf.at([2]))
    weights = {"w": torch.randn(n, 1)}
    for step in (0, torch.tensor(0)):
        assert (
            int(turns.update(turns.init(weights), weights, step).masks["w"].sum())
            == kept
        )
