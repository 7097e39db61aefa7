"""Recurrent layers: all gates of a hidden unit go together."""

import pytest
from torch import nn

from tests.shrinking.small import TOKENS, Of, told, weight

# A network, its groups, and why the rest stays.
CASES = {
    "lstm": (
        lambda: (
            Of(
                lambda net, x: net.b(net.r(net.a(x))[0]),
                a=nn.Linear(3, 4),
                r=nn.LSTM(4, 6, batch_first=True),
                b=nn.Linear(6, 2),
            ),
            TOKENS,
        ),
        [
            "a.weight[0], a.bias[0], r.weight_ih_l0[1]",
            (
                "r.weight_ih_l0[0] (blocks of 1 in 4 parts), r.weight_hh_l0[0] "
                "(blocks of 1 in 4 parts), r.weight_hh_l0[1], r.bias_ih_l0[0] (blocks "
                "of 1 in 4 parts), r.bias_hh_l0[0] (blocks of 1 in 4 parts), "
                "b.weight[1]"
            ),
        ],
        {},
    ),
    "gru two": (
        lambda: (
            Of(
                lambda net, x: net.b(net.r(net.a(x))[0]),
                a=nn.Linear(3, 4),
                r=nn.GRU(4, 6, 2, batch_first=True, bidirectional=True),
                b=nn.Linear(12, 2),
            ),
            TOKENS,
        ),
        [
            "a.weight[0], a.bias[0], r.weight_ih_l0[1], r.weight_ih_l0_reverse[1]",
            (
                "r.weight_ih_l0[0] (blocks of 1 in 3 parts), r.weight_hh_l0[0] "
                "(blocks of 1 in 3 parts), r.weight_hh_l0[1], r.bias_ih_l0[0] (blocks "
                "of 1 in 3 parts), r.bias_hh_l0[0] (blocks of 1 in 3 parts), "
                "r.weight_ih_l0_reverse[0] (blocks of 1 in 3 parts) and 17 more"
            ),
        ],
        {},
    ),
    "rnn": (
        lambda: (
            Of(
                lambda net, x: net.b(net.r(net.a(x))[1][0]),
                a=nn.Linear(3, 4),
                r=nn.RNN(4, 6, bias=False),
                b=nn.Linear(6, 2),
            ),
            TOKENS,
        ),
        [
            "a.weight[0], a.bias[0], r.weight_ih_l0[1]",
            "r.weight_ih_l0[0], r.weight_hh_l0[0], r.weight_hh_l0[1], b.weight[1]",
        ],
        {},
    ),
    "rnn relu state": (
        lambda: (
            Of(
                lambda net, x: net.b(net.r(net.a(x), net.h.expand(1, 5, 6))[0]),
                a=nn.Linear(3, 4),
                r=nn.RNN(4, 6, nonlinearity="relu"),
                b=nn.Linear(6, 2),
                h=weight(6),
            ),
            TOKENS,
        ),
        [
            (
                "h[0], r.weight_ih_l0[0], r.weight_hh_l0[0], r.weight_hh_l0[1], "
                "r.bias_ih_l0[0], r.bias_hh_l0[0] and 1 more"
            ),
            "a.weight[0], a.bias[0], r.weight_ih_l0[1]",
        ],
        {},
    ),
    "lstm proj": (
        lambda: (
            Of(
                lambda net, x: net.b(net.r(net.a(x))[0]),
                a=nn.Linear(3, 4),
                r=nn.LSTM(4, 6, proj_size=5),
                b=nn.Linear(5, 2),
            ),
            TOKENS,
        ),
        [],
        {
            "lstm at 'r' mixes its entries": (
                "a.weight[0], a.bias[0], r.weight_ih_l0[0], r.weight_ih_l0[1], "
                "r.weight_hh_l0[0], r.weight_hh_l0[1], r.bias_ih_l0[0], "
                "r.bias_hh_l0[0], r.weight_hr_l0[0], r.weight_hr_l0[1]"
            )
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)
