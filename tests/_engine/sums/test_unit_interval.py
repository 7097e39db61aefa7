"""Sums of numbers in [0, 1], and norms."""

import torch

from sparsefn._engine.sums import smooth_norm, smooth_total_of_shares, total_of_shares


def test_the_order_of_numbers_does_not_change_their_sum():
    x = torch.rand(10_007)
    total = total_of_shares(x)
    for order in (torch.arange(10_007).flip(0), torch.randperm(10_007)):
        assert torch.equal(total_of_shares(x[order]), total)
        assert torch.equal(smooth_norm(x[order]), smooth_norm(x))
    torch.testing.assert_close(total, x.double().sum())
    assert total_of_shares(x[:0]) == 0


def test_a_smooth_sum_has_the_value_of_the_sum_and_its_slopes():
    x = torch.rand(6, dtype=torch.float64)
    assert torch.equal(smooth_total_of_shares(x), total_of_shares(x))
    assert torch.autograd.gradcheck(
        smooth_total_of_shares, (x.clone().requires_grad_(),)
    )


def test_a_norm_has_the_value_and_the_slopes_of_the_norm_at_any_scale():
    for scale in (1e-200, 1.0, 1e200):
        x = scale * torch.randn(5, 3, dtype=torch.float64)
        torch.testing.assert_close(
            smooth_norm(x), torch.linalg.vector_norm(x / scale) * scale
        )
        slope = torch.func.grad(smooth_norm)(x)
        torch.testing.assert_close(slope, x / smooth_norm(x))


def test_the_norm_of_zeros_is_flat():
    for x in (torch.zeros(3), torch.zeros(0)):
        assert smooth_norm(x) == 0
        assert not torch.func.grad(smooth_norm)(x).any()
