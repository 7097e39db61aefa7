"""Sizes, groups, repeats and norms of operations whose tensors lose entries."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.arguments import RULES, padded_grouped_mm
from tests.shrinking.compare import differs
from tests.shrinking.cuts import both, size
from tests.shrinking.test_indices import check


@pytest.mark.deep(but=["<lambda>1", "<lambda>2", "<lambda>3"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y.view(-1, 4, 8).sum(1),
        lambda y: y.view(y.shape[0], 2, 16),
        lambda y: y.reshape(y.shape[0] * 4, 8).sigmoid().view(-1, 32),
        lambda y: y.unflatten(2, (2, 4)).transpose(1, 2),
        lambda y: y.unflatten(-1, (4, -1)).sum(1),
        lambda y: y.unsqueeze(1).expand(-1, 3, -1, -1),
        lambda y: y[:, :1].expand(y.shape[0], 4, 8),
        lambda y: y + y.new_zeros(y.shape[0], 4, 8),
        lambda y: y * torch.full((4, 8), 2.0, dtype=y.dtype),
        lambda y: torch.cat([y, torch.ones(y.shape[0], 4, 2, dtype=y.dtype)], 2),
        lambda y: y.split([1, 3], 1)[1],
        lambda y: y.split(3, 2),
        lambda y: y.chunk(2, 2),
        lambda y: y.tensor_split(3, 2),
        lambda y: (y.unbind(1)[2], y[:, 0]),
        lambda y: y.repeat(1, 2, 3),
        lambda y: y.tile(2),
        lambda y: y.repeat_interleave(3, 2),
        lambda y: y.transpose(1, 2).unsqueeze(1).squeeze(1),
        lambda y: y[:, :, :1].squeeze(),
        lambda y: y.mean(1) + y.amax(1),
        lambda y: torch.einsum("bij,bkj->bik", y.relu(), y),
        lambda y: F.channel_shuffle(y.reshape(-1, 32, 1, 1), 4),
        lambda y: F.layer_norm(y, (4, 8)),
        lambda y: F.group_norm(y.reshape(-1, 32), 4),
        lambda y: F.rms_norm(y, (8,), eps=1e-5),
        lambda y: F.softmax(y.mean((1, 2), keepdim=True), 0) + y,
        lambda y: F.scaled_dot_product_attention(y, y, y),
    ],
)
def test_arguments(fn):
    check(fn, rows=4)


def test_a_dimension_that_is_left_with_one_index_is_not_squeezed():
    check(lambda y: y.unsqueeze(-1).squeeze(), share=1.0)
    check(lambda y: y.squeeze(1), share=1.0)


def test_groups_that_are_a_symbolic_size():
    class Mixture(nn.Module):
        """Each row has a convolution of its own."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (
                nn.Conv2d(3, 6, 1),
                nn.Linear(3, 4 * 6 * 9),
                nn.Conv2d(4, 2, 1),
            )

        def forward(self, x):
            b, h, w = x.shape[0], x.shape[2], x.shape[3]
            kernels = self.b(x.mean((2, 3))).view(b * 4, 6, 3, 3)
            y = F.conv2d(self.a(x).view(1, b * 6, h, w), kernels, padding=1, groups=b)
            return self.c(y.view(b, 4, h, w))

    model, x = Mixture().eval().double(), torch.randn(2, 3, 5, 5).double()
    whole, small = both(model, x)
    assert size(small) < size(model)
    for example in (x, torch.randn(3, 3, 5, 5).double()):
        assert not differs(whole, small, example)


def test_norms_of_maps_count_at_other_sizes():
    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = (
                nn.Conv2d(3, 8, 1),
                nn.GroupNorm(2, 8),
                nn.Conv2d(8, 2, 1),
            )

        def forward(self, x):
            y = self.a(x)
            return self.b(self.norm(y)) + y.mean((1, 2, 3), keepdim=True)

    model, x = Maps().eval().double(), torch.randn(2, 3, 5, 5).double()
    whole, small = both(model, x)
    assert "counted_group_norm" in small.code and "counted_mean" in small.code
    for example in (x, torch.randn(3, 3, 5, 5).double()):
        assert not differs(whole, small, example)


def test_experts_of_any_width():
    x, w, ends = (
        torch.randn(5, 3),
        torch.randn(2, 3, 7),
        torch.tensor([2, 5], dtype=torch.int32),
    )
    torch.testing.assert_close(
        padded_grouped_mm(x, w, ends), torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    )


def test_rules_are_about_operations_of_torch():
    assert all(hasattr(torch.ops.aten, name) for name in RULES)
