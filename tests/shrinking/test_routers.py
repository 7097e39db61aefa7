"""Copies that never route to some experts: however the router is multiplied, and in
copies of them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparsefn.patterns.places import Place
from sparsefn.shrinking.routers import never_routed

GONE = torch.tensor([False, True, False])


class Router(nn.Module):
    def __init__(self, logits, shape=(3, 4)):
        super().__init__()
        self.logits, self.weight = logits, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.logits(x, self.weight)


def never(model, shape=(3, 4), dim=0):
    return never_routed(model, [(Place("weight", shape, dim=dim, units=3), GONE)])


@pytest.mark.parametrize(
    "logits",
    [
        functional.linear,
        lambda x, w: functional.linear(x, w, torch.ones(3)),
        lambda x, w: x @ w.T,
        lambda x, w: (w @ x.mT).mT,
        lambda x, w: torch.einsum("...i,ei->...e", x, w),
        lambda x, w: functional.linear(x.double(), w.double()).float(),
        lambda x, w: (
            functional.linear(x, w + 0)
            if x.sum() == 0
            else functional.linear(x, w[None][0])
        ),
    ],
)
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_products_with_a_router_give_minus_infinity_of_what_goes(logits, shape):
    model, x = Router(logits), torch.randn(shape)
    copied, seen = never(model)
    for one in (copied, copy.deepcopy(copied), copy.deepcopy(copied).double().float()):
        out = one(x)
        assert out[..., 1].isneginf().all() and seen.products == {"weight"}
        assert torch.allclose(out[..., [0, 2]], model(x)[..., [0, 2]])
    assert model(x).isfinite().all() and "forward" not in vars(model)


def test_a_router_may_be_stored_the_other_way():
    model = Router(lambda x, w: x @ w, (4, 3))
    assert (
        never(model, (4, 3), 1)[0](torch.ones(2, 4)).isinf().tolist()
        == [GONE.tolist()] * 2
    )


def test_of_a_square_one_the_side_of_the_experts_is_told():
    place = [(Place("weight", (3, 3), dim=0, units=3), GONE)]
    copied, _ = never_routed(Router(functional.linear, (3, 3)), place)
    assert copied(torch.ones(2, 3)).isinf().tolist() == [GONE.tolist()] * 2
    copied, seen = never_routed(Router(lambda x, w: x @ w, (3, 3)), place)
    assert copied(torch.ones(2, 3)).isfinite().all() and not seen.products


def test_a_tensor_that_is_computed_from_it_is_none():
    copied, seen = never(Router(lambda x, w: functional.linear(x, w * 2)))
    assert copied(torch.ones(2, 4)).isfinite().all() and not seen.products


def test_it_is_seen_to_how_many_a_token_is_routed():
    copied, seen = never(
        Router(lambda x, w: functional.linear(x, w).softmax(1).topk(2)[0])
    )
    copied(torch.ones(2, 4))
    assert seen.most == {"weight": 2}
