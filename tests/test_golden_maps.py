"""Lottery tickets, learned maps and transposable masks, held against recorded outputs
of the authors' code.
"""

import pytest
import torch
from golden_data import cases

import sparsefn as sf
from sparsefn.algorithms.reparam.gates import drawn_gate


def named(system, fn):
    return pytest.mark.parametrize("case", cases(system, fn), ids=lambda case: case.id)


@named("imp", "sparse_global")
def test_lottery_tickets(case):
    levels = range(case.args["levels"])
    paths = sorted({name.split("/")[2] for name in case.inputs})
    weights = [
        {path: case.inputs[f"weight/{level}/{path}"] for path in paths}
        for level in levels
    ]
    # Theirs prunes up to the threshold, which is one more than the ceiling.
    pruned = sf.iterative(
        case.args["fraction"],
        count=lambda fraction, active: (
            torch.ceil(active.double() * fraction).long() + 1
        ),
        distribution=sf.budgets.global_(),
        where="*",
    )
    algorithm = sf.rewinding(pruned, to=sf.never(), when=sf.always())
    state, before = algorithm.init(weights[0]), None
    for level in levels:
        state = algorithm.update(
            sf.with_params(state, weights[level]), weights[level], level
        )
        assert sf.masks.n_kept(state.masks) == case.value["kept"][level]
        for path in paths:
            mask = state.masks[path]
            assert torch.equal(mask, case.outputs[f"mask/{level}/{path}"].bool())
            assert torch.equal(
                state.params[path], torch.where(mask, weights[0][path], 0.0)
            )
            assert before is None or not (mask & ~before[path]).any()
        before = state.masks


KEY = sf.random.key(0)


def pulled(map_, latents, upstream, step=0):
    weights, pull, masks = torch.func.vjp(
        lambda tree: map_.apply(tree, step, KEY), latents, has_aux=True
    )
    return weights["w"], masks["w"], pull({"w": upstream})[0]


@named("reparam", "sparseFunction")
def test_soft_threshold(case):
    given = case.inputs
    latents = {
        "latent": {"w": given["weight"]},
        "threshold": {"w": torch.tensor(case.args["s"])},
    }
    weights, _, slopes = pulled(sf.reparam.soft_threshold(), latents, given["upstream"])
    torch.testing.assert_close(weights, case.outputs["out"])
    torch.testing.assert_close(slopes["latent"]["w"], case.outputs["grad_weight"])
    expected = case.outputs["grad_threshold"].reshape(())
    torch.testing.assert_close(slopes["threshold"]["w"], expected, rtol=1e-5, atol=1e-6)


@named("reparam", "SoftMaskedConv2d")
def test_continuous_sparsification_and_the_end_of_its_rounds(case):
    given, out, beta = case.inputs, case.outputs, case.args["beta"]
    map_ = sf.reparam.sigmoid_gate(beta, init=case.args["s0"], round_end=sf.at([3]))
    latents = {"latent": {"w": given["weight"]}, "gate": {"w": given["score"]}}
    weights, mask, slopes = pulled(map_, latents, given["upstream"])
    assert mask.ndim == 0
    torch.testing.assert_close(weights, out["out"])
    torch.testing.assert_close(slopes["latent"]["w"], out["grad_weight"])
    # Their sigmoid is 1 in float32 where ours still has a slope, times the temperature.
    torch.testing.assert_close(
        slopes["gate"]["w"], out["grad_score"], rtol=1e-4, atol=1e-6 * beta
    )
    settled, mask = (tree["w"] for tree in map_.settled(latents, 0))
    torch.testing.assert_close(settled, given["weight"] * out["ticket"])
    assert torch.equal(mask, out["ticket"] > 0)
    torch.testing.assert_close(
        map_.project(latents, 3)["gate"]["w"], out["score_after_round"]
    )
    assert torch.equal(map_.project(latents, 2)["gate"]["w"], given["score"])


@named("reparam", "L0Dense")
def test_hard_concrete(case):
    given, out, args = case.inputs, case.outputs, case.args
    beta, alpha = args["temperature"], given["log_alpha"]

    def weights_of(v, log_alpha):
        return v * drawn_gate(log_alpha, given["u"], beta, -0.1, 1.1)[:, None]

    weights, pull = torch.func.vjp(weights_of, given["weight"], alpha)
    by_weight, by_gate = pull(given["upstream"])
    torch.testing.assert_close(weights, out["out"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_weight, out["grad_weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_gate, out["grad_log_alpha"], rtol=1e-4, atol=1e-5)
    chances = sf.reparam.chance_kept(alpha, beta)
    torch.testing.assert_close(chances, out["p_nonzero"], rtol=1e-4, atol=1e-6)
    # One gate for each input: their weights are (inputs, outputs).
    map_ = sf.reparam.hard_concrete(beta, pattern=sf.patterns.channel(0))
    latents = {"latent": {"w": given["weight"]}, "gate": {"w": alpha[:, None]}}
    settled = map_.settled(latents, 0)[0]["w"]
    torch.testing.assert_close(
        settled, given["weight"] * out["test_gate"][:, None], rtol=1e-4, atol=1e-6
    )

    # theirs is negative, and counts the bias with the weights
    def penalty(log_alpha, weight):
        decay = 0.5 * args["weight_decay"]
        chance = sf.reparam.chance_kept(log_alpha, beta)
        each = decay * weight.square() + args["lamba"]
        return -(chance[:, None] * each).sum() - decay * given["bias"].square().sum()

    value = penalty(alpha, given["weight"])
    torch.testing.assert_close(
        value, out["neg_penalty"].reshape(()), rtol=1e-4, atol=1e-5
    )
    slopes = torch.func.grad(penalty, (0, 1))(alpha, given["weight"])
    torch.testing.assert_close(
        slopes[0], out["grad_penalty_log_alpha"], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        slopes[1], out["grad_penalty_weight"], rtol=1e-4, atol=1e-5
    )


@named("reparam", "ThresholdBinarizer")
def test_thresholds_of_soft_movement(case):
    score = torch.sigmoid(case.inputs["score"])
    mask = sf.masks.threshold_mask(
        score, case.args["tau"], min_keep=int(0.005 * score.numel()) + 1
    )
    assert torch.equal(mask, case.outputs["mask"].bool())


@named("reparam", "TopKBinarizer")
def test_movement(case):
    score = case.inputs["score"]
    assert torch.equal(
        sf.masks.topk_mask(score, int(case.args["kept"] * score.numel())),
        case.outputs["mask"].bool(),
    )


@named("reparam", "GetSubnet")
def test_edge_popup(case):
    given, size = case.inputs, case.inputs["score"].numel()
    dropped = int((1 - case.args["kept"]) * size)
    mask = sf.masks.topk_mask(given["score"].abs(), size - dropped)
    assert torch.equal(mask, case.outputs["mask"].bool())

    def popped(score):
        return sf.masks.gate(given["weight"], score.abs(), mask, mode="supermask")

    slope = torch.func.vjp(popped, given["score"])[1](given["upstream"])[0]
    torch.testing.assert_close(slope, case.outputs["grad_score"], rtol=1e-5, atol=1e-6)


@named("transposable", "transposable")
def test_transposable(case):
    n, m, size = case.args["n"], case.args["m"], case.inputs["weight"].abs()
    mask = sf.masks.topk_mask(size, None, pattern=sf.patterns.transposable(n, m))
    assert size[mask].double().sum().item() == pytest.approx(
        case.value["exact"], rel=1e-6
    )
    assert torch.equal(mask, case.outputs["exact"].bool())
    tiles = mask.reshape(len(mask) // m, m, -1, m)
    assert (tiles.sum(1) == n).all() and (tiles.sum(3) == n).all()
    if "apex_greedy" in case.value:
        assert (
            case.value["apex_greedy"] - 1e-5
            <= case.value["exact"]
            <= case.value["one_sided"]
        )
    assert torch.equal(
        sf.masks.topk_mask(size.T, None, pattern=sf.patterns.transposable(n, m)), mask.T
    )
