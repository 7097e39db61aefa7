"""The smaller module is compared with the masked one on an example, and refused where it differs."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsefn as sf

NAMES = ("q", "k", "v")
HEADS = sf.tied([*([f"*.{name}.weight", 0, 4] for name in NAMES), ["*.o.weight", 1, 4]])
MLP = sf.tied([["0.weight", 0], ["2.weight", 1]])


class Attention(nn.Module):
    """Keeps the number of its heads in an attribute, or takes it from its tensors."""

    def __init__(self, held, d=32, h=8):
        super().__init__()
        self.shape = (h, d // h) if held else (-1, d // h)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        b, n, _ = x.shape
        middle = -1 if self.shape[0] > 0 else n
        q, k, v = (layer(x).view(b, middle, *self.shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).reshape(b, n, -1))


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def pruned(net, pattern, sparsity=0.5):
    algorithm, params = sf.one_shot(sparsity, pattern=pattern), sf.modules.params_of(net)
    return algorithm.update(algorithm.init(params), params, 0)


def mlp(*more):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), *more)


class Returns(nn.Module):
    """An MLP whose outputs are what `fn` makes of its own."""

    def __init__(self, fn):
        super().__init__()
        self.net, self.fn = mlp(), fn

    def forward(self, *args, **kwargs):
        return self.fn(self, *args, **kwargs)


RETURNED = sf.tied([["net.0.weight", 0], ["net.2.weight", 1]])


def test_heads_need_an_example():
    net = nn.Sequential(Attention(False))
    with pytest.raises(ValueError, match="expected example= for tied.*such as heads: code that keeps their number in"):
        sf.shrink(net, pruned(net, HEADS), only=HEADS)
    fused = sf.tied([["0.weight", 0, 1, 2], ["2.weight", 1]])
    two = nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 4))
    with pytest.raises(ValueError, match="expected example= for tied.*whose units are blocks of rows"):
        sf.shrink(two, pruned(two, fused), only=fused)
    small = sf.shrink(two, pruned(two, fused), only=fused, example=torch.randn(3, 4))
    assert small[0].out_features == 6


def test_heads_held_in_an_attribute_are_refused_with_the_measured_difference():
    x = torch.randn(2, 12, 32)
    right, wrong = (nn.Sequential(Attention(held), Attention(held)) for held in (False, True))
    wrong.load_state_dict(right.state_dict())
    state = pruned(right, HEADS)
    small = sf.shrink(right, state, only=HEADS, example=x)
    torch.testing.assert_close(small(x), sf.modules.call(right, state, x))
    with pytest.raises(
        ValueError,
        match=r"on the example the smaller Sequential gives another output than the masked one, by 7\.\d % of its "
        r"largest value; ten times the rounding is 0\.000\d+ %\. .* leave these units out of only=, or let that",
    ):
        sf.shrink(wrong, state, only=HEADS, example=x)
    with pytest.raises(ValueError, match=r"the smaller Sequential fails on the example: shape '\[2, -1, 8, 4\]' is"):
        sf.shrink(wrong, state, only=HEADS, example=torch.randn(2, 5, 32))


def test_a_tensor_a_tuple_and_a_dict_are_what_the_module_is_called_with():
    net = Returns(lambda self, x, scale=1.0: scale * self.net(x))
    state, x = pruned(net, RETURNED), torch.randn(3, 4)
    for example in (x, (x,), (x, 2.0), {"x": x}, {"x": x, "scale": 2.0}):
        assert sf.shrink(net, state, only=RETURNED, example=example).net[0].out_features == 3
    for example in ([x], "x", {x}, 0):
        with pytest.raises(TypeError, match="a tuple of arguments or a dict of keyword arguments, got [lsi]"):
            sf.shrink(net, state, only=RETURNED, example=example)


@pytest.mark.parametrize("only", [None, [], MLP])
def test_any_way_to_shrink_is_compared(only):
    net, x = mlp(), torch.randn(3, 4)
    assert sf.shrink(net, pruned(net, MLP), only=only, example=x) is not net
    seen = nn.Sequential(Returns(lambda self, x: self.net(x) + self.net[0].weight.numel()))
    ties = sf.tied([["0.net.0.weight", 0], ["0.net.2.weight", 1]])
    with pytest.raises(ValueError, match="gives another output than the masked one"):
        sf.shrink(seen, pruned(seen, ties), only=ties, example=x)


@pytest.mark.parametrize(
    "fn,words",
    [
        (lambda self, x: (self.net(x), [self.net[0](x)]), "gives an output at '1.0' of shape .3, 3. on the"),
        (lambda self, x: {"y": self.net(x), "n": {str(self.net[0].out_features): x}}, r"gives outputs \['y', 'n\.3'\]"),
        (lambda self, x: {"y": self.net(x) * self.net[0].out_features}, "gives another output at 'y' than the masked"),
        (lambda self, x: x / (self.net[0].out_features - 3), "gives another output than the masked one, by inf %"),
        (lambda self, x: self.net(x).argmax(-1), "expected the Returns to return floating-point tensors on the"),
        (lambda self, x: None, "expected the Returns to return floating-point tensors on the example, in tuples or"),
    ],
)
def test_outputs_are_compared_by_path(fn, words):
    net = Returns(fn)
    with pytest.raises(ValueError, match=words):
        sf.shrink(net, pruned(net, RETURNED), only=RETURNED, example=torch.randn(3, 4))


def test_values_that_are_not_finite_agree_with_themselves():
    net = Returns(lambda self, x: (self.net(x) * 0 - math.inf, self.net(x) * math.nan, self.net(x) * 0, x[:0]))
    assert sf.shrink(net, pruned(net, RETURNED), only=RETURNED, example=torch.randn(3, 4)).net[0].out_features == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_bound_the_difference(dtype):
    net, x = mlp().to(dtype), torch.randn(3, 4, dtype=dtype)
    assert sf.shrink(net, pruned(net, MLP), only=MLP, example=x)[0].out_features == 3
    seen = Returns(lambda self, x: self.net(x) * (1 + self.net[0].out_features)).to(dtype)
    with pytest.raises(ValueError, match="gives another output"):
        sf.shrink(seen, pruned(seen, RETURNED), only=RETURNED, example=x)


def test_outputs_without_values_are_refused():
    net = mlp().to("meta")
    params = sf.modules.params_of(net)
    with pytest.raises(ValueError, match="expected an example whose outputs have values to compare, got some on meta"):
        sf.shrink(net, sf.dense().init(params), only=[], example=torch.ones(3, 4, device="meta"))


def test_nothing_is_left_behind():
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        x.mul_(2.0)
        noise = torch.rand(())  # the same for both
        return self.norm(self.net(F.dropout(x, 0.5, self.training))) + noise

    net = Returns(forward)
    net.norm = nn.BatchNorm1d(4)
    state, x = pruned(net, RETURNED), torch.randn(3, 4)
    before, random, given = copy.deepcopy(net.state_dict()), torch.get_rng_state(), x.clone()
    small = sf.shrink(net, state, only=RETURNED, example=x)
    assert small.training and small.norm.training and not hasattr(small, "calls") and not hasattr(net, "calls")
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert small.norm.num_batches_tracked == 0 and torch.equal(small.norm.running_mean, torch.zeros(4))


def test_submodules_are_compared_within_their_module():
    net = nn.Sequential(mlp(), Attention(True))
    ties = sf.tied([["0.0.weight", 0], ["0.2.weight", 1]])
    net[0].add_module("last", nn.Linear(4, 32))
    assert sf.shrink(net, pruned(net, ties), only="0", example=torch.randn(2, 3, 4))[0][0].out_features == 3
