"""Steps of random networks: layers, activations and norms.

They work on vectors (batch, channels), maps (batch, channels, rows, columns) and tokens
(batch, tokens, channels).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

Shape = tuple[int, ...]


class Step(nn.Module):
    """A function of one value or two, with what it owns: layers, parameters and
    tables.
    """

    def __init__(self, text: str, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.text, self.fn, self.kind = text, fn, "first"
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *xs):
        return self.fn(self, *xs)


class Kind(NamedTuple):
    """How to draw a step: what it works on, a test of the shapes of its inputs, and the
    drawing.
    """

    ranks: tuple[int, ...]
    fits: Callable[..., bool]
    make: Callable[..., Step]
    inputs: int


KINDS: dict[str, Kind] = {}
ANY, MAP, TOKENS, VECTOR = (2, 3, 4), (4,), (3,), (2,)


def step(ranks, fits=lambda *shapes: True, inputs=1):
    """Enters a way to draw a step: `make(pick, shape)`, or of two shapes."""

    def enter(make):
        KINDS[make.__name__] = Kind(ranks, fits, make, inputs)
        return make

    return enter


def axis(shape: Shape) -> int:
    """Where the channels are."""
    return 2 if len(shape) == 3 else 1


def width(shape: Shape) -> int:
    return shape[axis(shape)]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def even(shape):
    return width(shape) % 2 == 0 and width(shape) > 2


def wide(shape):
    return width(shape) > 2


def table(shape: Shape, values: torch.Tensor) -> torch.Tensor:
    """A value for each channel, to be added or multiplied."""
    return values.reshape([-1 if i == axis(shape) else 1 for i in range(len(shape))])


# ---------------------------------------------------------------- layers
@step(ANY)
def dense(pick, shape):
    """Linear along the channels; a convolution of size 1 on maps."""
    o, bias = pick(4, 6, 3, 8), pick(True, False)
    layer = (
        nn.Conv2d(width(shape), o, 1, bias=bias)
        if len(shape) == 4
        else nn.Linear(width(shape), o, bias=bias)
    )
    return Step(
        f"dense to {o}{'' if bias else ', no bias'}",
        lambda self, x: self.layer(x),
        layer=layer,
    )


@step(MAP)
def convolution(pick, shape):
    o = pick(4, 6, 3, 8)
    groups = pick(*[g for g in divisors(width(shape)) if o % g == 0])
    layer = nn.Conv2d(
        width(shape),
        o,
        pick(3, 1, (1, 3)),
        padding="same",
        groups=groups,
        bias=pick(True, False),
    )
    return Step(f"{layer}", lambda self, x: self.layer(x), layer=layer)


@step(MAP)
def depthwise(pick, shape):
    c, more = width(shape), pick(1, 2)
    layer = nn.Conv2d(c, c * more, 3, padding=1, groups=c, bias=pick(False, True))
    return Step(f"depthwise, {more} each", lambda self, x: self.layer(x), layer=layer)


@step(MAP)
def transposed_convolution(pick, shape):
    o = pick(4, 6, 3)
    groups = pick(*[g for g in divisors(width(shape)) if o % g == 0])
    layer = nn.ConvTranspose2d(
        width(shape), o, 3, padding=1, groups=groups, bias=pick(True, False)
    )
    return Step(f"{layer}", lambda self, x: self.layer(x), layer=layer)


@step(MAP)
def convolution_and_its_transpose(pick, shape):
    weight = nn.Parameter(torch.ones(pick(4, 6), width(shape), 3, 3))

    def run(self, x):
        return F.conv_transpose2d(
            F.conv2d(x, self.weight, padding=1).relu(), self.weight, padding=1
        )

    return Step(
        f"convolution to {len(weight)} and back by its transpose", run, weight=weight
    )


@step(ANY)
def residual(pick, shape):
    c, inner, act = width(shape), pick(4, 6), pick(F.relu, torch.sigmoid)
    one, two = (
        nn.Conv2d(a, b, 1) if len(shape) == 4 else nn.Linear(a, b)
        for a, b in ((c, inner), (inner, c))
    )
    return Step(
        f"residual through {inner} and {act.__name__}",
        lambda self, x: x + self.two(act(self.one(x))),
        one=one,
        two=two,
    )


@step(ANY)
def layer_used_twice(pick, shape):
    c = width(shape)
    layer = nn.Conv2d(c, c, 1) if len(shape) == 4 else nn.Linear(c, c)
    return Step(
        "layer used twice",
        lambda self, x: self.layer(self.layer(x).relu()),
        layer=layer,
    )


@step(MAP)
def standardised_convolution(pick, shape):
    weight = nn.Parameter(torch.ones(pick(4, 6), width(shape), 3, 3))

    def run(self, x):
        mean, std = (
            self.weight.mean((1, 2, 3), True),
            self.weight.std((1, 2, 3), keepdim=True),
        )
        return F.conv2d(x, (self.weight - mean) / (std + 1e-3), padding=1)

    return Step(f"standardised convolution to {len(weight)}", run, weight=weight)


# ---------------------------------------------------------------- activations, norms
ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "cos": torch.cos,
    "elu + 1": lambda x: F.elu(x) + 1,
    "exp of tanh": lambda x: x.tanh().exp(),
    "square": lambda x: x.square() / 4,
    "1 - x": lambda x: 1 - x,
    "hardswish": F.hardswish,
    "sign": torch.sign,
    "x > 0": lambda x: (x > 0).to(x.dtype),
    "floor": torch.floor,
    "where x > 0, else 1": lambda x: torch.where(x > 0, x, 1.0),
    "masked fill": lambda x: x.masked_fill(x < 0.1, -0.5),
    "clamp": lambda x: x.clamp(0.1, 2.0),
    "x / (1 + |x|)": lambda x: x / (1 + x.abs()),
    "2 ** x": lambda x: torch.pow(2.0, x.tanh()),
}


@step(ANY)
def activation(pick, shape):
    name = pick(*ACTS)
    return Step(name, lambda self, x: ACTS[name](x))


@step(ANY)
def activation_by_channel(pick, shape):
    scale = nn.Parameter(table(shape, torch.ones(width(shape))))
    return Step(
        "max(x, scale * x)",
        lambda self, x: torch.maximum(x, self.scale * x),
        scale=scale,
    )


@step(MAP)
def batch_norm(pick, shape):
    layer = nn.BatchNorm2d(width(shape), affine=pick(True, False))
    return Step(f"{layer}", lambda self, x: self.layer(x), layer=layer)


@step(MAP)
def group_norm(pick, shape):
    layer = nn.GroupNorm(
        pick(*divisors(width(shape))), width(shape), affine=pick(True, False)
    )
    return Step(f"{layer}", lambda self, x: self.layer(x), layer=layer)


@step(MAP)
def instance_norm(pick, shape):
    layer = nn.InstanceNorm2d(width(shape), affine=pick(True, False))
    return Step(f"{layer}", lambda self, x: self.layer(x), layer=layer)


@step(ANY)
def norm_of_channels(pick, shape):
    kind = pick(nn.LayerNorm, nn.RMSNorm)
    layer = kind(width(shape), elementwise_affine=pick(True, False), eps=1e-3)
    return Step(
        f"{layer}",
        lambda self, x: self.layer(x.movedim(axis(shape), -1)).movedim(-1, axis(shape)),
        layer=layer,
    )


@step(ANY)
def norm_by_hand(pick, shape):
    d, scale = axis(shape), nn.Parameter(table(shape, torch.ones(width(shape))))

    def layer_norm(self, x):
        x = x - x.mean(d, keepdim=True)
        return self.scale * x / (x.square().mean(d, keepdim=True) + 1e-3).sqrt()

    def rms_norm(self, x):
        return self.scale * x * (x.pow(2).mean(d, keepdim=True) + 1e-3).rsqrt()

    def by_length(self, x):
        return self.scale * x / (x.norm(dim=d, keepdim=True) + 1e-2)

    def by_sum(self, x):
        return self.scale * x / (x.abs().sum(d, keepdim=True) + 0.1)

    def unit(self, x):
        return self.scale * F.normalize(x, dim=d, eps=1e-2)

    def by_variance(self, x):
        return self.scale * x / (x.var(d, keepdim=True, unbiased=False) + 1e-2).sqrt()

    run = pick(layer_norm, rms_norm, by_length, by_sum, unit, by_variance)
    return Step(f"{run.__name__} by hand", run, scale=scale)
