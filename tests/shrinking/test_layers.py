"""Norms and means that go on counting entries that were 0.
Attention with fewer or narrower heads against torch's own with zeros in their
place."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.layers import (
    CountedGroupNorm,
    CountedLayerNorm,
    CountedRMSNorm,
    SmallAttention,
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


HEADS, WIDTH, EMBED = 4, 3, 12
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def pair(kept=(0, 2), **options):
    """An attention in which heads are 0 at their values' and out_proj's side, and one
    without them.
    """
    whole = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(torch.randn(p.shape))
    rows = torch.tensor([h * WIDTH + d for h in kept for d in range(WIDTH)])
    with torch.no_grad():
        whole.out_proj.weight[:, [i for i in range(EMBED) if i not in rows]] = 0
    small = copy.deepcopy(whole)
    small.__class__, small.scale, small.num_heads = (
        SmallAttention,
        WIDTH**-0.5,
        len(kept),
    )
    small._qkv_same_embed_dim = False
    three = torch.cat([rows, rows + EMBED, rows + 2 * EMBED])
    for name, p in list(small.named_parameters()):
        if name.startswith("in_proj"):
            p.data = p.data[three]
        elif name.endswith("_proj_weight"):
            p.data = p.data[rows]
        elif name == "out_proj.weight":
            p.data = p.data[:, rows]
        elif name.startswith("bias_"):
            p.data = p.data[..., rows]
    return whole, small


def tokens(*shape):
    return torch.randn(shape, dtype=torch.float64)


def inputs(whole, batched=True):
    q, k, v = tokens(2, 5, EMBED), tokens(2, 6, whole.kdim), tokens(2, 6, whole.vdim)
    if not batched:
        return q[0], k[0], v[0]
    return (
        (q, k, v) if whole.batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))
    )


KINDS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"kdim": 7, "vdim": 5, "batch_first": True},
]
causal = torch.triu(torch.ones(5, 6, dtype=torch.bool), 1)
padding = torch.zeros(2, 6, dtype=torch.bool)
padding[1, 4:] = True
MASKS = [
    {},
    {"attn_mask": causal},
    {"attn_mask": tokens(5, 6)},
    {"key_padding_mask": padding},
    {"key_padding_mask": padding, "attn_mask": causal},
    {
        "key_padding_mask": torch.zeros(2, 6, dtype=torch.float64).masked_fill(
            padding, -3.0
        ),
        "attn_mask": tokens(5, 6),
    },
]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("masks", range(len(MASKS)))
def test_outputs_are_those_of_the_masked_attention(options, masks):
    whole, small = pair(**options)
    given = inputs(whole)
    wanted = whole(*given, need_weights=False, **MASKS[masks])[0]
    for got in (
        small(*given, need_weights=False, **MASKS[masks]),
        small(*given, **MASKS[masks]),
    ):
        torch.testing.assert_close(got[0], wanted, **CLOSE)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_weights_by_head_are_those_of_the_heads_that_stay(options):
    whole, small = pair(**options)
    for batched in (True, False):
        given = inputs(whole, batched)
        wanted = whole(*given, average_attn_weights=False)[1]
        got = small(*given, average_attn_weights=False)
        torch.testing.assert_close(got[1], wanted[..., [0, 2], :, :], **CLOSE)
        torch.testing.assert_close(small(*given)[1], got[1].mean(-3), **CLOSE)
        torch.testing.assert_close(got[0], whole(*given)[0], **CLOSE)


def test_masks_by_head_have_the_heads_that_stay():
    whole, small = pair(batch_first=True)
    mask = torch.rand(2, HEADS, 5, 6, dtype=torch.float64) > 0.4
    mask[..., 0] = False
    given = inputs(whole)
    wanted = whole(*given, attn_mask=mask.flatten(0, 1))[0]
    got = small(*given, attn_mask=mask[:, [0, 2]].flatten(0, 1))[0]
    torch.testing.assert_close(got, wanted, **CLOSE)
    with pytest.raises(
        ValueError,
        match=r"expected attn_mask of shape \(5, 6\) or \(4, 5, 6\), got \(8, 5, 6\)",
    ):
        small(*given, attn_mask=mask.flatten(0, 1))


def test_unbatched_padding_and_causal_hints():
    whole, small = pair()
    q = tokens(5, EMBED)
    triangle = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    given = {"attn_mask": triangle, "is_causal": True, "need_weights": False}
    torch.testing.assert_close(
        small(q, q, q, **given)[0], whole(q, q, q, **given)[0], **CLOSE
    )
    given = {"key_padding_mask": torch.tensor([False, False, False, True, True])}
    torch.testing.assert_close(
        small(q, q, q, **given)[0], whole(q, q, q, **given)[0], **CLOSE
    )


def test_dropout_drops_weights_in_train_mode():
    whole, small = pair(kept=(0, 1, 2, 3), dropout=0.5)
    whole.train(), small.train()
    given = inputs(whole)
    torch.manual_seed(0)
    wanted = whole(*given)
    torch.manual_seed(0)
    got = small(*given)
    torch.testing.assert_close(got[0], wanted[0], **CLOSE)
    torch.testing.assert_close(got[1], wanted[1], **CLOSE)


def test_what_is_refused_has_a_text():
    whole, small = pair(batch_first=True)
    q, k, v = inputs(whole)
    with pytest.raises(ValueError, match="is_causal is a hint about, got None"):
        small(q, k, v, is_causal=True)
    with pytest.raises(
        ValueError, match=r"expected key_padding_mask of shape \(2, 6\), got \(2, 5\)"
    ):
        small(q, k, v, key_padding_mask=padding[:, :5])
    nested = torch.nested.nested_tensor([q[0], q[1, :3]], layout=torch.jagged)
    with pytest.raises(
        ValueError,
        match="expected padded tensors with a key_padding_mask, got nested ones",
    ):
        small(nested, nested, nested)


def test_pickles_compiles_and_exports():
    whole, small = pair(batch_first=True)
    given = inputs(whole)
    wanted = small(*given)[0]
    again = pickle.loads(pickle.dumps(copy.deepcopy(small)))
    torch.testing.assert_close(again(*given)[0], wanted, **CLOSE)
    torch.testing.assert_close(
        torch.compile(small, backend="eager", fullgraph=True)(*given)[0],
        wanted,
        **CLOSE,
    )
    torch.testing.assert_close(
        torch.export.export(small, given).module()(*given)[0], wanted, **CLOSE
    )
    half = copy.deepcopy(small).bfloat16()
    assert half(*(x.bfloat16() for x in given))[0].dtype == torch.bfloat16
