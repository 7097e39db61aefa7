"""Products: what is summed over has to be 0 where it goes.
Linear layers and convolutions: which dimensions go together.
Recurrent layers: all gates of a hidden unit go together."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.small import MAP, TOKENS, VECTOR, Of, lin, told, weight

# A network, its groups, and why the rest stays.
CASES = {
    "matmul": (
        lambda: (
            Of(
                lambda net, x: (x @ net.w).relu() @ net.u,
                w=weight(3, 4),
                u=weight(4, 2),
            ),
            VECTOR,
        ),
        ["w[1], u[0]"],
        {},
    ),
    "einsum": (
        lambda: (
            Of(
                lambda net, x: torch.einsum(
                    "bi,io->bo", torch.einsum("bi,oi->bo", x, net.w).tanh(), net.u
                ),
                w=weight(4, 3),
                u=weight(4, 2),
            ),
            VECTOR,
        ),
        ["w[0], u[0]"],
        {},
    ),
    "gram": (
        lambda: lin(lambda net, x: net.a(x) @ net.c(x).T, c=nn.Linear(3, 4)),
        ["a.weight[0], a.bias[0], c.weight[0], c.bias[0]"],
        {},
    ),
    "gram of sigmoids": (
        lambda: lin(
            lambda net, x: net.a(x).sigmoid() @ net.c(x).sigmoid().T, c=nn.Linear(3, 4)
        ),
        [],
        {
            "matmul sums over it, and it is not 0 where it is masked": (
                "a.weight[0], a.bias[0], c.weight[0], c.bias[0]"
            )
        },
    ),
    "bilinear": (
        lambda: (
            Of(
                lambda net, x: net.b(net.a(x), net.c(x)),
                a=nn.Linear(3, 4),
                c=nn.Linear(3, 5),
                b=nn.Bilinear(4, 5, 2),
            ),
            VECTOR,
        ),
        ["a.weight[0], a.bias[0], b.weight[1]", "c.weight[0], c.bias[0], b.weight[2]"],
        {},
    ),
    "attention": (
        lambda: (
            Of(
                lambda net, x: net.o(
                    F.scaled_dot_product_attention(
                        *(
                            f(x).view(2, 5, 2, 4).transpose(1, 2)
                            for f in (net.q, net.k, net.v)
                        )
                    )
                    .transpose(1, 2)
                    .flatten(2)
                ),
                q=nn.Linear(3, 8),
                k=nn.Linear(3, 8),
                v=nn.Linear(3, 8),
                o=nn.Linear(8, 2),
            ),
            TOKENS,
        ),
        [
            (
                "q.weight[0] (blocks of 4), q.bias[0] (blocks of 4), k.weight[0] "
                "(blocks of 4), k.bias[0] (blocks of 4), v.weight[0] (blocks of 4), "
                "v.bias[0] (blocks of 4) and 1 more"
            ),
            (
                "q.weight[0] (blocks of 1 in 2 parts), q.bias[0] (blocks of 1 in 2 "
                "parts), k.weight[0] (blocks of 1 in 2 parts), k.bias[0] (blocks of 1 "
                "in 2 parts)"
            ),
            (
                "v.weight[0] (blocks of 1 in 2 parts), v.bias[0] (blocks of 1 in 2 "
                "parts), o.weight[1] (blocks of 1 in 2 parts)"
            ),
        ],
        {},
    ),
    "grouped queries": (
        lambda: (
            Of(
                lambda net, x: net.o(
                    F.scaled_dot_product_attention(
                        net.q(x).view(2, 5, 4, 2).transpose(1, 2),
                        net.k(x).view(2, 5, 2, 2).transpose(1, 2),
                        net.v(x).view(2, 5, 2, 2).transpose(1, 2),
                        enable_gqa=True,
                    )
                    .transpose(1, 2)
                    .flatten(2)
                ),
                q=nn.Linear(3, 8),
                k=nn.Linear(3, 4),
                v=nn.Linear(3, 4),
                o=nn.Linear(8, 2),
            ),
            TOKENS,
        ),
        [
            (
                "q.weight[0] (blocks of 1 in 4 parts), q.bias[0] (blocks of 1 in 4 "
                "parts), k.weight[0] (blocks of 1 in 2 parts), k.bias[0] (blocks of 1 "
                "in 2 parts)"
            ),
            (
                "q.weight[0] (blocks of 4), q.bias[0] (blocks of 4), k.weight[0] "
                "(blocks of 2), k.bias[0] (blocks of 2), v.weight[0] (blocks of 2), "
                "v.bias[0] (blocks of 2) and 1 more"
            ),
            (
                "v.weight[0] (blocks of 1 in 2 parts), v.bias[0] (blocks of 1 in 2 "
                "parts), o.weight[1] (blocks of 1 in 4 parts)"
            ),
            (
                "q.weight[0] (blocks of 2 in 2 parts), q.bias[0] (blocks of 2 in 2 "
                "parts), o.weight[1] (blocks of 2 in 2 parts)"
            ),
        ],
        {},
    ),
    "addmm": (
        lambda: (
            Of(
                lambda net, x: torch.addmm(
                    net.d, torch.addmm(net.c, x, net.w).relu(), net.u
                ),
                w=weight(3, 4),
                c=weight(4),
                u=weight(4, 2),
                d=weight(2),
            ),
            VECTOR,
        ),
        ["w[1], c[0], u[0]"],
        {},
    ),
    "scaled addmm": (
        lambda: (
            Of(
                lambda net, x: torch.addmm(
                    net.d, torch.addmm(net.c, x, net.w, beta=2.0).relu(), net.u
                ),
                w=weight(3, 4),
                c=weight(4),
                u=weight(4, 2),
                d=weight(2),
            ),
            VECTOR,
        ),
        ["w[1], c[0], u[0]"],
        {},
    ),
}


# A network, its groups, and why the rest stays.
LAYERS_CASES = {
    "grouped": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1),
                nn.Conv2d(4, 6, 3, padding=1, groups=2),
                nn.Conv2d(6, 2, 1),
            ),
            MAP,
        ),
        [
            (
                "0.weight[0] (blocks of 1 in 2 parts), 0.bias[0] (blocks of 1 in 2 "
                "parts), 1.weight[1]"
            ),
            (
                "0.weight[0] (blocks of 2), 0.bias[0] (blocks of 2), 1.weight[0] "
                "(blocks of 3), 1.bias[0] (blocks of 3), 2.weight[1] (blocks of 3)"
            ),
            (
                "1.weight[0] (blocks of 1 in 2 parts), 1.bias[0] (blocks of 1 in 2 "
                "parts), 2.weight[1] (blocks of 1 in 2 parts)"
            ),
        ],
        {"conv2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "depthwise": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 2, 1)
            ),
            MAP,
        ),
        [
            (
                "0.weight[0], 0.bias[0], 1.weight[0] (blocks of 2), 1.bias[0] (blocks "
                "of 2), 2.weight[1] (blocks of 2)"
            ),
            (
                "1.weight[0] (blocks of 1 in 4 parts), 1.bias[0] (blocks of 1 in 4 "
                "parts), 2.weight[1] (blocks of 1 in 4 parts)"
            ),
        ],
        {"conv2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "transposed conv": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 2), nn.Conv2d(6, 2, 1)
            ),
            MAP,
        ),
        ["0.weight[0], 0.bias[0], 1.weight[0]", "1.weight[1], 1.bias[0], 2.weight[1]"],
        {"conv_transpose2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "grouped transposed": (
        lambda: (
            nn.Sequential(
                nn.Conv2d(3, 4, 1),
                nn.ConvTranspose2d(4, 6, 2, groups=2),
                nn.Conv2d(6, 2, 1),
            ),
            MAP,
        ),
        [
            (
                "1.weight[1], 1.bias[0] (blocks of 1 in 2 parts), 2.weight[1] (blocks "
                "of 1 in 2 parts)"
            ),
            (
                "0.weight[0] (blocks of 2), 0.bias[0] (blocks of 2), 1.weight[0] "
                "(blocks of 2), 1.bias[0] (blocks of 3), 2.weight[1] (blocks of 3)"
            ),
            (
                "0.weight[0] (blocks of 1 in 2 parts), 0.bias[0] (blocks of 1 in 2 "
                "parts), 1.weight[0] (blocks of 1 in 2 parts)"
            ),
        ],
        {"conv_transpose2d at '1' mixes its entries": "1.weight[2], 1.weight[3]"},
    ),
    "conv1d": (
        lambda: (
            nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU(), nn.Conv1d(4, 2, 1)),
            torch.randn(2, 3, 5),
        ),
        ["0.weight[0], 0.bias[0], 2.weight[1]"],
        {},
    ),
}


# A network, its groups, and why the rest stays.
RECURRENT_CASES = {
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


EVERY_CASE = CASES | LAYERS_CASES | RECURRENT_CASES


def test_each_case_has_a_name_of_its_own():
    assert len(EVERY_CASE) == len(CASES) + len(LAYERS_CASES) + len(RECURRENT_CASES)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = EVERY_CASE[name]
    assert told(build) == (groups, stays)
