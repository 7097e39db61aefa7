"""Operations that are tried, elementwise ones, and which slices of their results are
0.
"""

import pytest
from torch import nn
from torch.nn import functional as F

from tests.shrinking.small import VECTOR, Of, conv, lin, told, weight

# A network, its groups, and why the rest stays.
CASES = {
    "add": (
        lambda: lin(lambda net, x: net.b(net.a(x) + net.c(x)), c=nn.Linear(3, 4)),
        ["a.weight[0], a.bias[0], b.weight[1], c.weight[0], c.bias[0]"],
        {},
    ),
    "sigmoid": (
        lambda: lin(lambda net, x: net.b(net.a(x).sigmoid())),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "cos nobias": (
        lambda: (
            Of(
                lambda net, x: net.b(net.a(x).cos()),
                a=nn.Linear(3, 4),
                b=nn.Linear(4, 2, bias=False),
            ),
            VECTOR,
        ),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "sum of sigmoid": (
        lambda: lin(
            lambda net, x: net.b(net.a(x).sigmoid()) * net.a(x).sigmoid().sum(1, True)
        ),
        [],
        {"sum mixes its entries": "a.weight[0], a.bias[0], b.weight[1]"},
    ),
    "sum of tanh": (
        lambda: lin(
            lambda net, x: net.b(net.a(x).tanh()) * net.a(x).tanh().sum(1, True)
        ),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "scale": (
        lambda: lin(lambda net, x: net.b(net.a(x) * net.s), s=weight(4)),
        ["s[0], a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "softmax": (
        lambda: lin(lambda net, x: net.b(net.a(x).softmax(1))),
        [],
        {"softmax mixes its entries": "a.weight[0], a.bias[0]"},
    ),
    "batch norm": (
        lambda: lin(lambda net, x: net.b(net.n(net.a(x))), n=nn.BatchNorm1d(4)),
        [
            (
                "a.weight[0], a.bias[0], b.weight[1], n.weight[0], n.bias[0], "
                "n.running_mean[0] and 1 more"
            )
        ],
        {},
    ),
    "max pool": (
        lambda: conv(lambda net, x: net.b(F.max_pool2d(net.a(x), 2))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "cumsum": (
        lambda: lin(lambda net, x: net.b(net.a(x).cumsum(1))),
        [],
        {"cumsum mixes its entries": "a.weight[0], a.bias[0]"},
    ),
    "norm": (
        lambda: lin(
            lambda net, x: net.b(net.a(x)) / net.a(x).norm(dim=1, keepdim=True)
        ),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "upsample": (
        lambda: conv(lambda net, x: net.b(F.interpolate(net.a(x), scale_factor=2))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "instance norm": (
        lambda: conv(lambda net, x: net.b(F.instance_norm(net.a(x)))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "topk": (
        lambda: lin(lambda net, x: net.b(net.a(x).topk(4, 1).values)),
        [],
        {"topk mixes its entries": "a.weight[0], a.bias[0]"},
    ),
    "prelu": (
        lambda: lin(lambda net, x: net.b(net.p(net.a(x))), p=nn.PReLU(4)),
        ["a.weight[0], a.bias[0], b.weight[1], p.weight[0]"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)
