"""Norms and means that go on counting entries that were 0.
Attention with fewer or narrower heads against torch's own with zeros in their
place.

What torch's layers keep about sizes after entries went.
RMS norms in a module's own code.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.plan import PruningPlan
from sparsefn.shrinking.small_layers import (
    CountedGroupNorm,
    CountedLayerNorm,
    CountedRMSNorm,
    SmallAttention,
    counted_group_norm,
    counted_layer_norm,
    counted_mean,
    counted_rms_norm,
    resize,
)
from tests.shrinking.classes import drawn, same, small_of

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


def sizes_fit(model):
    """Every layer is as one of its class that is made with the numbers it keeps."""
    for layer in model.modules():
        kept = {
            name: getattr(layer, name, None)
            for name in ("in_channels", "out_channels", "groups")
        }
        if isinstance(layer, nn.modules.conv._ConvNd):
            new = type(layer)(kernel_size=layer.kernel_size, **kept)
            assert new.weight.shape == layer.weight.shape
        if isinstance(layer, nn.Linear):
            assert layer.weight.shape == (layer.out_features, layer.in_features)


def image(channels=3, size=6, dims=2):
    return torch.randn(2, channels, *[size] * dims)


CONVOLUTIONS = {
    "plain": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 4, 1)
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 4, 1)
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(8, 16, 3, groups=8),
        nn.ReLU(),
        nn.Conv2d(16, 2, 1),
    ),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.ConvTranspose2d(8, 12, 2, groups=2, bias=False),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 2, 1),
    ),
    "instance norm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8), nn.Conv2d(8, 2, 1)
    ),
    "instance norm with statistics": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.Conv2d(8, 2, 1),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_what_is_between(name):
    small, _ = small_of(drawn(CONVOLUTIONS[name]()), image())
    sizes_fit(small)
    for layer in small.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            assert layer.num_features == small[0].out_channels < 8
        if isinstance(layer, nn.PReLU):
            assert layer.num_parameters == small[0].out_channels


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(9, 8), nn.EmbeddingBag(9, 6)
        self.both, self.out = nn.Bilinear(8, 6, 10), nn.Linear(10, 2)

    def forward(self, x):
        return self.out(self.both(self.table(x).sum(1), self.bag(x)).relu())


def test_tables_and_bilinear_layers():
    small, _ = small_of(drawn(Pair()), torch.randint(0, 9, (3, 4)))
    assert (small.table.num_embeddings, small.bag.num_embeddings) == (9, 9)
    assert (
        small.table.embedding_dim
        == small.both.in1_features
        == small.both.weight.shape[1]
        < 8
    )
    assert (
        small.bag.embedding_dim == small.both.in2_features == small.both.weight.shape[2]
    )
    assert small.both.out_features == small.out.in_features == 5


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.into = nn.Linear(3, 6)
        self.layer, self.out = (
            kind(6, 8, 2, batch_first=True, bidirectional=True),
            nn.Linear(16, 2),
        )

    def forward(self, x):
        return self.out(self.layer(self.into(x))[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    small, _ = small_of(drawn(Recurrent(kind)), torch.randn(2, 5, 3))
    assert (small.layer.input_size, small.layer.hidden_size) == (3, 4)
    assert small.layer.weight_hh_l1_reverse.shape[1] == 4 and small.out.in_features == 8
    again = copy.deepcopy(small).train()
    again(torch.randn(2, 5, 3)).sum().backward()
    assert again.layer.weight_ih_l0.grad.shape == again.layer.weight_ih_l0.shape


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.into, self.norm, self.up, self.down = (
            nn.Linear(3, 8),
            norm,
            nn.Linear(8, 6),
            nn.Linear(6, 8),
        )
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        x = self.into(x)
        return self.out(x + self.down(self.up(self.norm(x)).relu()))


NORMS = {
    "layer norm": (lambda: nn.LayerNorm(8), CountedLayerNorm),
    "layer norm without bias": (lambda: nn.LayerNorm(8, bias=False), CountedLayerNorm),
    "layer norm without parameters": (
        lambda: nn.LayerNorm(8, elementwise_affine=False),
        CountedLayerNorm,
    ),
    "rms norm": (lambda: nn.RMSNorm(8), CountedRMSNorm),
    "rms norm without parameters": (
        lambda: nn.RMSNorm(8, elementwise_affine=False),
        CountedRMSNorm,
    ),
    "group norm": (lambda: nn.GroupNorm(1, 8), CountedGroupNorm),
}


@pytest.mark.deep(but=["dtype0-*"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_count_what_is_gone(name, dtype):
    make, kind = NORMS[name]
    model = drawn(Residual(make())).to(dtype)
    x = torch.randn(4, 3, dtype=dtype)
    small, whole = small_of(model, x, counted=True)
    assert type(small.norm) is kind and small.into.out_features == 4
    assert small.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(small(x), whole(x))
    other = small_of(model, x)[0]
    assert type(other.norm) is type(model.norm) and other.into.out_features == 8


def test_groups_of_norms_that_go_as_a_whole_need_no_counting():
    model = drawn(
        nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 2, 1)
        )
    )
    small, _ = small_of(model, image())
    assert type(small[1]) is nn.GroupNorm and (
        small[1].num_groups,
        small[1].num_channels,
    ) == (2, 4)
    small, _ = small_of(
        drawn(
            nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
        ),
        image(),
        counted=True,
    )
    assert type(small[1]) is CountedGroupNorm and (
        small[1].num_groups,
        small[1].num_channels,
        small[1].count,
    ) == (
        2,
        4,
        4,
    )


class Attending(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.into, self.out = nn.Linear(3, 12), nn.Linear(12, 2)
        self.attention = nn.MultiheadAttention(12, 4, **options)

    def forward(self, x):
        x = self.into(x)
        return self.out(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"bias": False}, {"add_bias_kv": True}],
    ids=str,
)
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_attention_of_torch(options, share):
    model = drawn(Attending(**options))
    small, whole = small_of(model, torch.randn(2, 5, 3), share=share)
    assert type(small.attention) in (SmallAttention, nn.MultiheadAttention)
    assert small.state_dict().keys() == model.state_dict().keys()
    new = torch.randn(4, 7, 3)
    torch.testing.assert_close(small(new), whole(new))
    torch.testing.assert_close(small.train()(new), whole(new))


def test_attention_of_fewer_heads_and_inputs_stays_torchs_own_where_it_fits():
    model = drawn(Attending(batch_first=True))
    small, _ = small_of(model, torch.randn(2, 5, 3), gone=fitting(model))
    assert type(small.attention) is nn.MultiheadAttention
    assert (
        small.attention.embed_dim,
        small.attention.num_heads,
        small.attention.head_dim,
    ) == (6, 2, 3)


def fitting(model):
    # Half of the heads, and as many of the inputs.
    found = groups(model, torch.randn(2, 5, 3))
    inputs = next(i for i, g in enumerate(found) if g.size == 12)
    heads = next(i for i, g in enumerate(found) if g.size == 4)
    return {inputs: range(6), heads: range(2)}


@pytest.mark.deep
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_no_fast_path_of_encoders_takes_sizes_wrongly(counted, first):
    layer = nn.TransformerEncoderLayer(12, 4, 10, batch_first=True, norm_first=first)
    model = drawn(
        nn.Sequential(
            nn.Linear(3, 12),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(12, 2),
        )
    )
    x = torch.randn(2, 5, 3)
    for gone in (None, fitting_widths(model, x, counted)):
        small, whole = small_of(model, x, counted=counted, gone=gone)
        torch.testing.assert_close(small(x), whole(x))
        with torch.no_grad():
            torch.testing.assert_close(small(x), whole(x))


def fitting_widths(model, x, counted):
    # Where widths may go: as much of them as of the heads, so that attention stays
    # torch's own.
    return {
        i: range(g.size // 2)
        for i, g in enumerate(groups(model, x, counted=counted))
        if g.size in (4, 12)
    }


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(3, 8), nn.Linear(3, 6)
        self.attention, self.out = (
            nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True),
            nn.Linear(8, 2),
        )

    def forward(self, x, mask):
        k = self.k(x)
        return self.out(self.attention(self.q(x), k, k, key_padding_mask=mask)[0])


def test_attention_with_keys_of_another_width_and_a_mask():
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    small, _ = small_of(drawn(Keyed()), (torch.randn(2, 5, 3), mask))
    assert (small.attention.embed_dim, small.attention.kdim, small.attention.vdim) == (
        4,
        3,
        3,
    )
    assert small.out.in_features == 4


def test_heads_that_do_not_lose_the_same_are_refused(monkeypatch):
    model = drawn(Attending())
    cut, kept = groups(model, torch.randn(2, 5, 3)).cut({}), PruningPlan.kept
    label = cut.analysis.leaves["attention.in_proj_weight"].labels[0]

    def uneven(self, one, size=0):
        flags = kept(self, one, size).copy()
        flags[0] &= one is not label
        return flags

    monkeypatch.setattr(PruningPlan, "kept", uneven)
    assert (
        resize(copy.deepcopy(model), cut)
        == "the MultiheadAttention at 'attention' has heads that do not lose the same"
    )


class Norm(nn.Module):
    def __init__(self, width=8, shift=0.0, eps=1e-2):
        super().__init__()
        self.weight, self.shift, self.eps = nn.Parameter(torch.ones(width)), shift, eps

    def forward(self, x):
        dtype, x = x.dtype, x.to(torch.float32)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.shift + self.weight if self.shift else self.weight) * y.to(dtype)


class Square(nn.Module):
    """With a bias, and without a cast."""

    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-3
        self.gain, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
            * self.gain
            + self.bias
        )


class Mean(Norm):
    def forward(self, x):
        return x / (x.mean(-1, keepdim=True).square() + self.eps) * self.weight


class Literal(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * self.weight


def around(norm):
    return drawn(nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [Norm, lambda: Norm(shift=1.0), Square],
    ids=["plain", "shifted", "with a bias"],
)
def test_weight_and_eps_are_scaled(make, dtype):
    model, x = around(make()).to(dtype), torch.randn(4, 3, dtype=dtype) * 0.1
    made, whole, _ = same(model, x, counted=True, share=0.375)
    small = made.model
    assert type(small[1]) is type(model[1]) and small[0].out_features == 5
    torch.testing.assert_close(small(x), whole(x), rtol=1e-5, atol=1e-5)
    (name,) = made.scaled
    factor = (8 / 5) ** 0.5
    shift = getattr(model[1], "shift", 0.0) * (factor - 1)
    old, new = (m.get_parameter(name) for m in (model, small))
    kept = [i for i in range(8) if torch.isclose(old[i] * factor + shift, new).any()]
    assert len(kept) >= 5 and new.dtype == dtype


@pytest.mark.parametrize(
    ("make", "kind"),
    [(Mean, "Mean"), (Literal, "Literal")],
    ids=["of another mean", "of a literal eps"],
)
def test_other_norms_have_no_smaller_model_of_their_class(make, kind):
    made, _, _ = same(around(make()), torch.randn(4, 3), counted=True)
    assert made.model is None and made.why.startswith(f"the {kind} at '1' ")


def test_half_precision_is_left_alone():
    made, _, _ = same(
        around(Norm()).bfloat16(), torch.randn(4, 3).bfloat16(), counted=True
    )
    assert (
        made.why == "the Norm at '1' takes a mean of entries that go in code of its own"
    )


def test_means_that_lose_nothing_are_left_alone():
    small, _ = small_of(
        nn.Sequential(around(Norm()), nn.Linear(2, 4), nn.Linear(4, 2)),
        torch.randn(4, 3),
    )
    assert small[0][1].eps == 1e-2 and small[1].out_features == 2
