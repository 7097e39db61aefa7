"""Bands along the diagonal."""

import pytest
import torch

import sparsefn as sf

P = sf.patterns


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3), (1, 5), (7, 1)])
@pytest.mark.parametrize("nearliness", [-3, 0, 1, 3, 5])
def test_a_band_is_what_lies_near_the_diagonal(nearliness, shape):
    pattern = P.nearly_diagonal(nearliness)
    if nearliness > 0 and nearliness // 2 >= min(shape):
        return  # refused, as tested above
    want = torch.tensor(
        [
            [nearliness > 0 and abs(r - c) <= nearliness // 2 for c in range(shape[1])]
            for r in range(shape[0])
        ]
    )
    scores = torch.full(shape, float("nan"))
    n = int(want.sum())
    for mask in (
        sf.masks.topk_mask(scores, None, pattern=pattern),
        sf.masks.topk_mask(-scores, n, pattern=pattern),
    ):
        assert torch.equal(mask, want)
    with pytest.raises(
        ValueError,
        match=rf"nearly_diagonal\({nearliness}\) fixes n_keep at {n}, got {n + 1}",
    ):
        sf.masks.topk_mask(scores, n + 1, pattern=pattern)
    assert sf.masks.grow_highest(
        scores, torch.zeros_like(want), n, pattern=pattern
    ).equal(want)
    with pytest.raises(ValueError, match=rf"expected 0 <= n_grow <= {n}, got {n + 1}"):
        sf.masks.grow_highest(scores, torch.zeros_like(want), n + 1, pattern=pattern)
    assert sf.masks.drop_lowest(
        scores, torch.ones_like(want), want.numel() - n, pattern=pattern
    ).equal(want)


def test_a_band_loses_its_worst_and_grows_it_back():
    scores = torch.arange(16.0).reshape(4, 4)
    band = sf.masks.topk_mask(scores, None, pattern=P.nearly_diagonal(1))
    less = sf.masks.drop_lowest(scores, band, 2, pattern=P.nearly_diagonal(1))
    assert less.diagonal().tolist() == [False, False, True, True]
    assert less.sum() == 2
    more = sf.masks.grow_highest(scores, less, 1, pattern=P.nearly_diagonal(1))
    assert more.diagonal().tolist() == [False, True, True, True]
