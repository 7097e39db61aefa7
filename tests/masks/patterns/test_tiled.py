"""`transposable`: n of m along rows and columns, in every algorithm that makes whole
masks.
"""

import re

import pytest
import torch

import sparsefn as sf

TILES = sf.patterns.transposable(2, 4)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def holds(mask, n=2, m=4):
    tiles = mask.reshape(mask.shape[0] // m, m, mask.shape[1] // m, m, -1)
    return bool((tiles.sum(1) == n).all() and (tiles.sum(3) == n).all())


@pytest.mark.parametrize("shape", [(8, 12), (4, 8, 3, 3), (0, 4)])
def test_masks_of_linear_layers_and_convolutions(shape):
    mask = sf.masks.topk_mask(draw(*shape).abs(), None, pattern=TILES)
    assert mask.shape == shape and (not mask.numel() or holds(mask))
    if len(shape) == 4:
        for i in range(3):
            alone = sf.masks.topk_mask(
                draw(*shape).abs()[:, :, i, 2], None, pattern=TILES
            )
            assert torch.equal(mask[:, :, i, 2], alone)


def test_axes():
    scores = draw(3, 4, 8)
    mask = sf.masks.topk_mask(
        scores, None, pattern=sf.patterns.transposable(2, 4, axes=(1, -1))
    )
    for one, whole in zip(scores, mask, strict=True):
        assert torch.equal(sf.masks.topk_mask(one, None, pattern=TILES), whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sf.one_shot(None, pattern=TILES),
        lambda: sf.gmp(None, pattern=TILES, regrow=True),
        lambda: sf.ste(None, pattern=TILES),
        lambda: sf.supermask(None, pattern=TILES),
        lambda: sf.static(None, pattern=TILES),
        lambda: sf.chain(sf.dense(), sf.ste(None, pattern=TILES)),
        lambda: sf.reparametrised(sf.reparam.faded(TILES, 0.0, slope=1.0)),
    ],
)
def test_algorithms_that_make_whole_masks(make):
    algorithm = sf.with_optimizer(make(), sf.optimizers.sgd(0.1))
    state = algorithm.init({"w": draw(8, 8), "b": draw(8)})
    for step in range(3):
        grads = {path: torch.sin(5 * w) for path, w in sf.effective(state).items()}
        state = algorithm.update(state, grads, step)
    assert holds(state.masks["w"])
    assert holds(state.masks["w"].T)


def test_the_transposed_weight_is_nm_too():
    state = sf.one_shot(None, pattern=TILES).init({"w": draw(8, 8)})
    state = sf.one_shot(None, pattern=TILES).update(state, state.params, 0)
    weight = sf.effective(state)["w"]
    for axis in (0, 1):
        assert torch.equal(
            sf.masks.topk_mask(weight.abs(), None, pattern=sf.patterns.nm(2, 4, axis)),
            state.masks["w"],
        )
    packed = sf.checkpoint.compress(state, sf.patterns.nm(2, 4, 0))
    assert torch.equal(sf.checkpoint.decompress(packed)[0]["w"], weight)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: sf.patterns.transposable(3, 2),
            "transposable: expected n <= m, got n=3, m=2",
        ),
        (
            lambda: sf.patterns.transposable(1, 2, (0, 0)),
            "transposable: expected two different axes, got (0, 0)",
        ),
        (
            lambda: sf.masks.topk_mask(draw(4, 6), None, pattern=TILES),
            "transposable(2, 4): expected axis 1 divisible by 4, got shape (4, 6)",
        ),
        (
            lambda: sf.masks.topk_mask(draw(4), None, pattern=TILES),
            "transposable(2, 4): no axis 1 in shape (4,)",
        ),
        (
            lambda: sf.masks.topk_mask(
                draw(4, 4), None, pattern=sf.patterns.transposable(2, 4, (1, -1))
            ),
            "transposable(2, 4, axes=(1, -1)): expected two different axes in shape "
            "(4, 4)",
        ),
        (
            lambda: sf.rigl(None, pattern=TILES),
            "drop_grow: expected a pattern whose units are kept or pruned",
        ),
        (
            lambda: sf.masks.drop_lowest(
                draw(4, 4), torch.ones(4, 4, dtype=torch.bool), 1, pattern=TILES
            ),
            "drop_lowest: expected a pattern whose units are kept or pruned one by "
            "one, got transposable(2, 4)",
        ),
        (
            lambda: sf.masks.grow_highest(
                draw(4, 4), torch.zeros(4, 4, dtype=torch.bool), 1, pattern=TILES
            ),
            "grow_highest: expected a pattern whose units are kept or pruned one by "
            "one",
        ),
        (lambda: sf.one_shot(0.75, pattern=TILES).init({"w": draw(4, 4)}), "at 'w'"),
    ],
)
def test_bad_arguments(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()
