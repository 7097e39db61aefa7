"""Solvers of one layer at the leaves of a model."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparsefn as sf


def half(weight, gram, mask):
    return sf.solve.obs(weight, gram, keep=weight.numel() // 2)


def rewritten(stats, path, weight, fn=half):
    return sf.solve.layerwise(stats, fn)(
        path, weight, torch.ones_like(weight, dtype=torch.bool), 0
    )


def test_a_linear_layer_is_solved_as_it_is_and_one_of_inputs_by_outputs_turned():
    weight, x = torch.randn(6, 8), torch.randn(40, 8)
    gram = x.T @ x
    expected, kept = sf.solve.obs(weight, gram, keep=24)
    stats = {
        "count": torch.tensor(40),
        "square": gram.diagonal().double(),
        "gram": gram,
    }
    new, mask = rewritten({"a.w": stats}, "a.w", weight)
    assert torch.equal(new, expected) and torch.equal(mask, kept)
    new, mask = rewritten(
        {"w": stats | {"square": stats["square"][:, None]}}, "w", weight.T
    )
    assert torch.equal(new, expected.T) and torch.equal(mask, kept.T)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_solved_as_the_matrix_of_its_patches(groups):
    layer, x = nn.Conv2d(4, 6, 3, groups=groups, bias=False), torch.randn(9, 4, 6, 6)
    weight, stats = layer.weight.detach(), sf.calibration.inputs(layer, None, x)
    new, mask = rewritten(stats, "weight", weight)
    assert (
        new.shape == mask.shape == weight.shape
        and int(mask.sum()) == weight.numel() // 2
    )
    assert not new[~mask].any()

    def error(other):
        change = functional.conv2d(x, other - weight, groups=groups)
        return float(change.square().sum())

    assert error(new) < error(torch.where(mask, weight, 0.0))
    for i, (part, kept) in enumerate(
        zip(new.chunk(groups), mask.chunk(groups), strict=True)
    ):
        own = functional.unfold(x.chunk(groups, 1)[i], 3).transpose(1, 2).flatten(0, 1)
        again, _ = sf.solve.obs(
            weight.chunk(groups)[i].flatten(1), own.T @ own, mask=kept.flatten(1)
        )
        torch.testing.assert_close(part.flatten(1), again, rtol=1e-3, atol=1e-4)


def test_the_solver_gets_the_mask():
    def refit(weight, gram, mask):
        return sf.solve.refit(weight, gram, mask), mask

    weight, x = torch.randn(3, 4), torch.randn(9, 4)
    layer = nn.Linear(4, 3, bias=False)
    stats = sf.calibration.inputs(layer, None, x)
    mask = torch.rand(3, 4) < 0.5
    new, kept = sf.solve.layerwise(stats, refit)("weight", weight, mask, 0)
    assert torch.equal(kept, mask)
    assert torch.equal(new, sf.solve.refit(weight, stats["weight"]["gram"], mask))


COUNT, SQUARE = torch.tensor(2), torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        (
            {"b": {"count": COUNT}},
            "layerwise: no data for the leaf 'a.w', but for 1 others",
        ),
        (
            {"a.w": {"count": COUNT, "square": SQUARE}},
            "layerwise: expected 'gram' in the statistics at 'a.w', got count, square",
        ),
        (
            {"a.w": {"count": 0 * COUNT, "square": SQUARE, "gram": torch.zeros(4, 4)}},
            "layerwise: no data for the leaf 'a.w': no input of the calibration data "
            "reached it",
        ),
        (
            {"a.w": {"count": COUNT, "square": torch.ones(3), "gram": torch.eye(3)}},
            "at 'a.w', expected the statistics of a weight of shape (2, 4), got "
            "statistics of 3 inputs",
        ),
        (
            {
                "a.w": {
                    "count": COUNT,
                    "square": SQUARE,
                    "gram": torch.full((4, 4), torch.nan),
                }
            },
            "at 'a.w', obs: expected a finite hessian, got 16 of 16 entries NaN or "
            "infinite",
        ),
        (
            {
                "a.w": {
                    "count": COUNT,
                    "square": SQUARE,
                    "gram": torch.ones(4, 4) - 3 * torch.eye(4),
                }
            },
            "at 'a.w', obs: expected a positive definite hessian",
        ),
    ],
)
def test_bad_statistics_name_the_leaf(stats, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        rewritten(stats, "a.w", torch.ones(2, 4))


def test_other_bad_arguments():
    with pytest.raises(
        TypeError,
        match=re.escape("layerwise: expected stats by path, of sf.calibration"),
    ):
        sf.solve.layerwise(3, half)
    with pytest.raises(TypeError, match=re.escape("expected fn")):
        sf.solve.layerwise({}, 3)
