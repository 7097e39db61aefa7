"""What a row of the registry says about an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import sparsefn as sf
from property_tests import oracle
from property_tests.oracle import Layout
from property_tests.strategies import Tree

Schedule = Callable[[Any], Any]
Distribution = Any


class Meta(NamedTuple):
    """What an algorithm promises.

    counts       what is exact after init and at every trigger: each "leaf", the "total", or "" (nothing)
    level        the sparsity asked for -> the schedule that the counts follow
    relative     the sparsity is of what remains
    when         the steps at which masks may change
    start        how the initial mask comes about: "dense", "random", "magnitude" or "other"
    choose       the score whose best make the mask at a trigger
    drop, grow, fraction, exclude     the scores and the share of an exchange of weights
    conserves    an exchange leaves the counts as they are
    monotone     masks only shrink
    needs_grads  masks depend on gradients
    stochastic   masks depend on the key; redraws: at every trigger anew
    pruned       what becomes of weights off the mask: "zero", "keep" or "train"
    idle         a step without a trigger leaves the state alone and does no tensor work
    trains       what an optimizer moves: "params", or something else
    optimizer    it has one of its own
    baseline     what it is at sparsity 0, bit for bit; None where the sparsity has no ends
    tensor       the sparsity may be a tensor
    independent  what happens to a leaf does not depend on other leaves
    scale_free   masks do not depend on the scale of the weights or of the gradients
    permutes     permuted weights without ties have permuted masks; their scores must not tie either
    """

    layout: Layout = oracle.ELEMENTS
    distribution: Distribution = sf.budgets.uniform()
    counts: str = "leaf"
    level: Callable[[Any], Schedule] = sf.schedules.constant
    relative: bool = False
    when: Callable[[Any], Any] = sf.always()
    start: str = "magnitude"
    choose: Any = None
    drop: Any = None
    grow: Any = None
    fraction: Schedule = sf.schedules.constant(0.0)
    exclude: bool = False
    conserves: bool = False
    monotone: bool = False
    needs_grads: bool = False
    stochastic: bool = False
    redraws: bool = False
    pruned: str = "zero"
    idle: bool = True
    trains: str = "params"
    optimizer: bool = False
    baseline: Callable[[], sf.Algorithm] | None = sf.dense
    tensor: bool = True
    independent: bool = True
    scale_free: bool = True
    permutes: bool = True

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, sf.budgets.Global)


class Row(NamedTuple):
    """`make(sparsity, key, params)` gives the algorithm."""

    name: str
    make: Callable[[Any, Tensor, Tree], sf.Algorithm]
    meta: Meta
