"""Arguments of one operation: symbolic sizes, numbers of entries, and what is
refused.
"""

import torch
from torch import nn

from sparsefn.shrinking.change import refused, scale
from sparsefn.shrinking.traced import traced
from tests.shrinking.compare import differs
from tests.shrinking.cuts import both


def sizes():
    graph = traced(nn.Identity(), (torch.ones(6, 4),))
    return [
        graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[d] for d in (0, 1)
    ]


def test_a_symbolic_size_is_scaled_in_its_factor():
    n, m = sizes()
    assert scale(n * 8, 12, 48) == (8, 2)
    assert scale(n * m * 8, 6 * 4 * 6, 6 * 4 * 8) == (8, 6)
    assert scale(n, 3, 6) is None  # rows of the example, not of a layer
    assert scale(n * 3, 6 * 3 // 2, 18) is None  # half of three
    assert scale(n + 8, 10, 14) is None
    assert scale(n * 8 // m, 6, 12) is None
    assert scale(48, 12, 48) is None


def test_sizes_that_are_no_products_are_inferred_or_refused():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.more = (
                nn.Linear(3, 4),
                nn.Linear(4, 2),
                nn.Parameter(torch.randn(3, 4)),
            )

        def forward(self, x):
            rows = x.shape[0] + 3
            return self.b(
                torch.cat([self.a(x), self.more]).view(rows * 4).view(rows, 4)
            )

    model, x = Joined().eval().double(), torch.randn(5, 3).double()
    whole, small = both(model, x)
    assert not differs(whole, small, x) and not differs(
        whole, small, torch.randn(7, 3).double()
    )


def test_a_refusal_names_the_operation_and_its_module():
    graph = traced(
        nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU())), torch.ones(2, 3)
    )
    (node,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    assert (
        str(refused(node, "why"))
        == "the operation relu of the module '1.0' cannot follow entries that go: why"
    )
