"""Lottery tickets, learned maps and transposable masks, held against recorded outputs of the authors' code."""

import pytest
import torch
from golden_data import cases

import sparsefn as sf


def named(system, fn):
    return pytest.mark.parametrize("case", cases(system, fn), ids=lambda case: case.id)


@named("imp", "sparse_global")
def test_lottery_tickets(case):
    levels = range(case.args["levels"])
    paths = sorted({name.split("/")[2] for name in case.inputs})
    weights = [{path: case.inputs[f"weight/{level}/{path}"] for path in paths} for level in levels]
    # Theirs prunes up to the threshold, which is one more than the ceiling.
    pruned = sf.iterative(
        case.args["fraction"],
        count=lambda fraction, active: torch.ceil(active.double() * fraction).long() + 1,
        distribution=sf.budgets.global_(),
        where="*",
    )
    algorithm = sf.rewinding(pruned, to=sf.never(), when=sf.always())
    state, before = algorithm.init(weights[0]), None
    for level in levels:
        state = algorithm.update(sf.with_params(state, weights[level]), weights[level], level)
        assert sf.masks.n_kept(state.masks) == case.value["kept"][level]
        for path in paths:
            mask = state.masks[path]
            assert torch.equal(mask, case.outputs[f"mask/{level}/{path}"].bool())
            assert torch.equal(state.params[path], torch.where(mask, weights[0][path], 0.0))
            assert before is None or not (mask & ~before[path]).any()
        before = state.masks
