"""Physically smaller modules: channels that hold a constant are removed, and the constant moves on into biases."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from sparsefn.dependencies import follow, trace
from sparsefn.layers import LAYERS
from sparsefn.modules import bake
from sparsefn.tree import Tree, flatten
from sparsefn.types import State, check_masks


def shrink(module: nn.Module, state: State) -> nn.Module:
    """A copy of the module with smaller layers and the outputs of the masked one.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> state = sf.static(0.5, where="0.weight", pattern=sf.patterns.channel(0)).init(sf.modules.params_of(net))
    >>> small, x = sf.shrink(net, state), torch.ones(1, 3)
    >>> small
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    >>> torch.allclose(small(x), sf.modules.call(net, state, x), atol=1e-6)
    True

    A channel goes when everyone who reads it can do without: its value is one constant, which moves on
    into their biases, or they keep no weight on it. A row is constant when it keeps no weight, by its
    mask, on inputs that vary; weights that are kept and happen to be 0 count as weights. Constants go
    through activations, pooling, batch norm, sums, products and concatenations; channels that meet go
    together or not at all. A channel stays where a layer without a bias reads a constant that is not 0 (no
    parameter is added), or a convolution that pads with zeros, as the border would differ (so prune biases and
    the norm in between along with the rows: `sf.prune_biases`), and where something not understood here
    reads it: a layer norm, an attention, a view of fixed sizes. A hidden unit of an LSTM, GRU or RNN (one
    layer, one direction, without a given state) goes when it is 0 at all times: its candidate gate, the
    cell's in an LSTM, keeps no weight and no bias. The module's own outputs keep their shape, and one
    channel always stays. Names in `state_dict` stay; what is pruned but cannot go is 0.

    The forward is followed by `torch.fx`, with its optional arguments at their defaults, for inputs that
    come as batches: images (N, C, H, W), features of a batch norm (N, C). Raises TypeError for anything but a
    State, and ValueError for a module that `torch.fx` cannot follow, for batch norm or dropout in
    train mode, for a forward that computes with the sizes of its layers, and as `sf.modules.bake` does.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"expected a State, got {type(state).__name__}; of zeros in params make one by "
            "sf.State(params, sf.masks.from_zeros(params))"
        )
    small = bake(module, state)
    if fx.Tracer().is_leaf_module(small, "") or "forward" in vars(small):
        return small  # one layer: all its channels are outputs
    root, graph = trace(small)
    plan = follow(root, graph, flatten(state.masks)[0])
    removed = plan.removed()
    for path, (inputs, outputs) in plan.sizes.items():
        layer = small.get_submodule(path)
        LAYERS[type(layer)].cut(layer, inputs, outputs, removed)
    if removed.any():
        _check_same((root, graph), trace(small))
    return small


def prune_biases(masks: Tree) -> Tree:
    """The masks with each bias pruned whose whole row of weights is.

    >>> rows = {"weight": torch.tensor([[True, False], [False, False]]), "bias": torch.tensor(True)}
    >>> sf.prune_biases(rows)["bias"]
    tensor([ True, False])

    A bias is a leaf beside a leaf of the same name with `weight` for `bias`, and a row is an index of the
    first dimension. What a bias prunes already stays pruned. Raises TypeError for a mask that is not bool.
    """
    check_masks(masks, masks)
    named, rebuild = flatten(masks)

    def mask_of(path: str, mask: Tensor) -> Tensor:
        head, dot, name = path.rpartition(".")
        weight = named.get(head + dot + name.replace("bias", "weight"), mask)
        return mask & weight[..., None].flatten(1).any(1) if "bias" in name and weight.ndim else mask

    return rebuild([mask_of(path, mask) for path, mask in named.items()])


def _check_same(before: tuple[nn.Module, fx.Graph], after: tuple[nn.Module, fx.Graph]) -> None:
    # Numbers and tensors that the forward makes of a layer's size are in the graph; shrinking may not change them.
    for (old, a), (new, b) in zip(_steps(*before), _steps(*after), strict=False):  # one output ends each
        if old != new or not (a is b or _equal(a, b)):
            raise ValueError(
                "expected a forward that does not compute with the sizes of its layers, but shrinking them turns "
                f"{old!r} into {new if old != new else 'another tensor'!r}; take sizes from tensors"
            )


def _steps(root: nn.Module, graph: fx.Graph) -> Iterator[tuple[str, Any]]:
    for node in graph.nodes:
        yield str(node.format_node()), operator.attrgetter(str(node.target))(root) if node.op == "get_attr" else None


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
