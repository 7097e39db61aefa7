"""Which slices of results are constant, found by running.
Operations that are tried, elementwise ones, and which slices of their results are
0."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking import probe
from tests.shrinking.small import VECTOR, Of, analysed, conv, lin, told, weight

nan = np.nan


def test_draws_are_of_many_sizes_and_both_signs():
    made = probe.many_sizes(1000)
    assert made.dtype == torch.float64 and made.shape == (8, 1000)
    assert (made[0] > 0).all() and (made[1] < 0).all() and not made[-1].any()
    assert made[0].min() < 1e-5 and made[0].max() > 1e5
    assert torch.equal(made, probe.many_sizes(1000))


def test_arguments_in_double():
    given = {"dtype": torch.float16, "device": torch.device("meta"), "dim": 1}
    assert probe.in_double(given) == {
        "dtype": torch.float64,
        "device": None,
        "dim": 1,
    }
    assert probe.in_double({"dtype": torch.int32}) == {"dtype": torch.int32}
    assert given["dtype"] == torch.float16


# Of a layer with weights that are masked in row 0 and a bias of (1, -1, 2, -2): what
# the result is in each column.
FUNCTIONS = {
    "relu": (lambda net, x: net.b(net.a(x).relu()), [1, nan]),
    "sign": (lambda net, x: net.b(net.a(x).sign()), [1, nan]),
    "x - x": (lambda net, x: net.b(net.a(x) - net.a(x)), [0, nan]),
    "0 * x": (lambda net, x: net.b(net.a(x) * 0.0), [0, 0]),
    "x / 0": (lambda net, x: net.b(net.a(x) / 0.0), [nan, nan]),
    "log of -x": (lambda net, x: net.b((-net.a(x)).log()), [nan, nan]),
    "scaled": (lambda net, x: net.b(2 * net.a(x) + 3), [5, nan]),
    "times what varies": (lambda net, x: net.b(net.a(x) * x[:, :1]), [nan, nan]),
    "tiny": (lambda net, x: net.b((net.a(x) * 1e-9).clamp(-1, 1)), [1e-9, nan]),
    "a threshold": (
        lambda net, x: net.b(torch.where(net.a(x) > 1e5, 1.0, 0.0)),
        [nan, nan],
    ),
    "softmax": (lambda net, x: net.b(net.a(x).softmax(1)), [nan, nan]),
    "batch norm": (
        lambda net, x: net.b(
            F.batch_norm(net.a(x), torch.ones(4), torch.ones(4), eps=0.0) + 2
        ),
        [2, nan],
    ),
    "batch norm by its own mean": (
        lambda net, x: net.b(
            F.batch_norm(net.a(x), net.a(x).amax(0), torch.ones(4), eps=0.0)
        ),
        [0, nan],
    ),
    "pad of ones": (
        lambda net, x: net.b(F.pad(net.a(x)[:, :, None], (1, 0), value=1.0)[:, :, 1]),
        [1, nan],
    ),
    "pad of others": (
        lambda net, x: net.b(F.pad(net.a(x)[:, :, None], (1, 0), value=2.0)[:, :, 1]),
        [nan, nan],
    ),
    "exp of a cast": (lambda net, x: net.b(net.a(x).half().float().exp()), [np.e, nan]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_constants_of_a_result(name):
    fn, wanted = FUNCTIONS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = lin(fn)
    net.a.bias.data = torch.tensor([1.0, -1.0, 2.0, -2.0])
    masks = {"a.weight": torch.arange(4)[:, None].expand(4, 3) > 0}
    analysis = analysed(net, x, masks=masks)
    read = [
        node for node in analysis.graph.graph.nodes if node.name.startswith("linear")
    ][-1].args[0]
    gone = analysis.values[read].constants[-1]
    got = [nan, nan] if gone is None else gone[:2]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (lambda y: y.softmax(1), nan),
        (lambda y: y.logsumexp(1), nan),
        (lambda y: y.cumsum(1), nan),
        (lambda y: y.cummax(1)[0], 1),
    ],
)
def test_what_depends_on_a_length_is_no_constant(length, fn, wanted):
    net, _ = lin(lambda net, x: net.b(fn(net.a(x))))
    net.a.bias.data = torch.tensor([1.0, -1.0, 2.0, -2.0])
    masks = {"a.weight": torch.arange(4)[:, None].expand(4, 3) > 0}
    analysis = analysed(net, torch.randn(2, length, 3), masks=masks)
    read = [
        node for node in analysis.graph.graph.nodes if node.name.startswith("linear")
    ][-1].args[0]
    gone = analysis.values[read].constants[-1]
    np.testing.assert_allclose([nan, nan] if gone is None else gone[:2], [wanted, nan])


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
