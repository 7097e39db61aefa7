"""Values, and helpers for operations of traced programs.
One operation as the rules see it: joins and reasons that name its place."""

import numpy as np
import torch
from torch import fx, nn

from sparsefn.shrinking import values
from sparsefn.shrinking.channels import CoupledChannels
from sparsefn.shrinking.trace import traced
from sparsefn.shrinking.values import AnalysisLog, Step
from tests.shrinking.small import Of, analysed, conv

aten = torch.ops.aten


def test_a_value_says_where_its_slices_are_zero():
    value = values.blank(torch.ones(2, 3))._replace(
        constants=(None, np.array([0.0, 1.0, np.nan]))
    )
    assert value.zero(0).tolist() == [False, False] and value.zero(1).tolist() == [
        True,
        False,
        False,
    ]


def test_values_of_nothing_known():
    one, two, three = values.blank([torch.ones(2, dtype=torch.int32), 5, None])
    assert (
        one.shape == (2,)
        and one.dtype == torch.int32
        and one.labels == one.constants == (None,)
    )
    assert (two, three) == (5, None)


def test_sizes_that_are_symbols_are_the_numbers_of_the_trace():
    graph = traced(nn.Linear(3, 4), torch.ones(5, 3))
    val = next(
        node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"
    )
    assert isinstance(val.shape[0], torch.SymInt) and values.hint(val.shape[0]) == 5
    assert values.hint(7) == 7 and values.hint("sum") == "sum"
    assert values.blank(val).shape == (5, 3)


def test_trees_of_values():
    a, b = values.blank(torch.ones(2)), values.blank(torch.ones(3))
    tree = {"x": [a, "mean", 2], "y": (b, torch.ones(4))}
    assert values.values_in(tree) == [a, b]
    made = values.replaced(tree, ["A", "B"])
    assert made["x"] == ["A", "mean", 2] and made["y"][0] == "B"


def test_arguments_by_name():
    given = values.bind(aten.softmax.int, ("x", 1), {})
    assert given == {"self": "x", "dim": 1, "dtype": None}
    assert values.bind(aten.add.Tensor, ("x",), {"other": "y", "alpha": 2}) == {
        "self": "x",
        "other": "y",
        "alpha": 2,
    }


def test_calls_change_nothing_that_is_given():
    x, value = torch.ones(2), values.blank(torch.ones(2))
    (out,) = values.run_op(aten.mul_.Scalar, {"self": value, "other": 3}, [x])
    assert out.tolist() == [3, 3] and x.tolist() == [1, 1]
    arguments = {"tensors": [value, value], "dim": 0}
    assert values.run_op(aten.cat.default, arguments, [x, 2 * x])[0].tolist() == [
        1,
        1,
        2,
        2,
    ]
    parts = values.run_op(
        aten.chunk.default, {"self": value, "chunks": 2, "dim": 0}, [x]
    )
    assert [part.shape for part in parts] == [(1,), (1,)]
    made = values.run_op(
        aten.sum.default, {"self": value, "dtype": torch.float64}, [x]
    )[0]
    assert made.dtype == torch.float64  # by keyword alone


def test_names_and_places_of_operations():
    inner = Of(lambda net, x: net.a(x).add_(1) + 1, a=nn.Linear(2, 2))
    graph = traced(nn.Sequential(inner), torch.ones(1, 2))
    nodes = {
        values.opname(node): node
        for node in graph.graph.nodes
        if node.op == "call_function"
    }
    assert list(nodes) == ["linear", "add"]
    assert [values.module_of(node) for node in nodes.values()] == ["0.a", "0"]
    assert [values.module_of(nodes["linear"], up) for up in (1, 2, 3)] == ["0", "", ""]
    read = next(node for node in graph.graph.nodes if node.op == "get_attr")
    assert values.tensors_of(graph)[read.target] is getattr(graph, "0").a.weight


def step_of(channels):
    node = fx.Graph().call_function(aten.sum.default)
    node.meta["nn_module_stack"] = {"": ("layer", None)}
    return Step(node, {}, None, AnalysisLog(channels, False, True, None))


def test_joins_give_the_first_label_or_none():
    channels = CoupledChannels()
    step, a, b, c = step_of(channels), channels.new(2), channels.new(2), channels.new(2)
    assert (
        step.join(a, b) is a
        and step.channels is channels
        and step.target is aten.sum.default
    )
    assert (channels.find(a) == channels.find(b)).all()
    assert step.join(c, None) is None
    assert (
        channels.reasons[channels.reason[c[0, 0]]]
        == "joined with what stays by sum at 'layer'"
    )


def test_reasons_name_the_place():
    channels = CoupledChannels()
    step, a = step_of(channels), channels.new(2)
    step.freeze(a, "mixes its entries", np.array([True, False]))
    assert [channels.reasons[i] for i in channels.reason[a].ravel()] == [
        "sum at 'layer' mixes its entries",
        "",
    ]


def test_groups_and_folds_are_noted():
    net, x = conv(
        lambda net, x: net.b(net.c(net.a(x))), c=torch.nn.Conv2d(4, 4, 1, groups=2)
    )
    masks = {"a.weight": torch.arange(4)[:, None, None, None].expand(4, 3, 1, 1) > 0}
    book = analysed(net, x, masks=masks).log
    (node,) = book.groups
    assert node.name == "conv2d_1" and len(book.groups[node]) == 2
    (fold,) = book.folds
    assert fold.bias == "c.bias" and fold.weights.shape == (2, 2, 2)
    np.testing.assert_allclose(
        fold.weights.reshape(4, 2), net.c.weight.detach().reshape(4, 2), rtol=1e-6
    )
    np.testing.assert_allclose(
        fold.constants, [net.a.bias[0].item(), *[np.nan] * 3], rtol=1e-6
    )
