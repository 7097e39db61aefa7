"""Norms and means that go on counting entries that were 0."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.counted import (
    CountedGroupNorm,
    CountedLayerNorm,
    CountedRMSNorm,
    counted_group_norm,
    counted_layer_norm,
    counted_mean,
    counted_rms_norm,
)

KEPT = [0, 2, 3, 6]
NEAR = {"rtol": 1e-12, "atol": 1e-12}


def with_zeros(*shape, dim=-1):
    x = torch.randn(shape, dtype=torch.float64)
    gone = [i for i in range(shape[dim]) if i not in KEPT]
    return x.index_fill(dim, torch.tensor(gone), 0), torch.tensor(KEPT)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[2], [-1], [1, 2], [0, 1, 2]])
def test_means_count_what_is_left_out(dims, keepdim):
    x, kept = with_zeros(3, 4, 8)
    count = torch.ones(x.shape).sum(dims).flatten()[0].numel() * int(
        torch.tensor([x.shape[d] for d in dims]).prod()
    )
    made = counted_mean(x.index_select(2, kept), count, dims, keepdim)
    torch.testing.assert_close(made, x.mean(dims, keepdim), **NEAR)


@pytest.mark.parametrize("scaled", [False, True])
def test_layer_norms_add_the_mean_of_what_is_left_out(scaled):
    x, kept = with_zeros(3, 5, 8)
    w, b = (torch.randn(8, dtype=torch.float64) if scaled else None for _ in range(2))
    made = counted_layer_norm(
        x[..., kept], 8, 1, *(p[kept] if scaled else None for p in (w, b)), 1e-3
    )
    torch.testing.assert_close(
        made, F.layer_norm(x, (8,), w, b, 1e-3)[..., kept], **NEAR
    )


def test_layer_norms_over_several_dimensions():
    x, kept = with_zeros(3, 5, 8)
    w, b = torch.randn(2, 5, 8, dtype=torch.float64)
    made = counted_layer_norm(x[..., kept], 40, 2, w[:, kept], b[:, kept])
    torch.testing.assert_close(made, F.layer_norm(x, (5, 8), w, b)[..., kept], **NEAR)


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rms_norms(eps, dtype):
    x, kept = with_zeros(3, 5, 8)
    x, w = x.to(dtype) * 1e-4, torch.randn(8, dtype=dtype)
    made = counted_rms_norm(x[..., kept], 8, 1, w[kept], eps)
    torch.testing.assert_close(
        made, F.rms_norm(x, (8,), w, eps)[..., kept], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 3), (2, 8, 3, 2)])
def test_group_norms_count_in_each_group(shape):
    x = torch.randn(shape, dtype=torch.float64)
    kept = torch.tensor([0, 2, 5, 6])
    x[:, [1, 3, 4, 7]] = 0
    w, b = torch.randn(2, 8, dtype=torch.float64)
    count = x[0].numel() // 2
    made = counted_group_norm(x[:, kept], 2, count, w[kept], b[kept])
    torch.testing.assert_close(made, F.group_norm(x, 2, w, b)[:, kept], **NEAR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_normalised_in_float32(dtype):
    x = (torch.randn(4, 64) * 200).to(dtype)
    for made, wanted in [
        (counted_layer_norm(x, 64, 1), F.layer_norm(x, (64,))),
        (counted_rms_norm(x, 64, 1, eps=1e-5), F.rms_norm(x, (64,), eps=1e-5)),
        (counted_group_norm(x, 4, 16), F.group_norm(x, 4)),
    ]:
        assert made.dtype == dtype
        torch.testing.assert_close(made, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.LayerNorm(8), CountedLayerNorm),
        (nn.LayerNorm(8, elementwise_affine=False), CountedLayerNorm),
        (nn.RMSNorm(8), CountedRMSNorm),
        (nn.GroupNorm(2, 8), CountedGroupNorm),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_are_plain_norms_until_they_count(layer, kind):
    x = torch.randn(3, 8)
    counted = copy.deepcopy(layer)
    counted.__class__ = kind
    torch.testing.assert_close(counted(x), layer(x))
    counted.count = 9
    assert not torch.allclose(counted(x), layer(x))
    assert (
        "count=9" in repr(counted)
        and counted.state_dict().keys() == layer.state_dict().keys()
    )
    again = pickle.loads(pickle.dumps(counted))
    torch.testing.assert_close(again(x), counted(x))
    torch.testing.assert_close(
        torch.compile(counted, backend="eager", fullgraph=True)(x), counted(x)
    )
