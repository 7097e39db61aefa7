"""Held against recorded outputs of the authors' code: LAMP, SRigL, GraNet and the
topological scores of CHT.
"""

import pytest
import torch
from golden_data import cases

import sparsefn as sf

GLOBAL = sf.budgets.global_()


def named(system, fn):
    return pytest.mark.parametrize("case", cases(system, fn), ids=lambda case: case.id)


def under(tensors, prefix):
    return {
        name.removeprefix(prefix + "/"): x
        for name, x in tensors.items()
        if name.startswith(prefix + "/")
    }


def sparsity_of(masks):
    """That which keeps as many as these masks: the originals truncate, so that counts
    are given.
    """
    total, kept = (
        sum(n)
        for n in zip(*((m.numel(), int(m.sum())) for m in masks.values()), strict=True)
    )
    return torch.tensor(1 - kept / total, dtype=torch.float64)


@named("lamp", "_normalize_scores")
def test_scores_of_lamp(case):
    w = case.inputs["weight"]
    found = sf.scores.lamp(
        sf.State({"w": w}, {"w": torch.ones_like(w, dtype=torch.bool)}), (), 0
    )["w"]
    assert torch.allclose(found, case.outputs["score"].double(), rtol=1e-5, atol=0)


@named("lamp", "prune_weights_lamp")
def test_masks_of_lamp(case):
    weights, recorded = under(case.inputs, "weight"), under(case.outputs, "mask")
    algorithm = sf.one_shot(
        sparsity_of(recorded), sf.scores.lamp, distribution=GLOBAL, where="*"
    )
    found = algorithm.update(algorithm.init(weights), weights, 0).masks
    assert all(torch.equal(found[path], mask.bool()) for path, mask in recorded.items())


@named("lamp", "prune_weights_erk")
def test_counts_of_erk(case):
    weights, recorded = under(case.inputs, "weight"), under(case.outputs, "mask")
    counts = sf.budgets.erk()(
        {path: tuple(w.shape) for path, w in weights.items()}, case.args["amount"]
    )
    # Theirs rounds each layer by itself; here the total is exact.
    assert all(
        abs(counts[path] - int(mask.sum())) <= 1 for path, mask in recorded.items()
    )


@named("granet", "GraNet")
def test_granet(case):
    weights, before = under(case.inputs, "weight"), under(case.inputs, "mask_before")
    prune = sf.gmp(
        sparsity_of(under(case.outputs, "mask_pruned")),
        distribution=GLOBAL,
        init=before,
        where="*",
    )
    regrow = sf.rigl(
        "current",
        drop_fraction=case.args["drop_fraction"],
        count=sf.budgets.rounded_up,
        where="*",
        init=before,
    )
    algorithm = sf.sequence(prune, regrow)
    state = algorithm.update(algorithm.init(weights), under(case.inputs, "grad"), 0)
    assert all(
        torch.equal(state.masks[path], mask)
        for path, mask in under(case.outputs, "mask").items()
    )
    assert all(
        torch.equal(sf.effective(state)[p], w)
        for p, w in under(case.outputs, "weight_after").items()
    )


@named("cht", "L3n")
def test_scores_of_cht(case):
    mask = case.inputs["mask"].bool()
    found = sf.scores.topology(case.args["method"])(
        sf.State({"w": mask.float()}, {"w": mask}), (), 0
    )["w"]
    assert torch.allclose(found, case.outputs["score"].double(), rtol=1e-6, atol=0)


@named("srigl", "_rigl_step")
def test_srigl(case):
    a, w, grad, before = (
        case.args,
        *(case.inputs[name] for name in ("weight", "grad", "mask_before")),
    )
    options = {
        "ablation": a["gamma"],
        "drop_fraction": a["drop_fraction"],
        "where": "*",
        "ablate": "*",
    }
    algorithm = sf.methods.srigl(
        1 - a["density"], steps=1, init={"w": before}, **options
    )
    state = algorithm.update(algorithm.init({"w": w}), {"w": grad}, 0)
    assert torch.equal(state.masks["w"], case.outputs["mask"].bool())
    assert torch.equal(sf.effective(state)["w"], case.outputs["weight_after"])
    assert (~state.masks["w"].any(1)).nonzero()[:, 0].tolist() == case.outputs[
        "ablated"
    ].tolist()
