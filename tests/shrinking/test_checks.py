"""Operations that no rule is about are tried out, and all shapes are compared."""

import pytest
import torch
from torch import nn

from sparsefn.shrinking.checks import check_sizes
from sparsefn.shrinking.program import program
from sparsefn.shrinking.traced import traced
from tests.shrinking.cuts import random_cut


def forced(fn, target, dim=1):
    """A program in which an operation loses entries of a dimension, whatever the analysis says."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 6)

        def forward(self, x):
            return fn(self.a(x))

    graph = traced(Net().eval(), torch.randn(6, 3))
    cut = random_cut(graph, 0.0)
    (node,) = graph.graph.find_nodes(op="call_function", target=target)
    label = cut.analysis.values[node.args[0]].labels[dim]
    cut.alive[label[1]] = cut.alive[label[4]] = False
    value = cut.analysis.values[node]
    cut.known.clear()
    cut.analysis.values[node] = value._replace(labels=(*value.labels[:dim], label, *value.labels[dim + 1 :]))
    return cut


@pytest.mark.parametrize(
    "fn,target",
    [
        (lambda y: y.tril(), torch.ops.aten.tril.default),
        (lambda y: y.softmax(1), torch.ops.aten.softmax.int),
        (lambda y: y.sort(1)[0], torch.ops.aten.sort.default),
    ],
)
def test_an_operation_without_a_rule_is_tried_out(fn, target):
    with pytest.raises((ValueError, AttributeError), match="cannot follow entries that go|_replace"):
        program(forced(fn, target))


def test_what_passes_is_left_as_it_is():
    cut = forced(lambda y: y.cumsum(0), torch.ops.aten.cumsum.default)
    assert "cumsum" in program(cut).code


def test_shapes_are_compared():
    graph = traced(nn.Linear(3, 2), torch.ones(2, 3))
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    sizes = {one: [[2, 3]] for one in graph.graph.find_nodes(op="placeholder")}
    check_sizes(graph, {**sizes, node: [[2, 2]]})
    with pytest.raises(ValueError, match=r"linear .*it gives shapes \[\[2, 2\]\], where \[\[2, 1\]\] are expected"):
        check_sizes(graph, {**sizes, node: [[2, 1]]})
    graph.weight = nn.Parameter(torch.ones(2, 5))
    with pytest.raises(ValueError, match="the operation linear cannot follow entries that go: .* reduction dim"):
        check_sizes(graph, {**sizes, node: [[2, 2]]})
