"""The analysis of whole programs: writes, constants and operations of other kinds.
Cuts: sizes, tensors, one that stays, and biases that take in constants."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.plan import PruningPlan, folded_biases, free, one_stays
from tests.shrinking.small import VECTOR, analysed, conv, lin, told

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


NET = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval()


def rows(*gone):
    return {
        "0.weight": torch.tensor([i not in gone for i in range(4)])[:, None].expand(
            4, 3
        )
    }


def test_sizes_and_tensors():
    analysis = analysed(NET, VECTOR)
    alive = np.ones(analysis.log.channels.count, bool)
    alive[analysis.log.channels.resolve(analysis.leaves["0.bias"].labels[0])[1:3]] = (
        False
    )
    cut = PruningPlan(analysis, alive)
    assert [cut.size(analysis.leaves[f"{i}.weight"]) for i in (0, 1)] == [
        [2, 3],
        [2, 2],
    ]
    assert cut.kept(None, 3).tolist() == [True] * 3
    assert cut.kept(analysis.leaves["1.weight"].labels[1]).tolist() == [
        True,
        False,
        False,
        True,
    ]
    weight = NET[0].weight
    assert torch.equal(cut.take("0.weight", weight), weight[[0, 3]])
    same = cut.take("1.bias", NET[1].bias)
    assert (
        torch.equal(same, NET[1].bias)
        and same.data_ptr() != NET[1].bias.data_ptr()
        and not same.requires_grad
    )
    assert torch.equal(cut.take("no leaf", weight), weight)


def test_one_index_of_each_dimension_stays():
    analysis = analysed(NET, VECTOR)
    cut = free(analysis)
    assert cut.size(analysis.leaves["0.weight"]) == [1, 3]
    assert cut.kept(analysis.leaves["1.weight"].labels[1]).tolist() == [
        True,
        False,
        False,
        False,
    ]
    again = one_stays(cut)
    assert np.array_equal(again.alive, cut.alive)


def test_masks_say_what_is_free():
    net, x = lin(lambda net, x: net.b(net.a(x).softmax(1)))
    analysis = analysed(net, x, masks={"a.weight": torch.zeros(4, 3, dtype=torch.bool)})
    assert free(analysis).size(analysis.leaves["a.weight"]) == [4, 3]
    analysis = analysed(NET, VECTOR, masks=rows(0, 2))
    assert free(analysis).kept(analysis.leaves["0.weight"].labels[0]).tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_folded_biases_are_exact_sums_in_float64():
    params = dict(NET.named_parameters())
    cut = free(analysed(NET, VECTOR, masks=rows(0, 2)))
    (bias,) = folded_biases(cut, params).values()
    wanted = (
        params["1.bias"].double()
        + params["1.weight"].double()[:, [0, 2]] @ params["0.bias"].double()[[0, 2]]
    )
    torch.testing.assert_close(bias, wanted, rtol=0, atol=1e-15)
    assert folded_biases(free(analysed(NET, VECTOR, masks=rows())), params) == {}
    # nothing goes: nothing is taken in
    whole = PruningPlan(cut.analysis, np.ones_like(cut.alive))
    assert folded_biases(whole, params) == {}
