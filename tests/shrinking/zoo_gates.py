"""Networks that weigh, normalise and add up their channels: squeeze and excitation,
spatial gates, Gram matrices.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.zoo import image, in_the_zoo
from tests.shrinking.zoo_convnets import Residual, bottleneck, conv, head, inverted


class Squeeze(nn.Module):
    """Squeeze and excitation: channels weighted by what a small network makes of their
    means.
    """

    def __init__(self, width, inner, gate=nn.Sigmoid, act=nn.ReLU):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1), act(), nn.Conv2d(inner, width, 1), gate()
        )

    def forward(self, x):
        return x * self.layers(x.mean((2, 3), keepdim=True))


@in_the_zoo
def mobilenet_v3():
    gate = Squeeze(12, 4, nn.Hardsigmoid)
    layers = [
        conv(3, 6, act=nn.Hardswish),
        inverted(6, 6, act=nn.Hardswish, inside=gate),
        inverted(6, 8, 2, 2),
    ]
    return nn.Sequential(*layers, conv(8, 16, 1, act=nn.Hardswish), head(16)), (
        image(),
    )


@in_the_zoo
def efficientnet():
    blocks = [
        inverted(6, 6, 2, 1, nn.SiLU, Squeeze(12, 3, act=nn.SiLU)),
        inverted(6, 8, 2, 2, nn.SiLU, Squeeze(12, 3)),
    ]
    return nn.Sequential(
        conv(3, 6, act=nn.SiLU), *blocks, inverted(8, 8, 2, 1, nn.SiLU), head(8)
    ), (image(),)


@in_the_zoo
def squeezed_resnext():
    blocks = [
        bottleneck(6, 8, 8, groups=2, inside=Squeeze(8, 3)),
        Residual(Squeeze(8, 4)),
    ]
    return nn.Sequential(conv(3, 6), *blocks, head(8)), (image(),)


@in_the_zoo
def channel_gate_by_a_1d_convolution():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

        def forward(self, x):
            y = self.conv(x.mean((2, 3)).unsqueeze(1)).squeeze(1)
            return x * y.sigmoid()[:, :, None, None]

    return nn.Sequential(conv(3, 6), Gate(), conv(6, 8), head(8)), (image(),)


class Spatial(nn.Module):
    """A gate for every pixel, from the mean and the largest of its channels."""

    def __init__(self, size=3, largest=True):
        super().__init__()
        self.conv, self.largest = (
            nn.Conv2d(2, 1, size, padding=size // 2, bias=False),
            largest,
        )

    def forward(self, x):
        other = x.amax(1, True) if self.largest else x.square().sum(1, keepdim=True)
        return x * self.conv(torch.cat([x.mean(1, True), other], 1)).sigmoid()


@in_the_zoo
def block_attention():
    return nn.Sequential(
        conv(3, 6), Squeeze(6, 3), Spatial(), conv(6, 8), Spatial(), head(8)
    ), (image(),)


@in_the_zoo
def spatial_gate_of_sums():
    return nn.Sequential(
        conv(3, 6, act=nn.Sigmoid), Spatial(largest=False), conv(6, 8), head(8)
    ), (image(),)


class Lambda(nn.Module):
    def __init__(self, fn, text=""):
        super().__init__()
        self.fn, self.text = fn, text

    def forward(self, x):
        return self.fn(x)

    def extra_repr(self):
        return self.text


@in_the_zoo
def sums_over_channels_after_a_sigmoid():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gates, self.second, self.head = (
                conv(3, 6),
                conv(6, 5, act=None),
                conv(6, 6),
                head(6),
            )

        def forward(self, x):
            x = self.first(x)
            gates = self.gates(x)
            y = x * gates.sigmoid().sum(1, keepdim=True) + gates.tanh().sum(
                1, keepdim=True
            )
            return self.head(self.second(y) * gates.exp().mean(1, keepdim=True))

    return Net(), (image(),)


@in_the_zoo
def sums_over_channels_after_a_softmax():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.keys, self.values, self.head = (
                conv(3, 6),
                conv(6, 5, 1),
                conv(6, 5, 1),
                nn.Linear(25, 4),
            )

        def forward(self, x):
            x = self.first(x)
            keys, values = self.keys(x).softmax(1), self.values(x).flatten(2)
            return self.head((keys.flatten(2) @ values.transpose(1, 2)).flatten(1))

    return Net(), (image(),)


@in_the_zoo
def gram_matrix_head():
    class Gram(nn.Module):
        def forward(self, x):
            x = x.flatten(2)
            return (x @ x.transpose(1, 2) / x.shape[-1]).flatten(1)

    return nn.Sequential(
        conv(3, 6), conv(6, 5, act=nn.Sigmoid), Gram(), nn.Linear(25, 4)
    ), (image(),)


@in_the_zoo
def gram_matrix_of_pixels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = conv(3, 6, stride=2), conv(6, 5, act=nn.ELU)

        def forward(self, x):
            x = self.second(self.first(x)).flatten(2)
            return torch.einsum("bcp,bcq->bpq", x, x.softmax(1))

    return Net(), (image(),)


@in_the_zoo
def bilinear_pooling_of_two_networks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = (
                conv(3, 5),
                conv(3, 6, act=nn.Tanh),
                nn.Linear(30, 4),
            )

        def forward(self, x):
            y = torch.einsum("bchw,bdhw->bcd", self.one(x), self.two(x)).flatten(1)
            return self.head(F.normalize(y.sign() * y.abs().sqrt(), dim=1))

    return Net(), (image(),)


@in_the_zoo
def normalised_channels():
    normalise = Lambda(lambda x: x / x.norm(dim=1, keepdim=True), "x / x.norm(dim=1)")
    unit = Lambda(lambda x: F.normalize(x, dim=1), "normalize")
    return nn.Sequential(
        conv(3, 6, act=nn.ELU), normalise, conv(6, 5, act=nn.Sigmoid), unit, head(5)
    ), (image(),)


@in_the_zoo
def cosine_classifier():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                conv(3, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 8)
            )
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            return F.linear(
                F.normalize(self.body(x)), F.normalize(self.weight)
            ), torch.cdist(self.body(x), self.weight)

    return Net(), (image(),)


@in_the_zoo
def softmax_over_channels():
    return nn.Sequential(
        conv(3, 6), nn.Softmax(1), conv(6, 5), nn.Softmax2d(), nn.Conv2d(5, 2, 1)
    ), (image(),)


@in_the_zoo
def maxout():
    pieces = Lambda(
        lambda x: x.unflatten(1, (4, 3)).amax(2), "the largest of three channels"
    )
    return nn.Sequential(conv(3, 12, act=None), pieces, conv(4, 6), head(6)), (image(),)


@in_the_zoo
def group_norms():
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(4, 8),
        nn.SiLU(),
        nn.Conv2d(8, 6, 3),
        nn.GroupNorm(1, 6),
        nn.SiLU(),
    ]
    return nn.Sequential(
        *layers, Residual(nn.Sequential(nn.GroupNorm(6, 6), conv(6, 6))), head(6)
    ), (image(),)


@in_the_zoo
def instance_norms():
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.InstanceNorm2d(6, affine=True),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.InstanceNorm2d(5),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(5, 2, 1)), (image(),)


@in_the_zoo
def prelu_by_channel():
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.PReLU(6),
        nn.Conv2d(6, 6, 3),
        nn.PReLU(),
        nn.Conv2d(6, 8, 3),
        nn.RReLU(),
    ]
    return nn.Sequential(*layers, head(8)), (image(),)


@in_the_zoo
def activations_that_do_not_keep_zero():
    acts = [
        nn.Softplus(),
        Lambda(torch.cos, "cos"),
        Lambda(lambda x: x.sigmoid() + 1, "sigmoid + 1"),
        nn.LogSigmoid(),
    ]
    layers = [layer for act in acts for layer in (nn.Conv2d(5, 5, 1), act)]
    return nn.Sequential(nn.Conv2d(3, 5, 1), *layers, head(5)), (image(),)


@in_the_zoo
def mixture_of_kernels():
    class Net(nn.Module):
        """Convolutions with a weight that is a mixture, drawn up for each image."""

        def __init__(self):
            super().__init__()
            self.first, self.head = conv(3, 6), head(8)
            self.route, self.kernels = (
                nn.Linear(6, 4),
                nn.Parameter(torch.ones(4, 8, 6, 3, 3)),
            )

        def forward(self, x):
            x = self.first(x)
            b, c, h, w = x.shape
            route = self.route(x.mean((2, 3))).sigmoid()
            kernels = (route @ self.kernels.flatten(1)).view(b * 8, c, 3, 3)
            y = F.conv2d(x.reshape(1, b * c, h, w), kernels, groups=b, padding=1)
            return self.head(y.view(b, 8, h, w).relu())

    return Net(), (image(),)
