"""A score of missing connections that reads the masks alone: Cannistraci-Hebb link prediction."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sparsefn.engine.described import described
from sparsefn.scores.leaves import of_sparsified
from sparsefn.state import PlainScore, State, Step
from sparsefn.tree import Tree


@described
def topology(rule: Literal["CH2", "CH3"] = "CH2", least: float = 0.0) -> PlainScore:
    """How well a missing connection would close short paths: the Cannistraci-Hebb score of a pruned entry.

    >>> mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    >>> sf.scores.topology("CH3")(sf.State({"w": torch.ones(3, 4)}, {"w": mask}), (), 0)["w"]
    tensor([[0.0000, 0.0000, 0.0000, 1.5000],
            [2.5000, 0.0000, 0.0000, 1.5000],
            [1.0000, 2.5000, 0.0000, 0.0000]], dtype=torch.float64)

    A leaf is the matrix M of its first dimension by all others, 1 where a connection is kept. With C = MM', the common
    neighbours of two rows i and j, and E = max(degree of j - C, 1), "CH3" gives a = [C > 0] / E and "CH2"
    a = [C > 0] (1 + C) / E. The score is aM, and the same of the columns added to it: the paths of length three, by
    their first and by their last unit. Kept entries score 0, others at least `least`. Float64, from terms that are
    rounded so that no sum rounds: the bits are the same on every device. Leaves that are not sparsified score 0.
    Raises ValueError for another rule and for a DTensor.

    Zhang et al. 2025, arXiv 2501.19107 (the node-based form, L3n).
    """
    if rule not in ("CH2", "CH3"):
        raise ValueError(f"expected rule to be 'CH2' or 'CH3', got {rule!r}")

    def of_leaf(path: str, weight: Tensor, mask: Tensor) -> Tensor:
        m = mask.reshape(mask.shape[0], math.prod(mask.shape[1:])).double()
        found = _half(m, rule) + _half(m.T, rule).T
        return torch.where(mask, 0.0, found.reshape(mask.shape).clamp(min=least))

    def score(state: State, grads: Tree, step: Step) -> Tree:
        del grads, step
        return of_sparsified(of_leaf, state, whole="topology")

    return score


def _half(m: Tensor, rule: str) -> Tensor:
    # Paths of length three from each row to each column, by how much each row has in common with the row before last.
    common = m @ m.T
    others = (m.sum(1) - common).clamp(min=1.0)
    terms = torch.where(common > 0, (1.0 + common if rule == "CH2" else 1.0) / others, 0.0)
    most = m.shape[0] * (m.shape[1] + 1 if rule == "CH2" else 1)  # no sum is larger
    unit = 2.0 ** (most.bit_length() - 51)
    return ((terms / unit).round() * unit) @ m
