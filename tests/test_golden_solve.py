"""Held against recorded outputs of the authors' code: SparseGPT, OBC and ALPS."""

import pytest
import torch
from golden_data import cases

import sparsefn as sf


def error(new, weight, hessian):
    change = (new - weight).double()
    return float((change @ hessian.double() * change).sum())


@pytest.mark.parametrize(
    "case", cases("sparsegpt", "fasterprune"), ids=lambda case: case.id
)
def test_sparsegpt(case):
    weight, hessian, mask = (
        case.inputs["weight"],
        case.inputs["hessian"],
        case.outputs["mask"],
    )
    block, m = case.args.get("blocksize", 128), case.args.get("prunem")
    if m:  # their n is how many are pruned
        what = {"pattern": sf.patterns.nm(m - case.args["prunen"], m)}
    else:  # they prune one more than the truncated share of each block
        what = {"keep": [int(part.sum()) for part in mask.split(block, 1)]}
    new, kept = sf.solve.obs(weight, hessian, block=block, **what)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, case.outputs["weight_after"], rtol=1e-4, atol=1e-4)
    again, _ = sf.solve.obs(weight, hessian, mask=mask)
    torch.testing.assert_close(
        again, case.outputs["weight_after"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "case", cases("obc", "TrueOBS.nmprune"), ids=lambda case: case.id
)
def test_obc_nm(case):
    weight, hessian, after = (
        case.inputs["weight"],
        case.inputs["hessian"],
        case.outputs["weight_after"],
    )
    m = case.args["m"]
    new, kept = sf.solve.obs_exact(
        weight, hessian, pattern=sf.patterns.nm(m - case.args["n"], m)
    )
    assert torch.equal(kept, after != 0)
    torch.testing.assert_close(new, after, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "case", cases("obc", "TrueOBS.prune_unstr"), ids=lambda case: case.id
)
def test_obc_over_all_rows(case):
    weight, hessian = case.inputs["weight"], case.inputs["hessian"]
    for after in case.outputs["weight_after"]:
        gone = after == 0
        # They count how many of a row's losses are among the least, in whatever order
        # the row has them.
        new, kept = sf.solve.obs_exact(weight, hessian, gone.sum(1).tolist(), damp=0.01)
        assert torch.equal(kept, ~gone)
        torch.testing.assert_close(new, after, rtol=1e-4, atol=1e-4)
        best, ours = sf.solve.obs_exact(weight, hessian, int(gone.sum()), damp=0.01)
        assert int((~ours).sum()) == int(gone.sum())
        damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
        assert error(best, weight, damped) <= error(after, weight, damped) * (1 + 1e-6)


@pytest.mark.parametrize("case", cases("alps", "ALPS_admm"), ids=lambda case: case.id)
def test_alps_is_within_a_hundredth_of_the_refit_of_its_mask(case):
    weight, gram, after = (
        case.inputs["weight"],
        case.inputs["gram"],
        case.outputs["weight_after"],
    )
    refit = error(sf.solve.refit(weight, gram, after != 0), weight, gram)
    assert refit <= error(after, weight, gram) <= 1.01 * refit
