"""Networks that cut, pad, move, repeat and reshape their channels."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.zoo import image, in_the_zoo
from tests.shrinking.zoo_convnets import conv, head
from tests.shrinking.zoo_gates import Lambda


@in_the_zoo
def unet_with_pixel_shuffle():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.down, self.two = (
                conv(3, 5),
                nn.PixelUnshuffle(2),
                conv(20, 6),
            )
            self.up, self.last = (
                nn.Sequential(conv(6, 16), nn.PixelShuffle(2)),
                nn.Conv2d(9, 2, 3),
            )

        def forward(self, x):
            x = self.one(x)
            return self.last(torch.cat([x, self.up(self.two(self.down(x)))], 1))

    return Net(), (image(),)


@in_the_zoo
def feature_pyramid():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (
                conv(3, 5),
                conv(5, 6, stride=2),
                conv(6, 8, stride=2),
            )
            self.lateral = nn.ModuleList([nn.Conv2d(n, 6, 1) for n in (5, 6, 8)])
            self.out, self.boxes = conv(6, 6), nn.Conv2d(6, 4, 1)

        def forward(self, x):
            one = self.one(x)
            two = self.two(one)
            p3 = self.lateral[2](self.three(two))
            p2 = self.lateral[1](two) + F.interpolate(p3, scale_factor=2.0)
            p1 = self.lateral[0](one) + F.interpolate(
                p2, one.shape[-2:], mode="bilinear", align_corners=False
            )
            return tuple(self.boxes(self.out(p)) for p in (p1, p2, p3))

    return Net(), (image(),)


@in_the_zoo
def pyramid_pooling():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = conv(3, 6), nn.Conv2d(12, 2, 1)
            self.parts = nn.ModuleList(
                [nn.Sequential(nn.AdaptiveAvgPool2d(n), conv(6, 3, 1)) for n in (1, 2)]
            )

        def forward(self, x):
            x = self.body(x)
            parts = [
                F.interpolate(part(x), x.shape[-2:], mode="bilinear")
                for part in self.parts
            ]
            return self.last(torch.cat([x, *parts], 1))

    return Net(), (image(),)


@in_the_zoo
def shortcuts_with_padded_channels():
    class Block(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.body, self.more = (
                nn.Sequential(conv(i, o, stride=2), conv(o, o, act=None)),
                o - i,
            )

        def forward(self, x):
            left = self.more // 2
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, left, self.more - left))
            return F.relu(self.body(x) + shortcut)

    return nn.Sequential(conv(3, 5), Block(5, 8), Block(8, 11), head(11)), (image(),)


@in_the_zoo
def padding_of_one():
    pad = Lambda(
        lambda x: F.pad(x, (0, 0, 0, 0, 1, 2), value=1.0), "two channels of ones"
    )
    return nn.Sequential(
        conv(3, 5), pad, conv(8, 6), nn.ReflectionPad2d(1), nn.ZeroPad2d(1), head(6)
    ), (image(),)


@in_the_zoo
def slices_of_channels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.head = (
                conv(3, 8),
                conv(5, 6),
                conv(3, 6),
                head(6),
            )

        def forward(self, x):
            x = self.one(x)
            return self.head(
                self.two(x[:, :5])
                + self.three(x.narrow(1, 4, 3))
                + x[:, ::3].sum(1, keepdim=True)
            )

    return Net(), (image(),)


@in_the_zoo
def rolled_and_flipped():
    layers = [
        conv(3, 6),
        Lambda(lambda x: x.roll(2, 1), "roll"),
        conv(6, 6),
        Lambda(lambda x: x.flip(1), "flip"),
    ]
    return nn.Sequential(
        *layers, Lambda(lambda x: x.roll((1, 2), (2, 3)), "shift"), conv(6, 5), head(5)
    ), (image(),)


@in_the_zoo
def rolled_and_added():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = conv(3, 6), conv(6, 6), head(6)

        def forward(self, x):
            x = self.one(x)
            x = x + self.two(x).roll(3, 1)
            return self.head(x[:, torch.tensor([3, 4, 5, 0, 1, 2])] * x)

    return Net(), (image(),)


@in_the_zoo
def ghost_channels():
    class Ghost(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.first, self.cheap, self.o = (
                conv(i, (o + 1) // 2),
                conv((o + 1) // 2, (o + 1) // 2, groups=(o + 1) // 2),
                o,
            )

        def forward(self, x):
            x = self.first(x)
            return torch.cat([x, self.cheap(x)], 1)[:, : self.o]

    return nn.Sequential(Ghost(3, 7), Ghost(7, 8), head(8)), (image(),)


@in_the_zoo
def cross_stage_partial():
    class Stage(nn.Module):
        def __init__(self, width):
            super().__init__()
            half = width // 2
            self.parts = nn.ModuleList([conv(half, half) for _ in range(2)])
            self.last = conv(2 * width, width, 1)

        def forward(self, x):
            ys = list(x.split((x.shape[1] // 2,) * 2, 1))
            ys.extend(part(ys[-1]) for part in self.parts)
            return self.last(torch.cat(ys, 1))

    return nn.Sequential(conv(3, 8), Stage(8), Stage(8), head(8)), (image(),)


@in_the_zoo
def hierarchical_splits():
    class Splits(nn.Module):
        """As in Res2Net: each part sees the one before it."""

        def __init__(self, width, parts):
            super().__init__()
            self.parts = nn.ModuleList(
                [conv(width // parts, width // parts) for _ in range(parts - 1)]
            )

        def forward(self, x):
            first, *rest = x.chunk(len(self.parts) + 1, 1)
            ys = [first]
            for part, y in zip(self.parts, rest, strict=True):
                ys.append(part(y + ys[-1]))
            return torch.cat(ys, 1)

    return nn.Sequential(conv(3, 9), Splits(9, 3), conv(9, 6, 1), head(6)), (image(),)


@in_the_zoo
def split_attention():
    class Split(nn.Module):
        """As in ResNeSt: two groups of channels, weighted by a softmax over both."""

        def __init__(self, width):
            super().__init__()
            self.conv, self.down, self.up = (
                conv(width, 2 * width, groups=2),
                conv(width, 4, 1),
                nn.Conv2d(4, 2 * width, 1),
            )

        def forward(self, x):
            b, c = x.shape[:2]
            y = self.conv(x).view(b, 2, c, *x.shape[2:])
            weights = (
                self.up(self.down(y.sum(1).mean((2, 3), keepdim=True)))
                .view(b, 2, c, 1, 1)
                .softmax(1)
            )
            return (y * weights).sum(1)

    return nn.Sequential(conv(3, 6), Split(6), head(6)), (image(),)


@in_the_zoo
def concatenations_of_one():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.heads, self.last = (
                conv(3, 5),
                nn.ModuleList([nn.Conv2d(5, 1, 1) for _ in range(4)]),
                head(5),
            )
            self.table = nn.Parameter(torch.ones(1, 1, 8, 8))

        def forward(self, x):
            x = self.one(x)
            maps = torch.cat(
                [head(x) for head in self.heads] + [self.table.expand(len(x), 1, 8, 8)],
                1,
            )
            means = torch.stack(
                [x.mean(1), x.amax(1), x.prod(1), maps[:, 0], maps[:, 1] * 2], 1
            )
            return self.last(x + maps + means)

    return Net(), (image(),)


@in_the_zoo
def constant_tables():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.head = (
                conv(3, 6),
                conv(6, 6),
                conv(8, 6),
                head(6),
            )
            self.register_buffer("table", torch.arange(6.0).reshape(1, 6, 1, 1) - 1)
            self.register_buffer("places", torch.linspace(-1, 1, 8))

        def forward(self, x):
            x = self.two(self.one(x) * self.table) + self.table.cos()
            rows, columns = torch.meshgrid(self.places, self.places, indexing="ij")
            grid = torch.stack([rows, columns])[None].expand(len(x), 2, 8, 8)
            x = self.three(torch.cat([x, grid], 1))
            return self.head(
                x
                * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], dtype=x.dtype).view(
                    1, -1, 1, 1
                )
            )

    return Net(), (image(),)


@in_the_zoo
def repeated_channels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three, self.head = (
                conv(3, 4),
                conv(8, 6),
                conv(12, 6),
                head(6),
            )

        def forward(self, x):
            x = self.two(self.one(x).repeat_interleave(2, 1))
            return self.head(
                self.three(x.repeat(1, 2, 1, 1))
                + x.mean(1, keepdim=True).expand(-1, 6, -1, -1)
            )

    return Net(), (image(),)


@in_the_zoo
def convolution_in_3d():
    layers = [
        nn.Conv3d(2, 6, 3, padding=1),
        nn.BatchNorm3d(6),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(6, 8, 1, groups=2),
    ]
    last = [
        nn.ConvTranspose3d(8, 4, 2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers, *last), (image(2, 4, dims=3),)


@in_the_zoo
def autoencoder():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(
                conv(3, 5, stride=2),
                conv(5, 6, stride=2),
                nn.Flatten(),
                nn.Linear(24, 10),
            )
            self.mean, self.spread, self.up = (
                nn.Linear(10, 4),
                nn.Linear(10, 4),
                nn.Linear(4, 24),
            )
            self.last = nn.Sequential(
                nn.ConvTranspose2d(6, 5, 2, 2),
                nn.ReLU(),
                nn.ConvTranspose2d(5, 3, 2, 2),
            )

        def forward(self, x):
            x = self.down(x).relu()
            mean, spread = self.mean(x), self.spread(x)
            y = self.last(self.up(mean + 0.5 * spread.exp()).view(-1, 6, 2, 2))
            return y, (1 + spread - mean.square() - spread.exp()).sum(1)

    return Net(), (image(),)


@in_the_zoo
def channels_split_into_heads_of_pixels():
    class Net(nn.Module):
        """Reshapes that mix channels and pixels in several ways."""

        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = conv(3, 6), conv(24, 8), nn.Linear(32, 4)

        def forward(self, x):
            x = self.one(x)
            b, c, h, w = x.shape
            x = (
                x.view(b, c, h // 2, 2, w // 2, 2)
                .permute(0, 3, 5, 1, 2, 4)
                .reshape(b, 4 * c, h // 2, w // 2)
            )
            x = self.two(x).unfold(2, 2, 2).sum((-1, -3))
            return self.head(x.transpose(1, 2).reshape(b, -1))

    return Net(), (image(),)
