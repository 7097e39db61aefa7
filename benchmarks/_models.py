"""The models of the benchmarks: ResNet-50's weights, and two models small enough to
train on a CPU.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def resnet50_shapes(divide: int = 1) -> list[tuple[int, ...]]:
    """The 54 weights of ResNet-50's convolutions and last layer, 25,502,912 entries;
    channels may be divided.
    """
    shapes: list[tuple[int, ...]] = [(64 // divide, 3, 7, 7)]
    channels = 64 // divide
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        width //= divide
        for block in range(blocks):
            shapes += [
                (width, channels, 1, 1),
                (width, width, 3, 3),
                (4 * width, width, 1, 1),
            ]
            if block == 0:
                shapes.append((4 * width, channels, 1, 1))
            channels = 4 * width
    return [*shapes, (1000 // divide, channels)]


def normal_tree(shapes: Sequence[tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Normal numbers of these shapes, by a path that sorts as they are listed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer{i:04d}": torch.randn(shape, generator=generator)
        for i, shape in enumerate(shapes)
    }


class Weight(nn.Module):
    """A module that holds one weight, shared with the tensor it is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Block(nn.Module):
    """Two 3x3 convolutions and a skip connection, as in ResNet-18, with GroupNorm."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = 1 if inside == outside else 2
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outside) for _ in range(2))
        self.skip = (
            nn.Identity()
            if stride == 1
            else nn.Conv2d(inside, outside, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.one(x)).relu()
        return (self.skip(x) + self.norms[1](self.two(inner))).relu()


def convnet(width: int) -> nn.Module:
    """ResNet-18 for 32x32 images: 64 is its real width."""
    widths = [
        width,
        width,
        width,
        2 * width,
        2 * width,
        4 * width,
        4 * width,
        8 * width,
        8 * width,
    ]
    blocks = [Block(inside, outside) for inside, outside in itertools.pairwise(widths)]
    stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
    return nn.Sequential(
        stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    )


class Transformer(nn.Module):
    """A small encoder that predicts a token at each place."""

    def __init__(self, width: int, layers: int, tokens: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x).flatten(0, 1)
        return out
