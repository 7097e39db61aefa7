"""The best weights under a mask: `refit`."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf

refit = sf.solve.refit


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.0, 1.0))
def test_it_is_least_squares_row_by_row(seed, columns, share):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * columns + 2, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, columns, generator=generator) < share
    new = refit(weight, x.T @ x, mask)
    for row in range(5):
        some = mask[row]
        assert not new[row, ~some].any() and not torch.signbit(new[row, ~some]).any()
        if some.any():
            best = torch.linalg.lstsq(x[:, some], (x @ weight[row])[:, None]).solution[
                :, 0
            ]
            torch.testing.assert_close(new[row, some], best, rtol=1e-7, atol=1e-9)


def test_a_row_that_keeps_everything_stays_to_the_bit_and_an_empty_one_is_zero():
    weight = torch.randn(2, 5)
    mask = torch.tensor([[True] * 5, [False] * 5])
    new = refit(weight, torch.eye(5) + 0.3, mask)
    assert torch.equal(new[0], weight[0]) and not new[1].any()


def test_damping_pulls_towards_the_old_weights():
    weight, hessian = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    mask = torch.tensor([[False, True]])
    assert refit(weight, hessian, mask).tolist() == [[0.0, 2.5]]
    torch.testing.assert_close(
        refit(weight, hessian, mask, damp=0.5), torch.tensor([[0.0, 2 + 1 / 3]])
    )


def test_the_dtype_is_that_of_the_weight():
    weight = torch.randn(3, 4, dtype=torch.bfloat16)
    assert refit(weight, torch.eye(4), weight > 0).dtype == torch.bfloat16


def test_a_singular_hessian_is_refused_only_where_it_is_needed():
    weight, hessian = torch.randn(2, 3), torch.ones(3, 3)
    single = torch.tensor([[True, False, False], [False, True, False]])
    torch.testing.assert_close(refit(weight, hessian, single)[0, 0], weight[0].sum())
    single[1, 0] = True
    text = (
        "refit, row 1: expected a positive definite hessian, got one with eigenvalues "
        "from 0 to 2, as of inputs that"
    )
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        refit(weight, hessian, single)
    assert str(error.value).endswith("damp=0 is too small, damp=0.01 is enough")
    assert refit(weight, hessian, single, damp=0.01).isfinite().all()


def test_bad_arguments():
    with pytest.raises(
        ValueError,
        match=re.escape(
            "refit: expected a bool mask of shape (2, 3), got torch.float32 of"
        ),
    ):
        refit(torch.ones(2, 3), torch.eye(3), torch.ones(2, 3))
    with pytest.raises(
        ValueError, match="refit: expected a bool mask of shape .* got list"
    ):
        refit(torch.ones(2, 3), torch.eye(3), [True])


# ---- what the outputs lack -----------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.0, 1.0))
def test_what_is_missing_is_fitted_row_by_row(seed, columns, share):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * columns + 2, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, columns, generator=generator, dtype=torch.float64)
    more = torch.randn(len(x), 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, columns, generator=generator) < share
    mask[0] = True
    new = refit(weight, x.T @ x, mask, missing=more.T @ x)
    for row in range(5):
        some = mask[row]
        assert not new[row, ~some].any()
        if some.any():
            target = (x @ weight[row] + more[:, row])[:, None]
            best = torch.linalg.lstsq(x[:, some], target).solution[:, 0]
            torch.testing.assert_close(new[row, some], best, rtol=1e-7, atol=1e-9)


def residual_stream(kind):
    """The outputs of a layer, and what three linear blocks after it add to them."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    y = x @ weight.T
    stream = y
    for _ in range(3):
        block = torch.randn(6, 6, generator=generator, dtype=torch.float64) / 3
        stream = stream + kind(stream @ block.T)
    return x, weight, y, stream - y


def test_a_layer_takes_over_linear_blocks_exactly():
    x, weight, y, added = residual_stream(lambda y: y)
    every = torch.ones_like(weight, dtype=torch.bool)
    new = refit(weight, x.T @ x, every, missing=added.T @ x)
    torch.testing.assert_close(x @ new.T, y + added)
    eye = torch.eye(6, dtype=torch.float64)
    replaced = refit(eye, y.T @ y, eye == eye, missing=added.T @ y)
    torch.testing.assert_close(replaced @ weight, new)


def test_it_is_the_map_of_replace_me_and_the_own_weight_is_no_worse():
    x, weight, y, added = residual_stream(torch.tanh)
    eye = torch.eye(6, dtype=torch.float64)
    replaced = refit(eye, y.T @ y, eye == eye, missing=added.T @ y)
    # the normal equations of min |y map' - (y + added)|
    torch.testing.assert_close(replaced @ (y.T @ y), (y + added).T @ y)
    every = torch.ones_like(weight, dtype=torch.bool)
    new = refit(weight, x.T @ x, every, missing=added.T @ x)
    errors = [
        float((x @ w.T - y - added).square().sum())
        for w in (new, replaced @ weight, weight)
    ]
    assert errors[0] < errors[1] < errors[2]


def test_damping_pulls_towards_taking_nothing_over():
    weight = torch.randn(2, 3)
    every = torch.ones_like(weight, dtype=torch.bool)
    missing = torch.ones(2, 3)
    much = refit(weight, torch.eye(3), every, damp=1e6, missing=missing)
    torch.testing.assert_close(much, weight, rtol=0, atol=2e-6)
    half = refit(weight, torch.eye(3), every, damp=1.0, missing=missing)
    torch.testing.assert_close(half, weight + 0.5)


def test_inputs_that_were_always_zero_take_nothing_over():
    hessian = torch.diag(torch.tensor([2.0, 0.0]))
    every = torch.ones(1, 2, dtype=torch.bool)
    new = refit(torch.ones(1, 2), hessian, every, missing=torch.tensor([[4.0, 9.0]]))
    assert new.tolist() == [[3.0, 0.0]]


def test_members_and_compiled_code_have_the_bits_of_one_call():
    weights = torch.randn(3, 4, 5)
    x = torch.randn(20, 5)
    masks = torch.rand(3, 4, 5) < 0.7
    missing = torch.randn(3, 4, 5)
    hessian = x.T @ x

    def fit(weight, mask, more):
        return refit(weight, hessian, mask, missing=more)

    alone = [fit(*one) for one in zip(weights, masks, missing, strict=True)]
    assert torch.equal(torch.vmap(fit)(weights, masks, missing), torch.stack(alone))
    compiled = torch.compile(fit, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weights[0], masks[0], missing[0]), alone[0])


@pytest.mark.parametrize(
    ("missing", "kind", "text"),
    [
        (
            torch.ones(3, 2),
            ValueError,
            "refit: expected missing of the weight's shape (2, 3), got (3, 2)",
        ),
        (
            torch.ones(2, 3, dtype=torch.int64),
            TypeError,
            "refit: expected missing to be a floating-point tensor, got torch.int64",
        ),
        (
            torch.full((2, 3), float("nan")),
            ValueError,
            "refit: expected a finite missing, got 6 of 6 entries NaN or infinite",
        ),
        (
            torch.ones(2, 3, device="meta"),
            ValueError,
            "expected weight and missing on one device, got cpu and meta",
        ),
    ],
)
def test_a_bad_sum_of_what_is_missing(missing, kind, text):
    weight = torch.ones(2, 3)
    with pytest.raises(kind, match=re.escape(text)):
        refit(weight, torch.eye(3), weight > 0, missing=missing)
