"""RMS norms in a module's own code: weight and eps are scaled where zeros go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from sparsefn.shrinking.cut import Cut
from sparsefn.shrinking.layer_sizes import COUNTED, averages
from sparsefn.shrinking.values import module_of, opname


class NormFold(NamedTuple):
    """The weight of an RMS norm that is `factor * old + shift`, as its mean is over
    fewer entries.
    """

    module: str
    factor: float
    shift: float
    exact: Tensor  # in float64, before it is rounded


def fold_norms(small: nn.Module, cut: Cut) -> dict[str, NormFold]:
    """Scale the weights and eps of RMS norms that lose entries, by name of the weight.

    x / sqrt(mean(x^2) + eps) over N entries is sqrt(N / n) times that over the n that
    are left with eps * N / n. Weights in half precision are left alone, where rounding
    is much. Nothing asks whether a module is an RMS norm: running it will tell.
    """
    made: dict[str, NormFold] = {}
    for average in averages(cut):
        path = module_of(average.node)
        layer = small.get_submodule(path)
        found = _weight(cut.analysis.graph, path, layer)
        eps = _eps(average.node)
        own = [
            key
            for key, value in vars(layer).items()
            if type(value) is float and value == eps
        ]
        if (
            opname(average.node) != "mean"
            or type(layer) in COUNTED
            or found is None
            or not own
        ):
            continue
        name, shift = found
        weight = layer.get_parameter(name)
        ratio = average.counted / average.left
        whole = f"{path}.{name}".removeprefix(".")
        if weight.dtype in (torch.float32, torch.float64) and whole not in made:
            factor = ratio**0.5
            exact = weight.detach().double() * factor + shift * (factor - 1)
            made[whole] = NormFold(path, factor, shift * (factor - 1), exact)
            weight.data = exact.to(weight.dtype)
            vars(layer).update(dict.fromkeys(own, eps * ratio))
    return made


def _eps(mean: fx.Node) -> float:
    # The number that is added to the mean.
    for user in mean.users:
        if opname(user) == "add" and isinstance(user.args[1], float):
            return user.args[1]
    return 0.0


def _weight(
    graph: fx.GraphModule, path: str, layer: nn.Module
) -> tuple[str, float] | None:
    # The parameter that something is multiplied with, and what is added to it before.
    for node in graph.graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        shift = 0.0
        while owner == path and name in layer._parameters and node.users:
            node = next(iter(node.users))
            if opname(node) == "add" and isinstance(node.args[1], float):
                shift += node.args[1]
            elif opname(node) == "mul":
                return name, shift
            elif opname(node) not in ("to", "_to_copy"):
                break
    return None
