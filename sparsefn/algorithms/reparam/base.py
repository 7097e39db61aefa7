"""What a map from latents to weights is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sparsefn.core.checks import Made
from sparsefn.core.state import Step
from sparsefn.core.tree import Tree


class _Map(NamedTuple):
    init: Callable[[dict[str, Tensor], Tensor], Tree]
    apply: Callable[[Tree, Step, Tensor], tuple[dict[str, Tensor], dict[str, Tensor]]]
    settled: (
        Callable[[Tree, Step], tuple[dict[str, Tensor], dict[str, Tensor]]] | None
    ) = None
    project: Callable[[Tree, Step], Tree] | None = None
    held: tuple[str, ...] = ()


class Reparametrisation(Made, _Map):
    """A differentiable map from latents to weights and masks.

    >>> sf.reparam.power(2.0).init({"w": torch.tensor([4.0])}, sf.random.key(0))
    {'latent': {'w': tensor([2.])}}

    `init(leaves, key)` makes a dict of trees by name from the chosen leaves,
    `{path: tensor}`;
    `apply(latents, step, key)` gives `({path: weights}, {path: masks})`: the weights
    are differentiable in the latents, a mask is bool of the leaf's shape or 0-d True.

    `settled(latents, step)` gives the weights and masks of evaluation, where they are
    others (see `sf.settled`). `project(latents, step)` gives the latents that each
    update puts in place of those that the optimizer has stepped. `held` are the names
    of trees that no optimizer trains.
    """
