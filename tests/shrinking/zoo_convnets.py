"""Convolutional networks in the style of known families."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.zoo import image, in_the_zoo


def conv(i, o, size=3, stride=1, groups=1, act=nn.ReLU, padding=None):
    """A convolution, its batch norm and an activation."""
    sizes = (size, size) if isinstance(size, int) else size
    padding = tuple(n // 2 for n in sizes) if padding is None else padding
    layers = [
        nn.Conv2d(i, o, sizes, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(o),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


def head(width, classes=4):
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    )


@in_the_zoo
def plain_convnet():
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.Tanh(),
    ]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(72, 10), nn.Sigmoid(), nn.Linear(10, 4)
    ), (image(),)


@in_the_zoo
def vgg():
    features = [conv(3, 6), conv(6, 6), nn.MaxPool2d(2), conv(6, 8), nn.MaxPool2d(2)]
    layers = [
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 12),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(12, 4),
    ]
    return nn.Sequential(*features, *layers), (image(),)


class Residual(nn.Module):
    def __init__(self, body, shortcut=None, act=F.relu):
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut or nn.Identity(), act

    def forward(self, x):
        return self.act(self.body(x) + self.shortcut(x))


def basic(i, o, stride=1, wide=1):
    body = nn.Sequential(conv(i, o * wide, stride=stride), conv(o * wide, o, act=None))
    return Residual(body, conv(i, o, 1, stride, act=None) if i != o else None)


def bottleneck(i, o, inner, stride=1, groups=1, inside=None):
    layers = [
        conv(i, inner, 1),
        conv(inner, inner, stride=stride, groups=groups),
        *([inside] if inside else []),
    ]
    return Residual(
        nn.Sequential(*layers, conv(inner, o, 1, act=None)),
        conv(i, o, 1, stride, act=None),
    )


@in_the_zoo
def resnet_basic():
    return nn.Sequential(
        conv(3, 6), nn.MaxPool2d(2), basic(6, 6), basic(6, 8, 2), basic(8, 8), head(8)
    ), (image(),)


@in_the_zoo
def resnet_bottleneck():
    return nn.Sequential(
        conv(3, 6), bottleneck(6, 12, 5), bottleneck(12, 16, 6, 2), head(16)
    ), (image(),)


@in_the_zoo
def resnext():
    layers = [
        conv(3, 6),
        bottleneck(6, 12, 8, groups=4),
        bottleneck(12, 16, 12, 2, groups=4),
        head(16),
    ]
    return nn.Sequential(*layers), (image(),)


@in_the_zoo
def wide_resnet():
    return nn.Sequential(
        conv(3, 6), basic(6, 6, wide=2), basic(6, 8, 2, wide=2), head(8)
    ), (image(),)


@in_the_zoo
def stochastic_depth():
    class Drop(nn.Module):
        def forward(self, x):
            if not self.training:
                return x
            return x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.8) / 0.8

    body = nn.Sequential(conv(6, 8), conv(8, 6, act=None), Drop())
    return nn.Sequential(conv(3, 6), Residual(body), Residual(basic(6, 6)), head(6)), (
        image(),
    )


@in_the_zoo
def densenet():
    class Dense(nn.Module):
        def __init__(self, i, growth, n):
            super().__init__()
            widths = range(i, i + n * growth, growth)
            parts = (
                [
                    nn.BatchNorm2d(w),
                    nn.ReLU(),
                    conv(w, 8, 1),
                    nn.Conv2d(8, growth, 3, padding=1),
                ]
                for w in widths
            )
            self.layers = nn.ModuleList([nn.Sequential(*part) for part in parts])

        def forward(self, x):
            xs = [x]
            for layer in self.layers:
                xs.append(layer(torch.cat(xs, 1)))
            return torch.cat(xs, 1)

    between = nn.Sequential(
        nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 1), nn.AvgPool2d(2)
    )
    layers = [
        nn.Conv2d(3, 6, 3, padding=1),
        Dense(6, 3, 2),
        between,
        Dense(6, 3, 2),
        nn.BatchNorm2d(12),
        head(12),
    ]
    return nn.Sequential(*layers), (image(),)


class Branches(nn.Module):
    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


@in_the_zoo
def inception():
    asymmetrical = nn.Sequential(conv(6, 4, 1), conv(4, 5, (1, 5)), conv(5, 5, (5, 1)))
    pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(6, 3, 1))
    forked = nn.Sequential(
        conv(6, 4, 1), Branches(conv(4, 3, (1, 3)), conv(4, 3, (3, 1)))
    )
    return nn.Sequential(
        conv(3, 6), Branches(conv(6, 4, 1), asymmetrical, pooled, forked), head(18)
    ), (image(),)


@in_the_zoo
def googlenet_with_two_outputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.aside = conv(3, 6), head(15, 3)
            pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(6, 3, 1))
            self.mixed = Branches(
                conv(6, 4, 1), nn.Sequential(conv(6, 4, 1), conv(4, 8)), pooled
            )
            self.last = nn.Sequential(conv(15, 8), head(8))

        def forward(self, x):
            x = F.max_pool2d(self.stem(x), 3, 2, ceil_mode=True)
            x = self.mixed(F.local_response_norm(x, 3))
            return {"logits": self.last(x), "aside": self.aside(x)}

    return Net(), (image(),)


@in_the_zoo
def squeezenet():
    def fire(i, squeezed, o):
        return nn.Sequential(
            conv(i, squeezed, 1), Branches(conv(squeezed, o, 1), conv(squeezed, o, 3))
        )

    last = [
        nn.Dropout(),
        nn.Conv2d(12, 4, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(
        conv(3, 6), fire(6, 4, 5), nn.MaxPool2d(2), fire(10, 4, 6), *last
    ), (image(),)


@in_the_zoo
def mobilenet_v1():
    def separable(i, o, stride=1):
        return nn.Sequential(conv(i, i, 3, stride, groups=i), conv(i, o, 1))

    return nn.Sequential(
        conv(3, 6, stride=2), separable(6, 8), separable(8, 12, 2), head(12)
    ), (image(),)


def inverted(i, o, wider=2, stride=1, act=nn.ReLU6, inside=None, size=3):
    """An inverted residual: wide and depthwise inside."""
    inner = i * wider
    layers = [
        conv(i, inner, 1, act=act),
        conv(inner, inner, size, stride, groups=inner, act=act),
    ]
    body = nn.Sequential(
        *layers, *([inside] if inside else []), conv(inner, o, 1, act=None)
    )
    return Residual(body, act=nn.Identity()) if i == o and stride == 1 else body


@in_the_zoo
def mobilenet_v2():
    layers = [
        conv(3, 6, stride=2),
        inverted(6, 6),
        inverted(6, 8, stride=2),
        inverted(8, 8),
        conv(8, 16, 1),
        head(16),
    ]
    return nn.Sequential(*layers), (image(),)


@in_the_zoo
def regnet():
    layers = [
        bottleneck(6, 8, 8, 2, groups=2),
        bottleneck(8, 8, 8, groups=2),
        bottleneck(8, 12, 12, groups=3),
    ]
    return nn.Sequential(conv(3, 6), *layers, head(12)), (image(),)


class Shuffle(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.groups = groups

    def forward(self, x):
        b, c, h, w = x.shape
        return (
            x.view(b, self.groups, c // self.groups, h, w)
            .transpose(1, 2)
            .contiguous()
            .view(b, c, h, w)
        )


@in_the_zoo
def shufflenet_v1():
    def unit(width, inner, groups):
        first = conv(width, inner, 1, groups=groups)
        layers = [Shuffle(groups), conv(inner, inner, groups=inner, act=None)]
        return Residual(
            nn.Sequential(
                first, *layers, conv(inner, width, 1, groups=groups, act=None)
            )
        )

    return nn.Sequential(conv(3, 8), unit(8, 12, 2), unit(8, 4, 2), head(8)), (image(),)


@in_the_zoo
def shufflenet_v2():
    class Unit(nn.Module):
        def __init__(self, half):
            super().__init__()
            layers = [
                conv(half, half, 1),
                conv(half, half, groups=half, act=None),
                conv(half, half, 1),
            ]
            self.body, self.shuffle = nn.Sequential(*layers), Shuffle(2)

        def forward(self, x):
            left, right = x.chunk(2, 1)
            return self.shuffle(torch.cat([left, self.body(right)], 1))

    return nn.Sequential(
        conv(3, 8), Unit(4), Unit(4), Unit(4), conv(8, 12, 1), head(12)
    ), (image(),)


@in_the_zoo
def shuffle_of_torch():
    return nn.Sequential(
        conv(3, 8), nn.ChannelShuffle(4), conv(8, 12, groups=2), head(12)
    ), (image(),)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@in_the_zoo
def convnext():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.depthwise, self.norm = (
                nn.Conv2d(width, width, 5, padding=2, groups=width),
                nn.LayerNorm(width),
            )
            self.up, self.down = (
                nn.Linear(width, 3 * width),
                nn.Linear(3 * width, width),
            )
            self.scale = nn.Parameter(torch.ones(width))

        def forward(self, x):
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = self.scale * self.down(F.gelu(self.up(y)))
            return x + y.permute(0, 3, 1, 2)

    between = nn.Sequential(LayerNorm2d(6), nn.Conv2d(6, 8, 2, 2))
    return nn.Sequential(
        nn.Conv2d(3, 6, 2, 2), LayerNorm2d(6), Block(6), between, Block(8), head(8)
    ), (image(),)


@in_the_zoo
def unet_with_transposed_convolutions():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.mid = conv(3, 5), conv(5, 6), conv(6, 8)
            self.up_two, self.up_one = (
                nn.ConvTranspose2d(8, 6, 2, 2),
                nn.ConvTranspose2d(6, 5, 2, 2),
            )
            self.dec_two, self.dec_one, self.last = (
                conv(12, 6),
                conv(10, 5),
                nn.Conv2d(5, 2, 1),
            )

        def forward(self, x):
            one = self.one(x)
            two = self.two(F.max_pool2d(one, 2))
            x = self.mid(F.max_pool2d(two, 2))
            x = self.dec_two(torch.cat([self.up_two(x), two], 1))
            return self.last(self.dec_one(torch.cat([self.up_one(x), one], 1)))

    return Net(), (image(),)


@in_the_zoo
def generator():
    def up(i, o, groups=1):
        return [
            nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False, groups=groups),
            nn.BatchNorm2d(o),
            nn.ReLU(),
        ]

    layers = [
        nn.ConvTranspose2d(8, 8, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        *up(8, 6),
        *up(6, 6, 2),
        *up(6, 6, 6),
    ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(6, 3, 3, 1, 1), nn.Tanh()), (
        image(8, 1),
    )
