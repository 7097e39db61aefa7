"""The traced graph: which operations are followed, share tensors or work in place; modules are in test_smaller.py."""

import operator
import warnings

import pytest
import torch
from torch import nn

from sparsefn.shrinking.channels import UNKNOWN
from sparsefn.shrinking.follow import follow, trace


class Net(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(()))
        self.fn = fn

    def forward(self, x, y=None, twice=False, name="x"):
        return self.fn(self, x, y, twice, name)


def plan_of(net):
    root, graph = trace(net.eval())
    masks = {name: torch.tensor(True) for name, _ in net.named_parameters()}
    masks["a.weight"] = torch.ones(4, 3, dtype=torch.bool)
    masks["a.weight"][0] = False
    root.a.weight.data[0] = 0
    return follow(root, graph, masks)


def test_operators_in_place_are_recorded_as_such():
    def steps(m, x, *rest):
        h = m.a(x)
        h += 1
        h *= 2
        h[:, 0] = 3.0
        return m.b(h)

    _, graph = trace(Net(steps))
    assert [n.target for n in graph.nodes if n.op == "call_function" and n.target is not torch._assert][-3:] == [
        operator.iadd,
        operator.imul,
        operator.setitem,
    ]


def test_optional_arguments_have_their_defaults_and_the_first_is_an_input():
    def steps(m, x, y, twice, name):
        assert (y, twice, name) == (None, False, "x")
        return m.b(m.a(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_of(Net(steps)).removed().sum() == 1

    class First(Net):
        def forward(self, x=None):
            return self.b(self.a(x))

    assert plan_of(First(None)).removed().sum() == 1


def test_the_module_is_not_the_one_that_is_traced():
    net = Net(lambda m, x, *rest: m.b(m.a(x)) + torch.ones(2))
    root, graph = trace(net)
    assert root is not net and hasattr(root, "_tensor_constant0") and not hasattr(net, "_tensor_constant0")
    assert "get_attr" in [node.op for node in graph.nodes]


FOLLOWED = {
    "once": (lambda m, x, *rest: m.b(m.a(x)), {"a", "b"}),
    "twice": (lambda m, x, *rest: m.b(m.a(x) + m.a(2 * x)), {"b"}),
    "weight read": (lambda m, x, *rest: m.b(m.a(x)) * m.a.bias.sum(), {"b"}),
    "buffer read": (lambda m, x, *rest: m.b(m.norm(m.a(x)) + m.norm.running_mean), {"a", "b"}),
    "norm": (lambda m, x, *rest: m.b(m.norm(m.a(x))), {"a", "b", "norm"}),
    "other buffer": (lambda m, x, *rest: m.b(m.norm(m.a(x))) * m.scale, {"a", "b", "norm"}),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_layers_whose_tensors_others_read_are_not_cut(name):
    fn, layers = FOLLOWED[name]
    plan = plan_of(Net(fn))
    assert set(plan.sizes) == layers


def changed_then_read_twice(m, x, *rest):
    h = m.a(x)
    h += 1
    return m.b(h) + m.b.bias.sum() * h.sum()


IN_PLACE = {
    "read once": (lambda m, x, *rest: m.b(m.a(x).relu_().add_(1)), True),
    "read by another": (lambda m, x, *rest: (lambda h: m.b(h.relu_() + h))(m.a(x)), False),
    "a sum": (lambda m, x, *rest: (lambda h: m.b((h + 1).relu_() + h))(m.a(x)), True),
    "a list": (lambda m, x, *rest: (lambda h: m.b((torch._foreach_add_([h, x], 1), h)[1]))(m.a(x)), False),
    "a view": (lambda m, x, *rest: (lambda h: m.b((h.view(-1, 4).mul_(2), h)[1]))(m.a(x)), False),
    "joined": (lambda m, x, *rest: (lambda h: m.b(torch.cat([h, h], 0)[:5].relu_()))(m.a(x)), False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_under_other_readers_is_not_followed(name):
    fn, followed = IN_PLACE[name]
    plan = plan_of(Net(fn))
    assert bool(plan.removed()[:4].any()) == followed


def test_the_wrong_mode_and_a_failed_trace():
    net = Net(lambda m, x, *rest: m.b(m.norm(m.a(x))))
    root, graph = trace(net)
    with pytest.raises(ValueError, match=r"expected 'norm' \(BatchNorm1d\) in eval mode"):
        follow(root, graph, {name: torch.tensor(True) for name, _ in net.named_parameters()})
    with pytest.raises(ValueError, match="expected a Net that torch.fx can follow, but: no luck; shrink the parts"):
        trace(Net(lambda m, x, *rest: exec("raise RuntimeError('no luck')")))


def test_inputs_are_unknown():
    net = Net(lambda m, x, *rest: m.b(m.a(x)))
    inputs, outputs = plan_of(net).sizes["a"]
    assert inputs is UNKNOWN and outputs.batch == "x"
