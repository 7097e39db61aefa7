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
