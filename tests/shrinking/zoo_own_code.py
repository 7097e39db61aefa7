"""Networks whose norms, weights and operations are written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.zoo import image, in_the_zoo
from tests.shrinking.zoo_attention import words
from tests.shrinking.zoo_convnets import conv, head


def scaled(width):
    return nn.Parameter(torch.ones(width))


class OwnLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = scaled(width), scaled(width)

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * (x - mean) / (variance + 1e-5).sqrt() + self.bias


class OwnRmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = scaled(width)

    def forward(self, x):
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            * (1 + self.weight)
        )


@in_the_zoo
def own_layer_norm():
    layers = [
        nn.Embedding(12, 8),
        OwnLayerNorm(8),
        nn.Linear(8, 10),
        nn.GELU(),
        nn.Linear(10, 8),
        OwnLayerNorm(8),
    ]
    return nn.Sequential(*layers, nn.Linear(8, 4)), (words(),)


@in_the_zoo
def own_rms_norm():
    layers = [
        nn.Embedding(12, 8),
        OwnRmsNorm(8),
        nn.Linear(8, 10),
        nn.GELU(),
        nn.Linear(10, 8),
        OwnRmsNorm(8),
    ]
    return nn.Sequential(*layers, nn.Linear(8, 4)), (words(),)


@in_the_zoo
def norms_by_variance():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.head = (
                conv(3, 6),
                conv(6, 6),
                conv(6, 5),
                head(5),
            )
            self.gamma, self.beta = (
                nn.Parameter(torch.ones(1, 6, 1, 1)),
                nn.Parameter(torch.ones(1, 6, 1, 1)),
            )

        def forward(self, x):
            x = self.one(x)
            x = (x - x.mean(1, keepdim=True)) / (
                x.var(1, keepdim=True, unbiased=False) + 1e-6
            ).sqrt()
            x = self.two(self.gamma * x + self.beta)
            strength = x.norm(dim=(2, 3), keepdim=True)
            return self.head(
                self.three(x * strength / (strength.mean(1, keepdim=True) + 1e-6) + x)
            )

    return Net(), (image(),)


@in_the_zoo
def standardised_weights():
    class Standard(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            weight = weight / (weight.flatten(1).std(1).view(-1, 1, 1, 1) + 1e-5)
            return self._conv_forward(x, weight, self.bias)

    layers = [
        Standard(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        Standard(8, 6, 3),
        nn.ReLU(),
        head(6),
    ]
    return nn.Sequential(*layers), (image(),)


@in_the_zoo
def normalised_weights():
    class Net(nn.Module):
        """Weights as a direction and a length, and divided by an estimate of their
        largest singular value.
        """

        def __init__(self):
            super().__init__()
            self.direction, self.length = (
                nn.Parameter(torch.ones(8, 6)),
                nn.Parameter(torch.ones(8, 1)),
            )
            self.spectral, self.head = nn.Linear(8, 7), nn.Linear(7, 3)
            self.register_buffer("u", F.normalize(torch.randn(7), dim=0))

        def forward(self, x):
            # a pruned row has none
            length = self.direction.norm(dim=1, keepdim=True).clamp_min(1e-6)
            x = F.linear(x, self.length * self.direction / length).relu()
            v = F.normalize(self.spectral.weight.t() @ self.u, dim=0)
            largest = torch.dot(self.u, self.spectral.weight @ v)
            return self.head(
                F.linear(x, self.spectral.weight / largest, self.spectral.bias).tanh()
            )

    return Net(), (torch.randn(2, 6),)


@in_the_zoo
def parametrized_weights():
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    nn.utils.parametrizations.weight_norm(first)
    nn.utils.parametrizations.orthogonal(second, orthogonal_map="cayley")
    return nn.Sequential(first, nn.ReLU(), second), (torch.randn(2, 6),)


@in_the_zoo
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, i, o, rank=3):
            super().__init__()
            self.base, self.down, self.up = (
                nn.Linear(i, o),
                nn.Linear(i, rank, bias=False),
                nn.Linear(rank, o, bias=False),
            )

        def forward(self, x):
            return self.base(x) + 2.0 * self.up(self.down(x))

    return nn.Sequential(
        Adapted(6, 8), nn.ReLU(), Adapted(8, 7), nn.ReLU(), Adapted(7, 3)
    ), (torch.randn(2, 6),)


@in_the_zoo
def network_that_makes_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.maker, self.head = (
                nn.Linear(6, 8),
                nn.Linear(4, 40),
                nn.Linear(5, 2),
            )

        def forward(self, x, z):
            weights = self.maker(z).view(5, 8)
            return self.head((self.body(x).relu() @ weights.t()).relu())

    return Net(), (torch.randn(2, 6), torch.randn(4))


@torch.library.custom_op("sparsefn_zoo::shifted_tanh", mutates_args=())
def shifted_tanh(x: torch.Tensor, shift: float) -> torch.Tensor:
    return torch.tanh(x + shift)


@shifted_tanh.register_fake
def _(x, shift):
    return torch.empty_like(x)


@torch.library.custom_op("sparsefn_zoo::mixed", mutates_args=())
def mixed(x: torch.Tensor) -> torch.Tensor:
    return x + x.flip(1)


@mixed.register_fake
def _(x):
    return torch.empty_like(x)


@in_the_zoo
def operations_of_others():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.head = (
                conv(3, 6),
                conv(6, 6),
                conv(6, 5),
                head(5),
            )

        def forward(self, x):
            x = shifted_tanh(self.one(x), 0.5)
            return self.head(self.three(mixed(self.two(x))))

    return Net(), (image(),)


@in_the_zoo
def outputs_of_many_kinds():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.heads = (
                conv(3, 6),
                conv(6, 8),
                nn.ModuleList([head(8, n) for n in (2, 5)]),
            )

        def forward(self, x, scale=1.0, mask=None):
            x = self.two(self.one(x)) * scale
            x = x if mask is None else x * mask[:, None]
            return {
                "heads": [head(x) for head in self.heads],
                "pair": (x.sum(1), x.argmax(1)),
                "top": x.flatten(1).topk(3)[0],
            }

    return Net(), {"x": image(), "scale": 2.0, "mask": torch.rand(2, 8, 8)}


@in_the_zoo
def rotary_of_a_part():
    class Net(nn.Module):
        """As StableLM and GPT-J: only the first entries of a head turn, of all heads
        alike.
        """

        def __init__(self, width=12, heads=3, turned=2):
            super().__init__()
            self.embed, self.heads, self.turned, self.size = (
                nn.Embedding(12, width),
                heads,
                turned,
                width // heads,
            )
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.head = nn.Linear(width, 12)
            angles = torch.outer(torch.arange(5.0), torch.tensor([1.0] * (turned // 2)))
            self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
            self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

        def turn(self, x):
            first, rest = x[..., : self.turned], x[..., self.turned :]
            half = self.turned // 2
            other = torch.cat([-first[..., half:], first[..., :half]], -1)
            return torch.cat([first * self.cos + other * self.sin, rest], -1)

        def forward(self, x):
            x = self.embed(x)
            q, k, v = (
                f(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
                for f in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(
                self.turn(q), self.turn(k), v, is_causal=True
            )
            return self.head(x + self.o(y.transpose(1, 2).reshape(x.shape)))

    return Net(), (words(),)


@in_the_zoo
def writes_in_place():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = conv(3, 6), conv(6, 6), head(6)

        def forward(self, x):
            x = self.one(x)
            shifted = torch.zeros_like(x)
            shifted[:, :2, :, 1:] = x[:, :2, :, :-1]
            shifted[:, 2:4, :, :-1] = x[:, 2:4, :, 1:]
            shifted[:, 4:] = x[:, 4:]
            x = self.two(shifted)
            x += shifted
            return self.head(x.mul_(2).clamp_(max=3.0))

    return Net(), (image(),)


@in_the_zoo
def fourier_mixing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.up, self.head = (
                nn.Embedding(12, 8),
                nn.Linear(8, 10),
                nn.Linear(10, 4),
            )

        def forward(self, x):
            x = self.embed(x)
            x = x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
            return self.head(self.up(x).relu().cumsum(1).sort(1).values)

    return Net(), (words(),)


@in_the_zoo
def running_sums_and_orders_of_channels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.head = (
                nn.Linear(4, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 6),
                nn.Linear(9, 2),
            )

        def forward(self, x):
            x = self.two(self.one(x).cumsum(1)).sort(1).values
            x = self.three(x).relu()
            return self.head(
                torch.cat([x, x.topk(2, 1).values, x.logsumexp(1, keepdim=True)], 1)
            )

    return Net(), (torch.randn(3, 4),)
