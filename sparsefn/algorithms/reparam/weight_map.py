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

    Attributes:
        init: Function of (leaves, key) that makes the latents, a dict of trees by name,
            from the chosen leaves, `{path: tensor}`.
        apply: Function of (latents, step, key) that returns
            `({path: weights}, {path: masks})`: the weights are differentiable in the
            latents, a mask is bool of the leaf's shape or 0-d True.
        settled: Function of (latents, step) that returns the weights and masks of
            evaluation: see `sf.settled`. None: the same as in training.
        project: Function of (latents, step) that returns what each update puts in the
            place of the latents that the optimizer has stepped. None: they stay as they
            are.
        held: Names of the trees that no optimizer trains.
    """
