"""Moves of data: each dimension of an output has the channels of what it is read from.
Tables and indices: what any input may ask for stays."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsefn as sf
from tests.shrinking.small import MAP, Of, conv, lin, told

# A network, its groups, and why the rest stays.
CASES = {
    "transposed": (
        lambda: lin(lambda net, x: net.b(net.a(x).T.T)),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "halves": (
        lambda: lin(
            lambda net, x: net.b(net.a(x).view(-1, 2, 3).transpose(1, 2).flatten(1)), 6
        ),
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
    "cat": (
        lambda: lin(
            lambda net, x: net.b(torch.cat([net.a(x), net.c(x)], 1)),
            4,
            6,
            c=nn.Linear(3, 2),
        ),
        [
            "a.weight[0], a.bias[0], b.weight[1] (4 of 6)",
            "b.weight[1] (2 of 6), c.weight[0], c.bias[0]",
        ],
        {},
    ),
    "slice": (
        lambda: lin(lambda net, x: net.b(net.a(x)[:, 1:3]), 4, 2),
        [
            "a.weight[0] (2 of 4), a.bias[0] (2 of 4)",
            "a.weight[0] (2 of 4), a.bias[0] (2 of 4), b.weight[1]",
        ],
        {},
    ),
    "step slice": (
        lambda: lin(lambda net, x: net.b(net.a(x)[:, ::2]), 4, 2),
        [
            "a.weight[0] (2 of 4), a.bias[0] (2 of 4), b.weight[1]",
            "a.weight[0] (2 of 4), a.bias[0] (2 of 4)",
        ],
        {},
    ),
    "flip": (
        lambda: lin(lambda net, x: net.b(net.a(x).flip(1))),
        ["a.weight[0], a.bias[0], b.weight[1] (4 of 4)"],
        {},
    ),
    "x + flip": (
        lambda: lin(lambda net, x: net.b(net.a(x) + net.a(x).flip(1))),
        ["a.weight[0] (4 of 4), a.bias[0] (4 of 4), b.weight[1] (4 of 4)"],
        {},
    ),
    "chunk": (
        lambda: lin(lambda net, x: net.b(torch.mul(*net.a(x).chunk(2, 1))), 4, 2),
        [
            (
                "a.weight[0] (blocks of 1 in 2 parts), a.bias[0] (blocks of 1 in 2 "
                "parts), b.weight[1]"
            )
        ],
        {},
    ),
    "pad": (
        lambda: lin(lambda net, x: net.b(F.pad(net.a(x), (1, 1))), 4, 6),
        ["a.weight[0], a.bias[0], b.weight[1] (4 of 6)"],
        {},
    ),
    "pad of sides": (
        lambda: conv(lambda net, x: net.b(F.pad(net.a(x), (1, 1, 0, 2)))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "pad of sides with ones": (
        lambda: conv(lambda net, x: net.b(F.pad(net.a(x), (1, 1), value=1.0))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "less of sides": (
        lambda: conv(lambda net, x: net.b(F.pad(net.a(x), (-1, -1), value=1.0))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "reflected sides": (
        lambda: conv(lambda net, x: net.b(F.pad(net.a(x), (1, 1, 1, 1), "reflect"))),
        ["a.weight[0], a.bias[0], b.weight[1]"],
        {},
    ),
    "expand": (
        lambda: lin(lambda net, x: net.b(net.a(x).sum(1, True).expand(-1, 4))),
        ["a.weight[0], a.bias[0]", "b.weight[1]"],
        {},
    ),
    "cat of ones": (
        lambda: lin(
            lambda net, x: net.b(
                torch.cat([net.a(x).sum(1, True), net.a(x).amax(1, True)], 1)
            ),
            4,
            2,
        ),
        [],
        {"amax mixes its entries": "a.weight[0], a.bias[0]"},
    ),
    "repeat": (
        lambda: lin(lambda net, x: net.b(net.a(x).repeat(1, 2)), 4, 8),
        ["a.weight[0], a.bias[0], b.weight[1] (blocks of 1 in 2 parts)"],
        {},
    ),
    "unbind": (
        lambda: lin(
            lambda net, x: net.b(torch.mul(*net.a(x).view(-1, 2, 2).unbind(1))), 4, 2
        ),
        [
            (
                "a.weight[0] (blocks of 1 in 2 parts), a.bias[0] (blocks of 1 in 2 "
                "parts), b.weight[1]"
            )
        ],
        {},
    ),
    "select": (
        lambda: lin(lambda net, x: net.b(net.a(x) * net.a(x)[:, :1])),
        ["a.weight[0] (3 of 4), a.bias[0] (3 of 4), b.weight[1] (3 of 4)"],
        {},
    ),
    "pixel shuffle": (
        lambda: (
            Of(
                lambda net, x: net.b(F.pixel_shuffle(net.a(x), 2)),
                a=nn.Conv2d(3, 8, 1),
                b=nn.Conv2d(2, 2, 1),
            ),
            MAP,
        ),
        ["a.weight[0] (blocks of 4), a.bias[0] (blocks of 4), b.weight[1]"],
        {},
    ),
    "roll": (
        lambda: lin(lambda net, x: net.b(net.a(x).roll(1, 1))),
        ["a.weight[0], a.bias[0], b.weight[1] (4 of 4)"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)


# A network, its groups, and why the rest stays.
LOOKUPS_CASES = {
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


@pytest.mark.parametrize("name", LOOKUPS_CASES)
def test_what_goes_together_and_what_stays_by_lookups(name):
    build, groups, stays = LOOKUPS_CASES[name]
    assert told(build) == (groups, stays)


class Positions(nn.Module):
    """Tables that are cut to the tokens of an input, and a weight in two pieces."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(9, 4))
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.out = nn.Linear(6, 3)
        causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, x):
        n = x.shape[1]
        x = x + self.position[torch.arange(n)] + self.position[:n]
        first = F.linear(x, self.weight[:2])
        second = F.linear(x, self.weight[2:])
        mixed = torch.where(self.causal[:, :n, :n], x @ x.mT, 0.0) @ second
        return self.out(torch.cat([first, mixed], -1))


@pytest.mark.parametrize("form", ["class", "program"])
def test_tables_keep_the_rows_that_larger_inputs_read(form):
    torch.manual_seed(0)
    net = Positions().eval()
    x = torch.randn(2, 5, 4)
    assert len(sf.shrinking.groups(net, x)) == 1  # rows of the weight
    masks = {path: torch.ones_like(p) > 0 for path, p in net.named_parameters()}
    masks["weight"][3] = False
    state = sf.State(sf.modules.params_of(net), masks)
    small = sf.shrinking.smaller(net, state, x, form=form).module
    assert small.weight.shape == (5, 4) and small.position.shape == (9, 4)
    longer = torch.randn(2, 8, 4)
    wanted = sf.modules.call(net, state, longer)
    torch.testing.assert_close(small(longer), wanted)
