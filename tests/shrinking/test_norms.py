"""Norms and means: fixed, or counted."""

import pytest
from torch import nn

from tests.shrinking.small import conv, lin, told

# A network, its groups, and why the rest stays.
CASES = {
    "layer norm": (
        lambda: lin(lambda net, x: net.b(net.n(net.a(x))), n=nn.LayerNorm(4)),
        [],
        {
            "layer_norm at 'n' takes its mean": (
                "a.weight[0], a.bias[0], n.weight[0], n.bias[0]"
            )
        },
    ),
    "layer norm, counted": (
        lambda: lin(lambda net, x: net.b(net.n(net.a(x))), n=nn.LayerNorm(4)),
        ["a.weight[0], a.bias[0], b.weight[1], n.weight[0], n.bias[0]"],
        {},
    ),
    "rms norm": (
        lambda: lin(lambda net, x: net.b(net.n(net.a(x))), n=nn.RMSNorm(4)),
        [],
        {"rms_norm at 'n' takes its mean": "a.weight[0], a.bias[0], n.weight[0]"},
    ),
    "rms norm, counted": (
        lambda: lin(lambda net, x: net.b(net.n(net.a(x))), n=nn.RMSNorm(4)),
        ["a.weight[0], a.bias[0], b.weight[1], n.weight[0]"],
        {},
    ),
    "group norm": (
        lambda: conv(lambda net, x: net.b(net.n(net.a(x))), n=nn.GroupNorm(2, 4)),
        [
            (
                "a.weight[0] (blocks of 2), a.bias[0] (blocks of 2), b.weight[1] "
                "(blocks of 2), n.weight[0] (blocks of 2), n.bias[0] (blocks of 2)"
            )
        ],
        {},
    ),
    "group norm, counted": (
        lambda: conv(lambda net, x: net.b(net.n(net.a(x))), n=nn.GroupNorm(2, 4)),
        [
            (
                "a.weight[0] (blocks of 2), a.bias[0] (blocks of 2), b.weight[1] "
                "(blocks of 2), n.weight[0] (blocks of 2), n.bias[0] (blocks of 2)"
            ),
            (
                "a.weight[0] (blocks of 1 in 2 parts), a.bias[0] (blocks of 1 in 2 "
                "parts), b.weight[1] (blocks of 1 in 2 parts), n.weight[0] (blocks of "
                "1 in 2 parts), n.bias[0] (blocks of 1 in 2 parts)"
            ),
        ],
        {},
    ),
    "batch norm": (
        lambda: conv(lambda net, x: net.b(net.n(net.a(x))), n=nn.BatchNorm2d(4)),
        [
            "a.weight[0], a.bias[0], b.weight[1], n.weight[0], n.bias[0], "
            "n.running_mean[0] and 1 more"
        ],
        {},
    ),
    "batch norm without weights": (
        lambda: conv(
            lambda net, x: net.b(net.n(net.a(x))), n=nn.BatchNorm2d(4, affine=False)
        ),
        ["a.weight[0], a.bias[0], b.weight[1], n.running_mean[0], n.running_var[0]"],
        {},
    ),
    "batch norm of an input": (
        lambda: conv(lambda net, x: net.b(net.a(net.n(x))), n=nn.BatchNorm2d(3)),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {"batch_norm at 'n' mixes its entries": "n.weight[0], n.bias[0]"},
    ),
    "mean": (
        lambda: lin(lambda net, x: net.b(net.a(x)) * net.a(x).mean(1, True)),
        [],
        {"mean takes its mean": "a.weight[0], a.bias[0], b.weight[1]"},
    ),
    "mean, counted": (
        lambda: lin(lambda net, x: net.b(net.a(x)) * net.a(x).mean(1, True)),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "mean of sigmoid": (
        lambda: lin(lambda net, x: net.b(net.a(x)) * net.a(x).sigmoid().mean(1, True)),
        [],
        {"mean takes its mean": "a.weight[0], a.bias[0], b.weight[1]"},
    ),
    "mean of sigmoid, counted": (
        lambda: lin(lambda net, x: net.b(net.a(x)) * net.a(x).sigmoid().mean(1, True)),
        [],
        {
            "mean takes its mean, and it is not 0 where it is masked": (
                "a.weight[0], a.bias[0], b.weight[1]"
            )
        },
    ),
    "mean of pixels": (
        lambda: conv(lambda net, x: net.b(net.a(x).mean((2, 3), True))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build, counted="counted" in name) == (groups, stays)
