"""Transformers and other networks that let tokens look at each other."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.zoo import image, in_the_zoo
from tests.shrinking.zoo_convnets import conv


def words(vocabulary=12, length=5, batch=2):
    return torch.randint(0, vocabulary, (batch, length))


class Attention(nn.Module):
    """Queries, keys and values from three layers, with fewer heads for keys and
    values.
    """

    def __init__(self, width, heads, groups=None, inner=None, causal=False):
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups or heads, causal
        self.size = (inner or width) // heads
        self.q, self.k, self.v = (
            nn.Linear(width, n * self.size) for n in (heads, self.groups, self.groups)
        )
        self.out = nn.Linear(heads * self.size, width)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.groups != self.heads
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Queries, keys and values from one layer, cut by a permutation."""

    def __init__(self, width, heads, scale=None):
        super().__init__()
        self.heads, self.scale = heads, scale or (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(b, n, 3, self.heads, c // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        y = (q * self.scale @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, width, attention, inner=10, norm=nn.LayerNorm, mlp=None):
        super().__init__()
        self.norm1, self.attention, self.norm2 = norm(width), attention, norm(width)
        self.mlp = mlp or nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    """Patches, a token for the class, a table of positions, and blocks."""

    def __init__(self, width, *blocks):
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, width, 4, 4), nn.Sequential(*blocks)
        self.token, self.places = (
            nn.Parameter(torch.ones(1, 1, width)),
            nn.Parameter(torch.ones(1, 5, width)),
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


@in_the_zoo
def vit():
    return Vision(8, Block(8, Attention(8, 2)), Block(8, Attention(8, 4))), (image(),)


@in_the_zoo
def vit_with_fused_queries_keys_values():
    return Vision(8, Block(8, Fused(8, 2)), Block(8, Fused(8, 4))), (image(),)


@in_the_zoo
def grouped_queries():
    blocks = [
        Block(8, Attention(8, 4, 2, causal=True)),
        Block(8, Attention(8, 4, 1, inner=12)),
    ]
    return nn.Sequential(
        nn.Embedding(12, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 12)
    ), (words(),)


@in_the_zoo
def windows_with_a_table_of_relative_positions():
    class Windows(nn.Module):
        def __init__(self, width, heads, shift=0, size=2):
            super().__init__()
            self.fused, self.heads, self.shift, self.size = (
                nn.Linear(width, 3 * width),
                heads,
                shift,
                size,
            )
            self.table, self.proj = (
                nn.Parameter(torch.ones((2 * size - 1) ** 2, heads)),
                nn.Linear(width, width),
            )
            places = torch.stack(
                torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
            ).flatten(1)
            apart = (places[:, :, None] - places[:, None] + size - 1).permute(1, 2, 0)
            self.register_buffer(
                "index", apart[..., 0] * (2 * size - 1) + apart[..., 1]
            )

        def forward(self, x):
            b, h, w, c = x.shape
            s, n = self.size, self.size**2
            x = x.roll((-self.shift, -self.shift), (1, 2))
            x = x.view(b, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, n, c)
            q, k, v = (
                self.fused(x)
                .view(len(x), n, 3, self.heads, c // self.heads)
                .permute(2, 0, 3, 1, 4)
            )
            bias = (
                self.table[self.index.view(-1)].view(n, n, self.heads).permute(2, 0, 1)
            )
            y = (
                q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5 + bias[None]
            ).softmax(-1) @ v
            y = self.proj(y.transpose(1, 2).reshape(len(x), n, c))
            y = y.view(b, h // s, w // s, s, s, c).transpose(2, 3).reshape(b, h, w, c)
            return y.roll((self.shift, self.shift), (1, 2))

    class Merge(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.linear = (
                nn.LayerNorm(4 * width),
                nn.Linear(4 * width, 2 * width, bias=False),
            )

        def forward(self, x):
            parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
            return self.linear(self.norm(torch.cat(parts, -1)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(12, 4)
            self.first = nn.Sequential(
                Block(6, Windows(6, 2)), Block(6, Windows(6, 2, shift=1))
            )
            self.merge, self.second = Merge(6), Block(12, Windows(12, 3))

        def forward(self, x):
            x = self.second(self.merge(self.first(self.patches(x).permute(0, 2, 3, 1))))
            return self.head(x.mean((1, 2)))

    return Net(), (image(),)


@in_the_zoo
def grids_of_attention():
    class Grid(nn.Module):
        """Attention over pixels that lie apart, then back."""

        def __init__(self, width, size=2):
            super().__init__()
            self.block, self.size = Block(width, Fused(width, 2)), size

        def forward(self, x):
            b, c, h, w = x.shape
            s = self.size
            x = (
                x.view(b, c, s, h // s, s, w // s)
                .permute(0, 3, 5, 2, 4, 1)
                .reshape(-1, s * s, c)
            )
            x = self.block(x).view(b, h // s, w // s, s, s, c)
            return x.permute(0, 5, 3, 1, 4, 2).reshape(b, c, h, w)

    return nn.Sequential(
        conv(3, 8), Grid(8), conv(8, 6, groups=2), nn.Conv2d(6, 2, 1)
    ), (image(size=4),)


@in_the_zoo
def mixer():
    class Mixer(nn.Module):
        def __init__(self, tokens, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.tokens = nn.Sequential(
                nn.Linear(tokens, 6), nn.GELU(), nn.Linear(6, tokens)
            )
            self.channels = nn.Sequential(
                nn.Linear(width, 10), nn.GELU(), nn.Linear(10, width)
            )

        def forward(self, x):
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    layers = [
        nn.Conv2d(3, 8, 4, 4),
        nn.Flatten(2),
        nn.Conv1d(8, 7, 1),
        nn.Conv1d(7, 4, 1),
    ]
    return nn.Sequential(*layers, Mixer(4, 4), nn.Flatten(), nn.Linear(16, 3)), (
        image(),
    )


@in_the_zoo
def spatial_gating_units():
    class Gated(nn.Module):
        def __init__(self, tokens, width, inner):
            super().__init__()
            self.up, self.norm, self.down = (
                nn.Linear(width, inner),
                nn.LayerNorm(inner // 2),
                nn.Linear(inner // 2, width),
            )
            self.space = nn.Conv1d(tokens, tokens, 1)

        def forward(self, x):
            u, v = F.gelu(self.up(x)).chunk(2, -1)
            return x + self.down(u * self.space(self.norm(v)))

    return nn.Sequential(
        nn.Embedding(12, 8), Gated(5, 8, 12), Gated(5, 8, 12), nn.Linear(8, 12)
    ), (words(),)


@in_the_zoo
def gated_linear_units():
    class Swiglu(nn.Module):
        def __init__(self, width, inner):
            super().__init__()
            self.up, self.down = (
                nn.Linear(width, 2 * inner, bias=False),
                nn.Linear(inner, width, bias=False),
            )

        def forward(self, x):
            gate, y = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * y)

    layers = [
        Swiglu(8, 10),
        nn.Linear(8, 12),
        nn.GLU(-1),
        nn.Linear(6, 8),
        nn.RMSNorm(8),
        nn.Linear(8, 4),
    ]
    return nn.Sequential(nn.Embedding(12, 8), *layers), (words(),)


@in_the_zoo
def linear_attention():
    class Linear(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.qkv, self.out = (
                heads,
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )

        def forward(self, x):
            q, k, v = (
                y.unflatten(-1, (self.heads, -1)) for y in self.qkv(x).chunk(3, -1)
            )
            q, k = F.elu(q) + 1, k.softmax(-1)
            sums = torch.einsum("bnhd,bnhe->bhde", k, v)
            y = torch.einsum("bnhd,bhde->bnhe", q, sums) / (
                q * k.sum(1, keepdim=True)
            ).sum(-1, keepdim=True)
            return self.out(y.flatten(2))

    return Vision(8, Block(8, Linear(8, 2))), (image(),)


@in_the_zoo
def attention_by_einsum():
    class Net(nn.Module):
        """Weights of three dimensions, as in JAX."""

        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
            self.q, self.k, self.v = (
                nn.Parameter(torch.ones(3, 8, 4)) for _ in range(3)
            )
            self.o = nn.Parameter(torch.ones(3, 4, 8))

        def forward(self, x):
            x = self.embed(x)
            q, k, v = (
                torch.einsum("bnc,hcd->bhnd", x, w) for w in (self.q, self.k, self.v)
            )
            scores = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
            return self.head(x + torch.einsum("bhnm,bhmd,hdc->bnc", scores, v, self.o))

    return Net(), (words(),)


@in_the_zoo
def encoder_of_torch():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(12, 8), encoder, nn.Linear(8, 12)), (words(),)


@in_the_zoo
def decoder_of_torch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = (
                nn.Embedding(12, 8),
                nn.TransformerDecoderLayer(8, 4, 10, batch_first=True),
            )
            self.cross, self.head = (
                nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True),
                nn.Linear(8, 12),
            )

        def forward(self, x, seen):
            x = self.layer(self.embed(x), self.embed(x).flip(1))
            return self.head(x + self.cross(x, seen, seen, need_weights=False)[0])

    return Net(), (words(), torch.randn(2, 3, 6))


@in_the_zoo
def attention_pooling_by_channels():
    class Net(nn.Module):
        """Attention between channels: tokens are summed over."""

        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.out = (
                conv(3, 6, stride=4),
                nn.Conv2d(6, 18, 1, bias=False),
                nn.Conv2d(6, 4, 1),
            )
            self.heat = nn.Parameter(torch.ones(2, 1, 1))

        def forward(self, x):
            x = self.embed(x)
            q, k, v = (
                y.unflatten(1, (2, -1)).flatten(3) for y in self.qkv(x).chunk(3, 1)
            )
            scores = (
                F.normalize(q, dim=-1)
                @ F.normalize(k, dim=-1).transpose(-2, -1)
                * self.heat
            )
            return self.out((scores.softmax(-1) @ v).reshape(x.shape))

    return Net(), (image(),)
