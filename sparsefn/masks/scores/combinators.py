"""Scores made from other scores: draws, ranks in classes, one value for each unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn._engine.leaves import placed
from sparsefn._engine.numbers import elementary, ranks_within
from sparsefn._engine.processes import local_tensor, sharded_like
from sparsefn._engine.torch_limits import widened
from sparsefn.core import random as _random
from sparsefn.core.checks import check_call, described, shown
from sparsefn.core.rounding import as_number
from sparsefn.core.state import Accumulated, Level, Score, State, Step
from sparsefn.core.tree import Tree
from sparsefn.masks.patterns.tied_sets import TiedPattern
from sparsefn.masks.patterns.units import (
    Pattern,
    Units,
    from_rows,
    to_rows,
    units_of_leaves,
)
from sparsefn.masks.scores.per_leaf import of_sparsified
from sparsefn.masks.scores.score_types import OfUnits, plain
from sparsefn.masks.scores.unit_values import check_units, of_tied_units, scored_units

# (values of a score, state, step) -> other values
Change = Callable[[Tree, State, Step], Tree]


def _changed(name: str, score: Score, change: Change) -> Score:
    # The score, with memory or without, whose values are changed.
    if scored_units(score) is not None:
        raise ValueError(
            f"{name}: expected a score with a value for each entry, got {shown(score)}"
        )
    if isinstance(score, Accumulated):
        value = score.value
        return score._replace(
            value=lambda memory, state, grads, step: change(
                value(memory, state, grads, step), state, step
            )
        )
    fn = plain(score)
    return lambda state, grads, step: change(fn(state, grads, step), state, step)


@described
def sampled(score: Score, power: Level = 1.0) -> Score:
    """Draws in place of the best: the k best are drawn by score^power.

    >>> state = sf.State(
    ...     {"w": torch.tensor([0.0, 1.0, 1e9])},
    ...     {"w": torch.ones(3) > 0},
    ...     key=sf.random.key(0),
    ... )
    >>> draws = sf.scores.sampled(sf.scores.magnitude)(state, (), 0)["w"]
    >>> draws.argsort(descending=True)
    tensor([2, 1, 0])

    Args:
        score: A score with a value for each entry, with memory or without.
        power: A finite number, a Schedule or a 0-d tensor.

    Returns:
        A score like `score`, power * log(score) plus Gumbel noise of the state's key,
        the path, the step and the index, in float64. Leaves that are not sparsified
        score 0.

    Raises:
        TypeError: `score` is not a score, or `power` not a number.
        ValueError: The state has no key, `score` has a value for each unit, or `power`
            is not finite.

    The k draws are without replacement. An entry that scores 0 is drawn only where too
    few others are left, one with a negative score or NaN after these.

    Yellott 1977, doi 10.1016/0022-2496(77)90026-8; for keeping weights Zhang et al.
    2025, arXiv 2501.19107 (CHTs).
    """
    power_at = as_number(power, "power")

    def change(values: Tree, state: State, step: Step) -> Tree:
        if not isinstance(state.key, Tensor):
            raise ValueError(
                "expected a state with a PRNG key for sampled scores, got none; pass "
                "key=sf.random.key(0)"
            )
        key = _random.fold_in(state.key, "sampled")

        def of_leaf(path: str, weight: Tensor, mask: Tensor, value: Tensor) -> Tensor:
            drawn = _random.uniform_like(
                _random.leaf_key(key, path, step), value, torch.float64
            )
            exponent = power_at(step)
            x = widened(local_tensor(value.detach())).double()
            if isinstance(exponent, Tensor):
                exponent = placed(exponent, x.device)
            noise = elementary.log(
                -elementary.log(local_tensor(drawn).clamp(min=2.0**-54))
            )
            finite = torch.where(x > 0, x, 1.0).clamp(_TINY, _HUGE)
            drawn_scores = exponent * elementary.log(finite) - noise
            return sharded_like(
                torch.where(
                    x > 0, drawn_scores, torch.where(x == 0, -torch.inf, torch.nan)
                ),
                value,
            )

        return of_sparsified(of_leaf, state, values)

    return _changed("sampled", score, change)


_TINY = torch.finfo(torch.float64).tiny
_HUGE = torch.finfo(torch.float64).max


@described
def ranked(score: Score, by: Callable[[Tensor], Tensor] = torch.sign) -> Score:
    """The rank of a score in a class of weights: how many of the class score less.

    >>> state = sf.State(
    ...     {"w": torch.tensor([0.1, 0.2, 0.3, 0.4, -5.0, -6.0])},
    ...     {"w": torch.ones(6) > 0},
    ... )
    >>> sf.scores.ranked(sf.scores.magnitude)(state, (), 0)["w"]
    tensor([0., 1., 2., 3., 0., 1.], dtype=torch.float64)

    Args:
        score: A score with a value for each entry, with memory or without.
        by: A function of a weight tensor that gives a tensor of its shape. Entries of a
            leaf are of one class if it is equal there, and if both are kept or both are
            pruned. Default: the sign.

    Returns:
        A score like `score`, in float64. Of equal scores the first ranks higher; NaN
        stays NaN. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `score` is not a score, or `by` not a function of one argument.
        ValueError: `by` gives another shape, `score` has a value for each unit, or a
            sparsified leaf is a DTensor.

    The lowest ranks take equally many from each class while they last: `sf.set(0.9,
    drop=ranked(magnitude))` drops the smallest weights of either sign, as the original
    of Mocanu et al. 2018, arXiv 1707.04780, does.
    """
    check_call("by", by, "weight")

    def of_leaf(path: str, weight: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        kind = by(weight.detach())
        if not isinstance(kind, Tensor) or kind.shape != weight.shape:
            raise ValueError(
                f"ranked: expected by to give shape {tuple(weight.shape)} at "
                f"{path!r}, got {_shape_of(kind)}"
            )
        # which can be sorted
        if kind.dtype == torch.bool:
            kind = kind.to(torch.uint8)
        flat = value.detach().reshape(-1)
        ranks = ranks_within(
            flat, mask.reshape(-1).to(torch.uint8), kind.reshape(-1)
        ).double()
        return torch.where(flat.isnan(), torch.nan, ranks).reshape(weight.shape)

    return _changed(
        "ranked",
        score,
        lambda x, state, step: of_sparsified(of_leaf, state, x, reader="ranked"),
    )


@described
def by_unit(score: Score, pattern: Pattern, fn: Callable[[Tensor], Tensor]) -> Score:
    """One value for each unit of a pattern, made by a function of the scores in it.

    >>> signed = lambda state, grads, step: {"w": state.params["w"] * grads["w"]}
    >>> taylor = sf.scores.by_unit(
    ...     signed, sf.patterns.channel(0), lambda scores: scores.sum(-1).square()
    ... )
    >>> state = sf.State(
    ...     {"w": torch.tensor([[1.0, -1.0], [2.0, 1.0]])}, {"w": torch.ones(2, 2) > 0}
    ... )
    >>> taylor(state, {"w": torch.tensor([[0.5, 0.5], [0.2, 0.1]])}, 0)["w"]
    tensor([[0.0000, 0.0000],
            [0.2500, 0.2500]])

    Args:
        score: A score with a value for each entry, with memory or without.
        pattern: A pattern whose units have several entries.
        fn: A function that reduces over the last dimension of contiguous rows, the
            scores of some units at a time where there are many. 16-bit scores are given
            in float32.

    Returns:
        A score like `score`, in which every entry of a unit has the value of its unit.
        So `patterns.channel(0, norm=math.inf)` or `patterns.block(shape, "max")` prune
        by these values, and `sf.scores.mean` averages them. Leaves that are not
        sparsified score 0.

    Raises:
        TypeError: `pattern` is not a pattern, `score` not a score, or `fn` not a
            function of one argument.
        ValueError: Units are single entries, `score` has a value for each unit already,
            `fn` gives another shape, or a sparsified leaf is a DTensor.

    Of `sf.patterns.tied`, such as the pattern of `sf.shrinking.groups`, a row has the
    scores of all entries of a unit: members in their order, each row by row. There is
    one value for each unit of each set, by the set's name, as an entry may be in
    several units. Give the algorithm the same pattern; it then reads the values, and
    its `reduce` is not used:

    >>> mlp = sf.patterns.tied([["up", 0], ["down", 1]])
    >>> norms = sf.scores.by_unit(
    ...     sf.scores.magnitude, mlp, lambda scores: scores.norm(dim=-1)
    ... )
    >>> params = {
    ...     "up": torch.tensor([[3.0], [1.0]]),
    ...     "down": torch.tensor([[4.0, 1.0]]),
    ... }
    >>> algorithm = sf.one_shot(0.5, norms, pattern=mlp)
    >>> norms(algorithm.init(params), (), 0)
    {'up': tensor([5.0000, 1.4142])}
    >>> algorithm.update(algorithm.init(params), params, 0).masks["down"]
    tensor([[ True, False]])

    The first example is Molchanov et al. 2019, arXiv 1906.10771.
    """
    check_units("by_unit", pattern)
    check_call("fn", fn, "scores")

    def values_of(path: str, units: Units, x: Tensor) -> Tensor:
        def checked(rows: Tensor) -> Tensor:
            made: object = fn(rows)
            if not isinstance(made, Tensor) or made.shape != rows.shape[:-1]:
                raise ValueError(
                    f"by_unit: expected {shown(fn)} to give shape "
                    f"{tuple(rows.shape[:-1])} of {tuple(rows.shape)} at {path!r}, got "
                    f"{_shape_of(made)}"
                )
            return made

        return to_rows(units, x, checked)

    def of_leaf(path: str, weight: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        units = units_of_leaves(pattern, {path: value})[path]
        return from_rows(units, values_of(path, units, value))

    def change(values: Tree, state: State, step: Step) -> Tree:
        if isinstance(pattern, TiedPattern):
            return of_tied_units(values_of, pattern, state, values)
        return of_sparsified(of_leaf, state, values, reader="by_unit")

    made = _changed("by_unit", score, change)
    if not isinstance(pattern, TiedPattern):
        return made
    if isinstance(made, Accumulated):
        return made._replace(value=OfUnits(pattern, made.value))
    return OfUnits(pattern, made)


def _shape_of(made: object) -> str:
    if isinstance(made, Tensor):
        return f"shape {tuple(made.shape)}"
    return type(made).__name__
