"""Held against recorded outputs of dmx.compressor.sparse."""

import pytest
import torch
from golden_data import cases

import sparsefn as sf


def named(fn):
    return pytest.mark.parametrize("case", cases("dmx", fn), ids=lambda case: case.id)


@named("TopK")
def test_topk(case):
    # With the integer count of the original, which truncates what it drops.
    score = case.inputs["score"]
    for i, kept in enumerate(case.value):
        assert torch.equal(sf.masks.topk_mask(score, kept), case.outputs[f"d{i}"] != 0)


@named("TopK kept")
def test_kept_counts(case):
    # Ours rounds half to even, theirs drops int(n * (1.0 - density)): at most one
    # apart, and never below the exact share by more than a half. 10 at density 0.9 keep
    # 9 here and all 10 there (int(0.9999999999999998)).
    apart = set()
    for density, counts in case.value.items():
        sparsity = sf.config.from_shorthand(f"TOPK{{{density}}}(U)").sparsity
        for n, theirs in zip(case.args["n"], counts, strict=True):
            ours = sf.budgets.n_kept(n, sparsity)
            assert abs(ours - n * float(density)) <= 0.5 + 1e-9
            assert theirs - ours in (0, 1)
            if theirs != ours:
                apart.add((n, density, ours, theirs))
    assert {(10, "0.9", 9, 10), (10, "0.25", 2, 3), (1000, "0.9", 900, 901)} <= apart
    # Where the share is whole and 1.0 - density has no residue, the counts are the
    # same.
    whole = [
        row
        for row in apart
        if float(row[1]) in (0.0, 1.0)
        or (float(row[1]) % 0.25 == 0 and row[0] % 4 == 0)
    ]
    assert not whole


@named("BlockTopK")
def test_block_topk(case):
    kept, run, axis = (case.args[name] for name in ("K", "block_size", "block_dim"))
    pattern, mask = sf.patterns.nm(kept, run, axis=axis), case.outputs["mask"] != 0
    # The mask is its own best: every run has the count of the pattern.
    assert torch.equal(sf.masks.topk_mask(mask.float(), None, pattern=pattern), mask)
    assert (
        sf.config.from_shorthand(f"BTOPK{{{kept}:{run},{axis}}}(U)").pattern == pattern
    )
    if case.id.startswith("btopk_1_"):  # whose scores are recorded
        score = next(
            c.inputs["score"] for c in cases("dmx", "BlockTopK") if "score" in c.inputs
        )
        assert torch.equal(sf.masks.topk_mask(score, None, pattern=pattern), mask)


def read(case):
    """Shorthand, mode, whether the mask gates the gradient, and the inputs."""
    spec = sf.config.from_shorthand(case.args["sparseness"])
    # In eval mode the original detaches nothing, whatever its backward mode: that is
    # "joint".
    mode = case.args["backward_mode"].lower() if case.args["training"] else "joint"
    # It drops the M of a block pattern; what is right is below.
    gated = spec.mask_gradient and not case.args["sparseness"].startswith("BTOPK")
    return spec, mode, gated, [case.inputs[name] for name in ("x", "score", "gy")]


def count(spec, x):
    return (
        None
        if spec.pattern != sf.patterns.unstructured()
        else sf.budgets.n_kept(x.numel(), spec.sparsity)
    )


@named("Sparsify gradients")
def test_gradients(case):
    spec, mode, gated, (x, score, gy) = read(case)

    def forward(x, score):
        return sf.masks.sparsify(
            x,
            score,
            count(spec, x),
            pattern=spec.pattern,
            mode=mode,
            mask_gradient=gated,
        )

    y, pull = torch.func.vjp(forward, x, score)
    dx, ds = pull(gy)
    assert torch.equal(y, case.outputs["y"])
    zero = torch.zeros_like(x)
    assert torch.equal(dx, case.outputs.get("dx", zero))
    assert torch.equal(ds, case.outputs.get("ds", zero))
    assert ("dx" in case.outputs, "ds" in case.outputs) == (
        case.value["dx"],
        case.value["ds"],
    )


@named("Sparsify gradients")
def test_the_same_gradients_from_the_algorithm(case):
    spec, mode, gated, (x, score, gy) = read(case)
    algorithm = sf.supermask(
        spec.sparsity,
        pattern=spec.pattern,
        mode=mode,
        mask_gradient=gated,
        init={"w": score},
    )
    state = algorithm.init({"w": x})
    assert torch.equal(state.masks["w"], case.outputs["mask"] != 0)
    assert torch.equal(sf.effective(state)["w"], case.outputs["y"])
    grads = algorithm.view.grads(state, {"w": gy}, 0)
    assert dict(grads["scores"]).keys() == ({"w"} if case.value["ds"] else set())
    assert dict(grads["params"]).keys() == ({"w"} if case.value["dx"] else set())
    for name, part in (("ds", "scores"), ("dx", "params")):
        if case.value[name]:
            assert torch.equal(grads[part]["w"], case.outputs[name])


def test_the_mask_gates_the_gradient_of_block_patterns_too():
    # The original reads BTOPK{2:4,-1}(M), prints it, and then gives ds = dy * x
    # everywhere.
    (case,) = (
        case
        for case in cases("dmx", "Sparsify gradients")
        if "BTOPK{2:4,-1}(M)" in case.id
    )
    spec, mode, _, (x, score, gy) = read(case)
    ds = torch.func.vjp(
        lambda s: sf.masks.sparsify(
            x,
            s,
            None,
            pattern=spec.pattern,
            mode=mode,
            mask_gradient=spec.mask_gradient,
        ),
        score,
    )[1](gy)[0]
    assert torch.equal(ds, gy * x * case.outputs["mask"])
    assert not torch.equal(ds, case.outputs["ds"])


# Read by the original, each with something lost: another axis, or a letter.
QUIRKS = {
    "TOPK{0.5}(m)": ValueError,
    "TOPK{0.5}(X)": ValueError,
    "BTOPK{4:8, -1}(U)": ValueError,
    "BERN(M)": "BERN(M)",
}


@named("from_shorthand")
def test_shorthands(case):
    for text in case.args["strings"]:
        theirs = case.value[text]
        ours = QUIRKS.get(text, theirs["value"] if theirs["ok"] else ValueError)
        if ours is ValueError:  # the original raises TypeError or AssertionError, too
            with pytest.raises(ValueError, match="expected a shorthand"):
                sf.config.from_shorthand(text)
        else:
            assert sf.config.to_shorthand(sf.config.from_shorthand(text)) == ours
    assert set(QUIRKS) <= {
        text for text in case.args["strings"] if case.value[text]["ok"]
    }


@named("mask2braille")
def test_braille(case):
    picture = sf.report.braille(
        case.inputs["mask"], tuple(case.args["dims"]), case.args["max_elems"]
    )
    assert picture == case.value
    assert (
        sf.report.braille(
            case.inputs["mask"] != 0, tuple(case.args["dims"]), case.args["max_elems"]
        )
        == case.value
    )


def test_new_scores_are_kept():
    # The original forgets them after one forward: the second mask is that of the random
    # score again.
    x = cases("dmx", "Sparsify gradients")[0].inputs["x"]
    algorithm = sf.supermask(0.5, mode="ste")
    state = sf.rescore(algorithm.init({"w": x}), lambda score, weight: weight.abs())
    for step in range(2):
        state = algorithm.update(state, {"w": x}, step)
        assert torch.equal(state.masks["w"], sf.masks.topk_mask(x.abs(), 16))
