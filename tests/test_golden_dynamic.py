"""Held against recorded outputs of the authors' code: LAMP, SRigL, GraNet and the topological scores of CHT."""

import math

import pytest
import torch
from golden_data import cases

import sparsefn as sf

GLOBAL, ROWS = sf.budgets.global_(), sf.patterns.channel(0, norm=math.inf)


def named(system, fn):
    return pytest.mark.parametrize("case", cases(system, fn), ids=lambda case: case.id)


def under(tensors, prefix):
    return {name.removeprefix(prefix + "/"): x for name, x in tensors.items() if name.startswith(prefix + "/")}


def sparsity_of(masks):
    """That which keeps as many as these masks: the originals truncate, so that counts are given."""
    total, kept = (sum(n) for n in zip(*((m.numel(), int(m.sum())) for m in masks.values()), strict=True))
    return torch.tensor(1 - kept / total, dtype=torch.float64)


@named("lamp", "_normalize_scores")
def test_scores_of_lamp(case):
    w = case.inputs["weight"]
    found = sf.scores.lamp(sf.State({"w": w}, {"w": torch.ones_like(w, dtype=torch.bool)}), (), 0)["w"]
    assert torch.allclose(found, case.outputs["score"].double(), rtol=1e-5, atol=0)


@named("lamp", "prune_weights_lamp")
def test_masks_of_lamp(case):
    weights, recorded = under(case.inputs, "weight"), under(case.outputs, "mask")
    algorithm = sf.one_shot(sparsity_of(recorded), sf.scores.lamp, distribution=GLOBAL, where="*")
    found = algorithm.update(algorithm.init(weights), weights, 0).masks
    assert all(torch.equal(found[path], mask.bool()) for path, mask in recorded.items())


@named("granet", "GraNet")
def test_granet(case):
    weights, before = under(case.inputs, "weight"), under(case.inputs, "mask_before")
    prune = sf.gmp(sparsity_of(under(case.outputs, "mask_pruned")), distribution=GLOBAL, init=before, where="*")
    regrow = sf.rigl(
        "current", drop_fraction=case.args["drop_fraction"], count=sf.budgets.rounded_up, where="*", init=before
    )
    algorithm = sf.sequence(prune, regrow)
    state = algorithm.update(algorithm.init(weights), under(case.inputs, "grad"), 0)
    assert all(torch.equal(state.masks[path], mask) for path, mask in under(case.outputs, "mask").items())
    assert all(torch.equal(sf.effective(state)[p], w) for p, w in under(case.outputs, "weight_after").items())


@named("cht", "L3n")
def test_scores_of_cht(case):
    def half(m):
        common = m @ m.T
        others = (m.sum(1) - common).clamp(min=1)
        return ((common > 0) * (1 + common if case.args["method"] == "CH2" else 1) / others) @ m

    @sf.scores.leafwise
    def topology(weight, grad, mask):
        m = mask.float()
        return torch.where(mask, 0.0, half(m) + half(m.T).T)

    mask = case.inputs["mask"].bool()
    found = topology(sf.State({"w": mask.float()}, {"w": mask}), (), 0)["w"]
    assert torch.allclose(found, case.outputs["score"], rtol=1e-6, atol=0)


def srigl(keep, drop, least, rows_at_least, total, masks):
    """One update of SRigL, as a chain of a choice of rows and a sequence that prunes, trims and grows inside them."""

    @sf.scores.leafwise
    def salient(weight, grad, mask):
        return (sf.topk_mask(weight.abs(), keep) | sf.topk_mask(grad.abs(), drop)).float()

    per_row = sf.scores.by_unit(salient, sf.patterns.channel(0), lambda scores: scores.sum(-1))
    rows = sf.gmp(sf.counts.above(least - 0.5, rows_at_least), score=per_row, pattern=ROWS, regrow=True, where="*")
    size = masks["w"].numel()

    def kept(n):
        return torch.tensor(1 - n / size, dtype=torch.float64)

    def as_it_was(state, grown, step):  # a weight that was only just dropped grows with its value
        return state.params

    prune = sf.gmp(kept(keep), init=masks, where="*", pruned="keep")
    refill = sf.rigl(
        kept(total), pattern=sf.patterns.row_balanced(), drop_fraction=0.0, grown=as_it_was, init=masks, where="*"
    )
    return sf.chain(rows, sf.sequence(prune, refill))


@named("srigl", "_rigl_step")
def test_srigl(case):
    a, w, grad, before = case.args, *(case.inputs[name] for name in ("weight", "grad", "mask_before"))
    fan, active = w.shape[1], int(before.sum())
    least = max(1, int(a["gamma"] * int(a["density"] * fan))) if a["gamma"] else 0
    alive = w.shape[0] - len(case.outputs["ablated"])
    enough = int(w.numel() * a["density"]) // fan + 1
    algorithm = srigl(a["n_keep"], active - a["n_keep"], least, enough, a["fan_in"] * alive, {"w": before})
    state = algorithm.update(algorithm.init({"w": w}), {"w": grad}, 0)
    assert torch.equal(state.masks["w"], case.outputs["mask"].bool())
    assert torch.equal(sf.effective(state)["w"], case.outputs["weight_after"])
    assert (~state.masks["w"].any(1)).nonzero()[:, 0].tolist() == case.outputs["ablated"].tolist()
