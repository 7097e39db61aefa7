import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.combine.same_step import check_paired

PAIRED = {
    "saliency": sf.one_shot(0.5, sf.scores.saliency),
    "movement": sf.gmp(
        0.5, score=sf.scores.absolute(sf.scores.mean(sf.scores.movement))
    ),
    "inside": sf.partition(
        [("*", sf.chain(sf.static(0.5), sf.one_shot(0.5, score=sf.scores.saliency)))]
    ),
    "to drop": sf.drop_grow(
        0.5, drop=sf.scores.saliency, grow=sf.scores.gradient, steps=10
    ),
    "a method": sf.methods.snip(0.5),
    "a method of sums": sf.methods.snip(0.5, batches=2),
    "force": sf.methods.force(0.5),
    "taylor": sf.methods.taylor(3, when=sf.at([1])),
}
ALONE = {
    "rigl": sf.rigl(0.5),
    "gmp": sf.gmp(0.5),
    "movement pruning": sf.methods.movement(0.5, steps=9),
    "own": sf.Algorithm(lambda params: sf.dense().init(params), sf.dense().update),
}
TEXT = (
    "multiplies weights by gradients of the same step, and the optimizer's step would "
    "move the weights"
)


@pytest.mark.parametrize("name", PAIRED)
def test_they_need_a_skip(name):
    with pytest.raises(ValueError, match=f"here: (saliency|movement) {TEXT}"):
        check_paired("here", PAIRED[name], None)
    check_paired("here", PAIRED[name], sf.at([0]))
    check_paired("here", PAIRED[name], sf.never())


@pytest.mark.parametrize("name", ALONE)
def test_others_need_none(name):
    check_paired("here", ALONE[name], None)


def test_with_optimizer_and_attach_ask_for_it():
    for call in (
        lambda: sf.with_optimizer(PAIRED["saliency"], sf.optimizers.sgd(0.1)),
        lambda: sf.attach(
            PAIRED["saliency"],
            layer := torch.nn.Linear(2, 2),
            torch.optim.SGD(layer.parameters(), lr=0.1),
        ),
    ):
        with pytest.raises(ValueError, match=TEXT):
            call()
