"""Products: what is summed over has to be 0 where it goes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.small import TOKENS, VECTOR, Of, lin, told, weight

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


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_and_what_stays(name):
    build, groups, stays = CASES[name]
    assert told(build) == (groups, stays)
