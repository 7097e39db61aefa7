"""Scores with one value for each unit of tied sets: its entries lie in several leaves,
and may be in other units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse
from sparsefn.core.checks import described, shown
from sparsefn.core.state import Accumulated, State, Step
from sparsefn.core.tree import Leaves, Tree, check_like, flatten, wide
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.masks.patterns.tied_sets import TiedPattern, TiedUnits
from sparsefn.masks.scores.score_types import OfUnits

# (name of a set, its units, their entries as rows) -> a value for each unit, (1, units)
OfRows = Callable[[str, TiedUnits, Tensor], Tensor]


def zeros_of_units(pattern: TiedPattern, params: Tree) -> Leaves:
    """A zero for each unit of tied sets, in float32 or wider, by the name of the set.

    >>> zeros_of_units(
    ...     sf.patterns.tied([["a", 0], ["b", 1]]),
    ...     {"a": torch.ones(2), "b": torch.ones(3, 2)},
    ... )
    {'a': tensor([0., 0.])}
    """
    leaves = flatten(params)[0]
    made = {}
    for name, units in pattern.sets(leaves).items():
        own = [leaves[place.path] for place in units.places]
        dtype = functools.reduce(
            torch.promote_types, [leaf.dtype for leaf in own], torch.float32
        )
        made[name] = own[0].new_zeros(units.rows[1], dtype=dtype)
    return made


def scored_units(score: object) -> OfUnits | None:
    """The score of units by which a score is read, with memory or an absolute one, too;
    None for a score of entries.

    >>> scored_units(sf.scores.magnitude) is None
    True
    """
    value = read_score(score)
    return value if isinstance(value, OfUnits) else None


def read_score(score: object) -> object:
    """The function that a score with memory, or an absolute one, reads its values with.

    >>> read_score(sf.scores.absolute(sf.scores.saliency)) == read_score(
    ...     sf.scores.saliency
    ... )
    True
    """
    value = score.value if isinstance(score, Accumulated) else score
    return getattr(value, "signed", value)


def check_units(name: str, pattern: object) -> None:
    """Raise for anything but a pattern whose units have several entries.

    >>> check_units("by_unit", sf.patterns.channel(0))
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"{name}: expected pattern to be one such as sf.patterns.channel(0), got "
            f"{pattern!r}"
        )
    if pattern.reduce is None:
        raise ValueError(
            f"{name}: expected a pattern whose units have several entries, got "
            f"{pattern}"
        )


def of_tied_units(
    fn: OfRows,
    pattern: TiedPattern,
    state: State,
    values: Tree,
    alike: str = "",
) -> Leaves:
    """What a function makes of the entries of each unit in a tree like params; 0 for
    sets that are not sparsified.

    >>> params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0, 4.0]])}
    >>> state = sf.State(params, {path: x == x for path, x in params.items()})
    >>> of_tied_units(
    ...     lambda name, units, rows: rows.sum(1)[None],
    ...     sf.patterns.tied([["a", 0], ["b", 1]]),
    ...     state,
    ...     params,
    ... )
    {'a': tensor([4., 6.])}

    It gets some units at a time where they differ in how many entries they have; for
    one that is named `alike`, which compares units, they may not.
    """
    check_like("scores", values, state.params, dtype=False)
    leaves, given, masks = (
        flatten(tree)[0] for tree in (state.params, values, state.masks)
    )
    given = {path: wide(x.detach()) for path, x in given.items()}
    made = {}
    for name, units in pattern.sets(leaves).items():
        if alike and len(units.classes) > 1:
            raise ValueError(
                f"{alike}: expected units that have as many entries in each leaf, but "
                f"units of the tied set of {name!r} have not: leave it out of the "
                "pattern"
            )
        if all(
            is_sparse(masks[place.path], leaves[place.path]) for place in units.places
        ):
            made[name] = units.read(given, functools.partial(fn, name)).reshape(-1)
        else:
            made[name] = given[units.places[0].path].new_zeros(units.rows[1])
    return made


@described
def of_units(values: Tensor | Mapping[str, Tensor], pattern: Pattern) -> OfUnits:
    """A score that is known: a number for each unit of tied sets.

    >>> params = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(1)}
    >>> layers = sf.patterns.tied([["a", None, 0], ["b", None, 1], ["c", None, 2]])
    >>> score = sf.scores.of_units(torch.tensor([0.3, 0.1, 0.2]), layers)
    >>> prune = sf.one_shot(1 / 3, score, pattern=layers)
    >>> prune.update(prune.init(params), params, 0).masks["b"]
    tensor([False, False, False, False])

    Args:
        values: A tensor of one real number for each unit of the only set, (units,); or
            such tensors by the names of the sets, as `sf.patterns.tied_members` has
            them.
        pattern: An `sf.patterns.tied` pattern, as `sf.shrinking.groups` and `layers`
            make it; the algorithm is given the same.

    Returns:
        A score of units, by the name of the set. NaN ranks below every number. Sets
        that are not sparsified score 0.

    Raises:
        TypeError: `values` are no tensors.
        ValueError: `pattern` is of another kind. A call raises it for a sparsified set
            without values, or with another number of them.

    `sf.shrinking.influence` and its neighbours make values for layers.
    """
    if not isinstance(pattern, TiedPattern):
        raise ValueError(
            "of_units: expected a pattern of tied sets, sf.patterns.tied, got "
            f"{pattern}"
        )
    given = values if isinstance(values, Mapping) else {"": values}
    for x in given.values():
        if not isinstance(x, Tensor):
            raise TypeError(
                "of_units: expected a tensor of a number for each unit, or such "
                f"tensors by the names of sets, got {shown(x)}"
            )
    own = {name: x.detach().clone() for name, x in given.items()}

    def values_of(state: State, grads: Tree, step: Step) -> Tree:
        made = zeros_of_units(pattern, state.params)
        leaves, masks = (flatten(tree)[0] for tree in (state.params, state.masks))
        sets = pattern.sets(leaves)
        for name, units in sets.items():
            if all(
                is_sparse(masks[place.path], leaves[place.path])
                for place in units.places
            ):
                made[name] = _known(own, name, made[name], len(sets) == 1)
        return made

    return OfUnits(pattern, values_of)


def _known(own: Leaves, name: str, zeros: Tensor, is_only: bool) -> Tensor:
    # The values of a set, where its zeros are.
    x = own.get(name, own.get("") if is_only else None)
    if x is None:
        got = ", ".join(map(repr, own)) if "" not in own else "one tensor"
        raise ValueError(f"of_units: expected values of the set {name!r}, got {got}")
    if x.shape != zeros.shape:
        raise ValueError(
            f"of_units: expected values of shape {tuple(zeros.shape)} for the units of "
            f"{name!r}, got {tuple(x.shape)}"
        )
    return x.to(zeros.device, torch.promote_types(x.dtype, torch.float32))
