"""Parts of a module: globs, and what parts are called with."""

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.shrinking.paths import Parts, calls_of, matched
from tests.shrinking.small import VECTOR, Of

NET = nn.Sequential(
    nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
    nn.Sequential(nn.Linear(3, 3)),
    nn.Linear(3, 2),
).eval()


def test_globs_match_outermost_modules_in_order():
    assert matched(NET, ["1", "0"]) == ["0", "1"]
    assert matched(NET, ["0*"]) == ["0"]
    assert matched(NET, ["*.0"]) == ["0.0", "1.0"]


def test_wrong_globs():
    wanted = r"expected only to be globs of submodules such as 'layers.\*.mlp', got"
    with pytest.raises(
        TypeError, match=rf"{wanted} \['0', 3\]; which units go is what the masks say"
    ):
        matched(NET, ["0", 3])
    for bad in (sf.patterns.channel(0), 3):
        with pytest.raises(TypeError, match=wanted):
            matched(NET, bad)
    with pytest.raises(ValueError, match=rf"{wanted} none"):
        matched(NET, [])
    with pytest.raises(
        ValueError, match="only: no path matches 'x'; the paths are '0', '0.0'"
    ):
        matched(NET, ["0", "x"])


def test_parts_that_share_a_parameter():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].bias = net[0].bias
    with pytest.raises(
        ValueError,
        match="expected '0' to have its parameters alone, but it shares '1.bias'",
    ):
        matched(net, ["0"])


def test_what_parts_are_called_with_the_first_time():
    net = Of(
        lambda net, x: net.f(net.f(x), 2) + net.f(y=1, x=x),
        f=Of(lambda net, x, y=0: x + y),
    )
    net.f.forward = lambda x, y=0: x + y
    state = torch.get_rng_state()
    (x,) = calls_of(net, ["f"], VECTOR)["f"]
    assert torch.equal(x, VECTOR) and torch.equal(state, torch.get_rng_state())
    assert not net.f._forward_pre_hooks


def test_on_an_example_that_does_not_run_and_on_meta():
    text = (
        r"expected an example that the Sequential can be called with: it fails with "
        r"RuntimeError: mat1 and mat2 shapes"
    )
    with pytest.raises(ValueError, match=text):
        calls_of(NET, ["2"], torch.ones(1, 5))
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to("meta")
    (x,) = calls_of(net, ["1"], VECTOR)["1"]
    assert x.is_meta and x.shape == (len(VECTOR), 5)


def test_parts_run_their_own_calls_under_their_own_names():
    x, y = torch.randn(2, 3), torch.randn(4, 3)
    parts = Parts(NET, ["0", "1.0"])
    first, second = parts(x, {"input": y})
    assert torch.equal(first, NET[0](x)) and torch.equal(second, NET[1][0](y))
    assert dict(parts.named_parameters()).keys() == dict(NET.named_parameters()).keys()
    assert parts._get_name() == "submodules '0', '1.0'"


class Named(nn.Module):
    def forward(self, x, *, scale=1.0, **rest):
        return x * scale + rest.get("shift", 0)


def test_arguments_by_name():
    net = Of(lambda net, x: net.f(x, scale=2.0, shift=1), f=Named())
    call = calls_of(net, ["f"], VECTOR)["f"]
    assert torch.equal(call.pop("x"), VECTOR) and call == {"scale": 2.0, "shift": 1}


class Listed(nn.Module):
    def forward(self, *xs, scale=1.0):
        return xs[0] * scale


def test_parts_that_are_not_called_or_have_no_names():
    with pytest.raises(
        ValueError,
        match="expected the module to call 'g' on the example, but it does not",
    ):
        calls_of(Of(lambda net, x: x, g=nn.ReLU()), ["g"], VECTOR)
    net = Of(lambda net, x: net.f(x, scale=2.0), f=Listed())
    with pytest.raises(
        ValueError, match="expected a forward of 'f' all of whose arguments have names"
    ):
        calls_of(net, ["f"], VECTOR)
