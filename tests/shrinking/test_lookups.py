"""Tables and indices: what any input may ask for stays."""

import pytest
import torch
from torch import nn

from tests.shrinking.small import lin, told

# A network, its groups, and why the rest stays.
CASES = {
    "embedding": (
        lambda: (
            nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)),
            torch.tensor([[1, 2]]),
        ),
        ["0.weight[1], 1.weight[1]"],
        {"embedding at '0' looks up any of its rows": "0.weight[0]"},
    ),
    "index buffer": (
        lambda: lin(
            lambda net, x: net.b(net.a(x)[:, net.i]), i=torch.tensor([2, 0, 3, 1])
        ),
        ["a.weight[0], a.bias[0], b.weight[1] (4 of 4)"],
        {},
    ),
    "index select": (
        lambda: lin(
            lambda net, x: net.b(net.a(x).index_select(1, net.i)),
            4,
            3,
            i=torch.tensor([2, 0, 2]),
        ),
        [
            "a.weight[0] (2 of 4), a.bias[0] (2 of 4), b.weight[1] (3 of 3)",
            "a.weight[0] (2 of 4), a.bias[0] (2 of 4)",
        ],
        {},
    ),
    "index of inputs": (
        lambda: lin(lambda net, x: net.b(net.a(x)[:, x[0].argsort()]), 4, 3),
        [],
        {"index looks up any of its entries": "a.weight[0], a.bias[0]"},
    ),
    "gather": (
        lambda: lin(lambda net, x: net.b(net.a(x).gather(1, x.argsort(1))), 4, 3),
        [],
        {"gather mixes its entries": "a.weight[0], a.bias[0]"},
    ),
    "rows": (
        lambda: lin(lambda net, x: net.b(net.a(x))[net.i], i=torch.tensor([0, 0, 1])),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)
