"""8-bit floats only store numbers: wherever params and scores enter, the text names the
leaf and what is taken.
"""

import re

import pytest
import torch

import sparsefn as sf

X = torch.ones(4, 8)
TAKEN = "; float16, bfloat16, float32 and float64 are taken"
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
PARAMS = {
    "gmp": lambda x: sf.gmp(0.5).init({"z": x}),
    "dense": lambda x: sf.dense().init({"z": x}),
    "set": lambda x: sf.set(0.5).init({"z": x}),
    "supermask": lambda x: sf.supermask(0.5).init({"z": x}),
    "from_masks": lambda x: sf.from_masks({"z": X > 0}).init({"z": x}),
    "with_optimizer": lambda x: sf.with_optimizer(
        sf.rigl(0.5), sf.optimizers.sgd(0.1)
    ).init({"z": x}),
    "partition": lambda x: sf.partition([("z", sf.gmp(0.5))]).init({"z": x}),
    "plan": lambda x: sf.report.plan(sf.gmp(0.5), {"z": x}),
}
SCORES = {
    "topk": lambda x: sf.masks.topk_mask(x, 5),
    "channel": lambda x: sf.masks.topk_mask(x, 2, pattern=sf.patterns.channel(0)),
    "nm": lambda x: sf.masks.topk_mask(x, None, pattern=sf.patterns.nm(2, 4)),
    "drop": lambda x: sf.masks.drop_lowest(x, X > 0, 5),
    "grow": lambda x: sf.masks.grow_highest(x, X < 0, 5),
    "threshold": lambda x: sf.masks.threshold_mask(x, 0.5),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", PARAMS)
def test_params_are_refused_by_path(name, dtype):
    with pytest.raises(
        TypeError,
        match=re.escape(f"expected floating-point params, got {dtype} at 'z'{TAKEN}"),
    ):
        PARAMS[name](X.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_refused(name, dtype):
    with pytest.raises(
        TypeError,
        match=re.escape(f"expected floating-point scores, got {dtype}{TAKEN}"),
    ):
        SCORES[name](X.to(dtype))


def test_scores_of_a_tree_are_refused_by_path():
    narrow = X.to(torch.float8_e5m2)
    with pytest.raises(
        TypeError, match="floating-point scores, got torch.float8_e5m2 at 'b'; float16"
    ):
        sf.masks.topk_masks({"a": X, "b": narrow}, 5)
    algorithm = sf.one_shot(
        0.5, lambda state, grads, step: {"z": narrow}, when=sf.always()
    )
    with pytest.raises(
        TypeError, match="floating-point scores, got torch.float8_e5m2 at 'z'; float16"
    ):
        algorithm.update(algorithm.init({"z": X}), {"z": X}, 0)
    with pytest.raises(
        TypeError, match="expected floating-point params, got torch.int64 at 'z'$"
    ):
        sf.gmp(0.5).init({"z": X.long()})
