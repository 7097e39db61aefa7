"""What torch's layers keep about sizes after entries went.
RMS norms in a module's own code."""

import copy

import pytest
import torch
from torch import nn

from sparsefn.shrinking.analysis import Cut
from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.layer_sizes import resize
from sparsefn.shrinking.layers import (
    CountedGroupNorm,
    CountedLayerNorm,
    CountedRMSNorm,
    SmallAttention,
)
from tests.shrinking.classes import drawn, same, small_of


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
    cut, kept = groups(model, torch.randn(2, 5, 3)).cut({}), Cut.kept
    label = cut.analysis.leaves["attention.in_proj_weight"].labels[0]

    def uneven(self, one, size=0):
        flags = kept(self, one, size).copy()
        flags[0] &= one is not label
        return flags

    monkeypatch.setattr(Cut, "kept", uneven)
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
