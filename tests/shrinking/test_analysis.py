"""The analysis of whole programs: writes, constants and operations of other kinds."""

import pytest
import torch
from torch.nn import functional as F

from tests.shrinking.small import conv, lin, told

# A network, its groups, and why the rest stays.
CASES = {
    "written": (
        lambda: lin(lambda net, x: net.b(net.a(x).relu_().add_(1))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "alias": (
        lambda: lin(
            lambda net, x: (lambda h: (h.view(-1).clamp_(-0.1, 0.1), net.b(h))[1])(
                net.a(x)
            )
        ),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "zeros": (
        lambda: lin(
            lambda net, x: net.b(torch.cat([net.a(x), torch.zeros(2, 4)], 1)), 4, 8
        ),
        ["a.weight[0], a.bias[0], b.weight[1] (4 of 8)", "b.weight[1] (4 of 8)"],
        {},
    ),
    "dropout": (
        lambda: lin(lambda net, x: net.b(F.dropout(net.a(x), 0.5, False))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "shuffle": (
        lambda: conv(lambda net, x: net.b(F.channel_shuffle(net.a(x), 2)), 6),
        [
            (
                "a.weight[0] (blocks of 3), a.bias[0] (blocks of 3), b.weight[1] "
                "(blocks of 1 in 3 parts)"
            ),
            (
                "a.weight[0] (blocks of 1 in 2 parts), a.bias[0] (blocks of 1 in 2 "
                "parts), b.weight[1] (blocks of 2)"
            ),
        ],
        {},
    ),
    "cond": (
        lambda: lin(
            lambda net, x: torch.cond(
                x.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (net.a(x),)
            )
        ),
        [],
        {"cond is a program of its own": "a.weight[0], a.bias[0]"},
    ),
    "arange": (lambda: lin(lambda net, x: net.b(net.a(x) + torch.arange(4.0))), [], {}),
    "output both": (
        lambda: lin(lambda net, x: (net.a(x)[:, :2], net.b(net.a(x)))),
        ["a.weight[0] (2 of 4), a.bias[0] (2 of 4), b.weight[1] (2 of 4)"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)
