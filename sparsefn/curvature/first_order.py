"""Scores from the gradient of an objective of one's own."""

from __future__ import annotations

from collections.abc import Callable

from sparsefn.curvature.derivatives import (
    Batch,
    Loss,
    arguments_at,
    check_loss,
    gradient_of,
    sparsified,
    unpacked,
)
from sparsefn.engine.checks import check_call
from sparsefn.engine.described import described
from sparsefn.state import PlainScore, State, Step, effective
from sparsefn.tree import Tree, check_like, flatten


@described
def sensitivity(objective: Loss, batch: Batch = (), at: Callable[[Tree], Tree] | None = None) -> PlainScore:
    """|weight * derivative of an objective|: to first order, how much the objective changes without the weight.

    >>> score = sf.curvature.sensitivity(lambda params, x: (x @ params["w"]).square().sum(), (torch.ones(1, 2),))
    >>> score(sf.State({"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor([True, True])}), (), 0)
    {'w': tensor([4., 2.])}

    Of the loss on a batch of its own this is SNIP: Lee et al. 2019, arXiv 1810.02340, eq. 5. An objective that trains
    for some steps before it computes the loss gives ProsPr (Alizadeh et al. 2022, arXiv 2202.08132), one that compares
    outputs at perturbed weights NTK-SAP (Wang et al. 2023, arXiv 2304.02840).

    The derivative is taken at the effective weights, or at what the function `at` makes of them: a tree like params.
    With `at` the absolute values, and the summed output for an input of ones, this is the score of SynFlow. The weights
    are `state.params`, as in `sf.scores.saliency`. Leaves that are not sparsified score 0. Raises TypeError for an
    objective or a batch of another kind, ValueError for an objective that is not 0-d.
    """
    check_loss(objective, batch)
    if at is not None:
        check_call("at", at, "params")

    def score(state: State, grads: Tree, step: Step) -> Tree:
        del grads
        now, point = arguments_at(batch, step), effective(state)
        if at is not None:
            made = at(point)
            check_like("what `at` gives", made, point, dtype=False)
            point = made
        weights, whole, scored = sparsified(state, point)
        leaves, rebuild = unpacked(weights)
        slopes = rebuild(gradient_of(lambda xs: objective(whole(rebuild(xs)), *now))(leaves))
        own = flatten(state.params)[0]
        return scored({path: (own[path] * slope).abs() for path, slope in slopes.items()})

    return score
