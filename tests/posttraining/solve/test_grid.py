"""Grids of quantised weights, and pruning that rounds to them."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf

solve, nm = sf.solve, sf.patterns.nm


def layer(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    x[:, 1:] += 0.7 * x[:, :-1]
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), x.T @ x


def error(new, weight, hessian):
    change = (new - weight).double()
    return float((change @ hessian.double() * change).sum())


def authors_loop(weight, hessian, mask, grid):
    """SparseGPT of a given mask with rounding, as its algorithm 1 says it."""
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    w = weight.clone()
    new = torch.zeros_like(w)
    for i in range(w.shape[1]):
        rounded = grid.round(w)[:, i]
        new[:, i] = torch.where(mask[:, i], rounded, 0.0)
        e = (w[:, i] - new[:, i]) / upper[i, i]
        w[:, i:] -= e[:, None] * upper[i, i:]
    return new


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from([4, 12, 40]),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_rounding_is_the_authors_loop(seed, rows, columns, bits, symmetric, group):
    weight, hessian = layer(rows, columns, seed)
    grid = solve.grid(weight, bits, group=group, symmetric=symmetric)
    mask = sf.masks.topk_mask(weight.abs(), rows * columns // 2)
    new, kept = solve.obs(weight, hessian, mask=mask, damp=0.0, round_to=grid)
    assert torch.equal(kept, mask)
    assert torch.equal(torch.where(mask, grid.round(new), 0.0), new)
    expected = authors_loop(weight, hessian, mask, grid)
    # a tie of rounding may fall otherwise, and later columns follow it
    same = (new - expected).abs() <= 1e-9
    assert same.double().mean() > 0.9


def test_rounding_and_pruning_together_lose_less_than_one_after_the_other():
    weight, hessian = layer(32, 64)
    for bits in (3, 4, 8):
        grid = solve.grid(weight, bits)
        both, _ = solve.obs(weight, hessian, pattern=nm(2, 4), round_to=grid)
        pruned, mask = solve.obs(weight, hessian, pattern=nm(2, 4))
        after = torch.where(mask, grid.round(pruned), 0.0)
        assert error(both, weight, hessian) < error(after, weight, hessian)
        dense, mask = solve.obs(weight, hessian, keep=1.0, round_to=grid)
        assert mask.all()
        nearest = error(grid.round(weight), weight, hessian)
        assert error(dense, weight, hessian) < 0.7 * nearest


def test_a_grid_that_has_all_weights_changes_no_dense_weight():
    weight = torch.randint(-7, 8, (3, 8)).double()
    weight[:, 0] = 7.0
    _, hessian = layer(1, 8)
    new, _ = solve.obs(weight, hessian, keep=1.0, round_to=solve.grid(weight, 4))
    torch.testing.assert_close(new, weight)


@given(st.integers(2, 8), st.booleans(), st.integers(0, 10**6))
def test_a_grid_has_zero_and_spans_the_weights(bits, symmetric, seed):
    weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
    weight[1] = 0.0
    weight[2] = weight[2].abs()
    grid = solve.grid(weight, bits, group=3, symmetric=symmetric)
    assert grid.scale.shape == grid.zero.shape == (3, 2) and (grid.scale > 0).all()
    assert (grid.round(torch.zeros(3, 6)) == 0).all()
    assert torch.equal(grid.round(weight)[1], weight[1])
    each = grid.scale.repeat_interleave(3, 1)
    assert ((grid.round(weight) - weight).abs() <= 1.01 * each).all()
    assert torch.equal(grid.round(grid.round(weight)), grid.round(weight))


def test_half_precision_and_vmap():
    weight, hessian = layer(4, 8)
    grid = solve.grid(weight, 4)
    half, _ = solve.obs(
        weight.bfloat16(), hessian.float(), pattern=nm(2, 4), round_to=grid
    )
    assert half.dtype == torch.bfloat16 and half.isfinite().all()
    weights = torch.stack([weight, 0.5 * weight])
    batched, masks = torch.vmap(
        lambda w: solve.obs(w, hessian, pattern=nm(2, 4), round_to=grid)
    )(weights)
    for w, new, mask in zip(weights, batched, masks, strict=True):
        alone, kept = solve.obs(w, hessian, pattern=nm(2, 4), round_to=grid)
        assert torch.equal(mask, kept)
        torch.testing.assert_close(new, alone)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda w: solve.grid(w, 1), ValueError, "grid: expected bits >= 2, got 1"),
        (
            lambda w: solve.grid(w, 4, group=3),
            ValueError,
            "grid: expected a group that divides 8 columns, got 3",
        ),
        (
            lambda w: solve.grid(w[0], 4),
            ValueError,
            "grid: expected a weight of shape (out, in), got (8,)",
        ),
        (
            lambda w: solve.grid(w.int(), 4),
            TypeError,
            "grid: expected weight to be a floating-point tensor, got torch.int32",
        ),
        (
            lambda w: solve.grid(w[:, :0], 4),
            ValueError,
            "grid: expected a weight of shape (out, in), got (2, 0)",
        ),
        (
            lambda w: solve.grid(torch.where(torch.eye(2, 8) == 1, torch.nan, w), 4),
            ValueError,
            "grid: expected a finite weight, got NaN or infinite entries in row 0",
        ),
        (
            lambda w: solve.grid(w, 4).round(torch.ones(3, 8)),
            ValueError,
            "Grid.round: expected a weight of shape (2, in), got (3, 8): make a grid "
            "of this weight with sf.solve.grid",
        ),
        (
            lambda w: solve.grid(w, 4).round(w[:1]),
            ValueError,
            "Grid.round: expected a weight of shape (2, in), got (1, 8): make",
        ),
        (
            lambda w: solve.grid(w, 4, group=2).round(w[:, :6]),
            ValueError,
            "Grid.round: expected a weight of shape (2, in), where 4 groups divide the "
            "columns, got (2, 6): make",
        ),
        (
            lambda w: solve.grid(w, 4).round(w.int()),
            TypeError,
            "Grid.round: expected weight to be a floating-point tensor, got torch.int3",
        ),
        (
            lambda w: solve.obs(w, torch.eye(8), keep=4, round_to=4),
            TypeError,
            "obs: expected round_to to be a grid such as sf.solve.grid(weight, 4)",
        ),
        (
            lambda w: solve.obs(
                w, torch.eye(8), keep=4, round_to=solve.grid(torch.ones(3, 8), 4)
            ),
            ValueError,
            "obs: expected round_to of (rows, groups) that fit a weight of (2, 8), got "
            "(3, 1)",
        ),
        (
            lambda w: solve.obs(
                w,
                torch.eye(8),
                keep=4,
                round_to=solve.Grid(torch.ones(2), torch.zeros(2), -8, 7),
            ),
            ValueError,
            "obs: expected round_to with scale and zero of shape (rows, groups), got "
            "(2,) and (2,): make it of this weight, as sf.solve.grid(weight, 4) does",
        ),
        *[
            (
                lambda w, scale=scale, zero=zero: solve.obs(
                    w,
                    torch.eye(8),
                    keep=4,
                    round_to=solve.Grid(
                        torch.tensor([[1.0], [scale]], dtype=torch.float64),
                        torch.tensor([[0.0], [zero]]),
                        -8,
                        7,
                    ),
                ),
                ValueError,
                "obs: expected round_to with scales that are finite and above 0 in "
                "torch.float32, and zeros that are integers from -8 to 7, got others "
                "in row 1: groups of zeros have the scale 1, as sf.solve.grid",
            )
            for scale, zero in (
                (0.0, 0.0),
                (-1.0, 0.0),
                (torch.nan, 0.0),
                (torch.inf, 0.0),
                (1e-50, 0.0),
                (1e300, 0.0),
                (1.0, 0.5),
                (1.0, torch.nan),
                (1.0, 8.0),
                (1.0, -9.0),
            )
        ],
        *[
            (
                lambda w, low=low, high=high: solve.obs(
                    w,
                    torch.eye(8),
                    keep=4,
                    round_to=solve.Grid(torch.ones(2, 1), torch.zeros(2, 1), low, high),
                ),
                ValueError,
                f"obs: expected round_to with ints low <= high, got {low!r} and "
                f"{high!r}: sf.solve.grid(weight, 4) makes them",
            )
            for low, high in ((-8.0, 7), (-8, 7.5), (3, 2))
        ],
        (
            lambda w: solve.obs(
                w,
                torch.eye(8),
                keep=4,
                round_to=solve.grid(w, 4)._replace(
                    zero=torch.zeros(2, 1, device="meta")
                ),
            ),
            ValueError,
            "expected weight and round_to on one device, got cpu and meta",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make(torch.ones(2, 8))


def test_grids_under_vmap_have_the_bits_of_a_loop():
    weight, hessian = torch.randn(2, 8), torch.eye(8)
    grid = solve.grid(weight, 4)
    scales = torch.stack([grid.scale, grid.scale * 0.7])

    def solved(scale):
        return solve.obs(weight, hessian, keep=0.5, round_to=grid._replace(scale=scale))

    news, masks = torch.vmap(solved)(scales)
    for scale, new, mask in zip(scales, news, masks, strict=True):
        assert all(map(torch.equal, solved(scale), (new, mask)))


def test_a_grid_that_wants_a_gradient_gets_none():
    weight, hessian = torch.randn(2, 8), torch.eye(8)
    grid = solve.grid(weight, 4)
    want = solve.obs(weight, hessian, keep=0.5, round_to=grid)
    learned = grid._replace(scale=grid.scale.clone().requires_grad_())
    got = solve.obs(weight, hessian, keep=0.5, round_to=learned)
    assert not got[0].requires_grad and all(map(torch.equal, got, want))
