"""Lottery tickets by name: the recorded masks of the authors' code, and what a round leaves."""

import math

import pytest
import torch
from golden_data import cases
from test_golden_literature import same_masks, under

import sparsefn as sf


@pytest.mark.parametrize("case", cases("imp", "sparse_global"), ids=lambda case: case.id)
def test_imp_keeps_what_its_recording_keeps(case):
    levels, fraction = case.args["levels"], case.args["fraction"]
    params = under(case.inputs, "weight/0")
    left = [sum(mask.numel() for mask in under(case.outputs, "mask/0").values())]
    for _ in range(levels):  # theirs rounds up, and drops what is at the threshold, too
        left.append(left[-1] - math.ceil(fraction * left[-1]) - 1)
    algorithm = sf.methods.imp(lambda step: 1 - left[step + 1] / left[step], when=sf.always(), where="*")
    state = algorithm.init(params)
    for level in range(levels):
        state = algorithm.update(state._replace(params=under(case.inputs, f"weight/{level}")), params, level)
        assert same_masks(state.masks, under(case.outputs, f"mask/{level}"))


def test_a_round_leaves_early_weights_under_nested_masks_and_fresh_moments():
    rounds, optimizer = sf.every(3, start=3), sf.optimizers.sgd(0.1, momentum=0.9)
    algorithm = sf.with_optimizer(sf.methods.imp(0.2, when=rounds, to=sf.at([1])), optimizer, reset=rounds)
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
                torch.equal(state.params[path], torch.where(state.masks[path], early[path], 0.0)) for path in params
            )
            assert all(not moment.any() for moment in state.opt.momentum.values())
    assert counts == [80, 64, 51, 41, 33]


def test_bad_input():
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        sf.methods.imp(1.5, when=sf.always())
    with pytest.raises(TypeError, match="expected when to be a trigger|when"):
        sf.methods.imp(0.5, when=3)
