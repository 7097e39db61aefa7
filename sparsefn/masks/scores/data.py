"""Scores that read calibration data: the sizes of weights and of their inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real, as_matrix, flags_of, sqrt
from sparsefn.core.checks import described, number
from sparsefn.core.state import PlainScore, State, Step
from sparsefn.core.tree import Tree, wide
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.masks.patterns.tied_sets import TiedPattern, TiedUnits
from sparsefn.masks.patterns.units import units_of_leaves
from sparsefn.masks.scores.per_leaf import of_sparsified
from sparsefn.masks.scores.score_types import OfInputs, OfUnits
from sparsefn.masks.scores.unit_values import of_tied_units

# of leaves, by path, as sf.calibration.inputs gives them
Stats = Mapping[str, Mapping[str, Tensor]]
MENDS = (
    "give more data, leave the leaf out with where=, or prune it by size with "
    "sf.calibration.fill_unreached(stats)"
)
UNREACHED = f"no input of the calibration data reached it: {MENDS}"


@described
def wanda(stats: Stats) -> PlainScore:
    """|weight| * sqrt(square / count): the size of a weight times its input's norm.

    >>> model, x = (
    ...     torch.nn.Linear(3, 2, bias=False),
    ...     torch.tensor([[1.0, 3.0, 0.0], [2.0, 4.0, 1.0]]),
    ... )
    >>> state = sf.dense().init(
    ...     {"weight": torch.tensor([[4.0, 1.0, 3.0], [1.0, 5.0, 2.0]])}
    ... )
    >>> prune = sf.one_shot(
    ...     1 / 3,
    ...     sf.scores.wanda(sf.calibration.inputs(model, state, x, of="square")),
    ...     pattern=sf.patterns.row_balanced(),
    ... )
    >>> prune.update(prune.init(state.params), state.params, 0).masks["weight"]
    tensor([[ True,  True, False],
            [ True,  True, False]])

    Args:
        stats: Statistics by path, from `sf.calibration.inputs`, with "square".

    Returns:
        A score. Leaves that are not sparsified score 0. 16-bit weights are scored in
        float32.

    Raises:
        TypeError: `stats` are not by path.
        ValueError: A sparsified leaf has no statistics, or statistics of another shape,
            of fewer than two inputs or not finite; or the groups of the pattern cross
            outputs without being the whole leaf, as `nm` along them. It names the path.

    In the paper weights compete inside of their output:
    `pattern=sf.patterns.row_balanced()`, or `nm`.

    Sun et al. 2023, arXiv 2306.11695, eq. 1.
    """
    return _scored("wanda", stats, _wanda)


@described
def ria(stats: Stats, power: Real = 0.5) -> PlainScore:
    """Relative importance and activations: a weight's shares and the norm of its input.

    >>> state = sf.one_shot(0.5).init(
    ...     {"w": torch.tensor([[4.0, 1.0, 3.0], [1.0, 5.0, 2.0]])}
    ... )
    >>> stats = {
    ...     "w": {"count": torch.tensor(2), "square": torch.tensor([10.0, 50.0, 2.0])}
    ... }
    >>> sf.scores.ria(stats)(state, (), 0)["w"]
    tensor([[1.9440, 0.6522, 0.9750],
            [0.4860, 3.2609, 0.6500]])

    Args:
        stats: Statistics by path, as for `wanda`.
        power: The exponent of the norm, a number or a 0-d tensor. With 0 the data does
            not matter.

    Returns:
        A score, (|weight| / sum over its column + |weight| / sum over its row) *
        sqrt(square / count) ** power. A weight of 0 scores 0. Other leaves and dtypes
        are as in `wanda`.

    Raises:
        TypeError: `stats` are not by path, or `power` is not a number.
        ValueError: As for `wanda`, or `power` is not finite.

    Zhang et al. 2024, "Plug-and-Play: An Efficient Post-training Pruning Method for
    Large Language Models", ICLR.
    """
    exponent = number("power", power)

    def importance(weight: Tensor, norm: Tensor) -> Tensor:
        size = weight.abs()
        shares = [
            torch.where(size > 0, size / size.sum(dim, keepdim=True), size)
            for dim in (-2, -1)
        ]
        return (shares[0] + shares[1]) * norm**exponent

    return _scored("ria", stats, importance)


@described
def reap(stats: Stats, pattern: Pattern) -> OfUnits:
    """Router-weighted expert activation pruning: a score for each expert.

    >>> stats = {
    ...     "experts": {
    ...         "count": torch.tensor([2, 1, 0]),
    ...         "norm": torch.tensor([3.0, 2.0, 0.0]),
    ...     }
    ... }
    >>> pattern = sf.patterns.tied([["router", 0], ["experts", 0]])
    >>> prune = sf.one_shot(2 / 3, sf.scores.reap(stats, pattern), pattern=pattern)
    >>> params = {"router": torch.ones(3, 4), "experts": torch.ones(3, 5, 4)}
    >>> prune.update(prune.init(params), params, 0).masks["experts"][:, 0, 0]
    tensor([False,  True, False])

    Args:
        stats: Statistics by path, from `sf.calibration.experts`.
        pattern: An `sf.patterns.tied` pattern whose units are experts: one of the
            leaves of each set has statistics.

    Returns:
        A score of units, by the name of the set, the mean over an expert's tokens of
        weight times norm of its output. An expert to which no token was routed scores
        0, and so do sets that are not sparsified.

    Raises:
        TypeError: `stats` are not by path.
        ValueError: `pattern` is of another kind, no leaf of a set has statistics, units
            are no experts, or statistics are of no token or not finite. It names the
            path.

    In the paper the experts of a layer compete, as they do by default.
    `sf.shrinking.without_experts` removes the pruned experts.

    Lasby et al. 2025, arXiv 2510.13999, eq. 9.
    """
    faults = _faults("reap", stats)
    if not isinstance(pattern, TiedPattern):
        raise ValueError(
            "reap: expected a pattern of tied sets, sf.patterns.tied, whose units "
            f"are experts, got {pattern}"
        )

    def of_experts(name: str, units: TiedUnits, rows: Tensor) -> Tensor:
        place = next((place for place in units.places if place.path in stats), None)
        if place is None:
            raise ValueError(
                f"reap: no data for the experts of {name!r}, but for "
                f"{', '.join(sorted(stats))}"
            )
        if place.path in faults:
            raise ValueError(faults[place.path])
        count, norm = (stats[place.path][key] for key in ("count", "norm"))
        if place.dim or count.shape != (place.units,) or place.shape[0] != place.units:
            raise ValueError(
                f"reap: expected units that are the {len(count)} experts along "
                f"dimension 0 of {place.path!r}, got {place.units} units along "
                f"dimension {place.dim}"
            )
        values = torch.where(count > 0, norm / count.clamp(min=1), 0).to(rows)
        if place.taken is None:
            return values[None]
        return values[None, torch.from_numpy(place.taken).to(values.device)]

    def values(state: State, grads: Tree, step: Step) -> Tree:
        return of_tied_units(of_experts, pattern, state, state.params, alike="reap")

    return OfUnits(pattern, values)


def _scored(
    name: str, stats: Stats, score: Callable[[Tensor, Tensor], Tensor]
) -> PlainScore:
    faults = _faults(name, stats)

    def of_leaf(path: str, weight: Tensor, mask: Tensor) -> Tensor:
        if path not in stats or path in faults:
            missing = (
                f"{name}: no data for the leaf {path!r}, but for {len(stats)} others"
            )
            raise ValueError(faults.get(path, missing))
        return _of_inputs(name, path, stats[path], weight, score)

    def check(pattern: Pattern, path: str, leaf: Tensor) -> None:
        if path in stats and path not in faults:
            _check_rows(name, pattern, path, leaf, stats[path])

    return OfInputs(
        check, lambda state, grads, step: of_sparsified(of_leaf, state, reader=name)
    )


def _check_rows(
    name: str,
    pattern: Pattern,
    path: str,
    leaf: Tensor,
    stats: Mapping[str, Tensor],
) -> None:
    # Weights of several outputs may compete in all of the leaf, but not in parts of it
    # that are no outputs.
    units = units_of_leaves(pattern, {path: leaf})[path]
    shape = tuple(leaf.shape)
    outputs = _output_axes(shape, stats)
    crosses = any(units.group[axis] > 1 for axis in outputs)
    if not units.single or units.group == shape or not crosses:
        return
    one = outputs[0] if len(outputs) == 1 else tuple(outputs)
    inputs = next(axis for axis in range(len(shape)) if axis not in outputs)
    raise ValueError(
        f"{name}: expected weights to compete inside of their output, but {pattern} "
        f"crosses outputs of {path!r}, which lie along {one} of its shape {shape}: "
        f"give row_balanced(axis={one}) or nm(n, m, axis={inputs})"
    )


def _output_axes(shape: tuple[int, ...], stats: Mapping[str, Tensor]) -> list[int]:
    """The axes of a weight along which its outputs lie, as `as_matrix` takes them."""
    count = stats["count"]
    square = stats["square"]
    axes = list(range(len(shape)))
    if square.ndim == count.ndim + 2:  # stored as (inputs, outputs)
        axes[-2:] = reversed(axes[-2:])
    row = math.prod(shape[axis] for axis in axes[1:])
    if square.ndim > count.ndim:
        width = square.shape[count.ndim]
    else:
        width = 0
    if width == row:
        return axes[:1]
    return sorted(axes[:-1])


def wanda_of(path: str, stats: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """The scores of `wanda` for one leaf.

    >>> wanda_of(
    ...     "w",
    ...     {"count": torch.tensor(2), "square": torch.tensor([2.0, 8.0])},
    ...     torch.tensor([[1.0, -3.0]]),
    ... )
    tensor([[1., 6.]])
    """
    for fault in _faults("wanda", {path: stats}).values():
        raise ValueError(fault)
    return _of_inputs("wanda", path, stats, weight, _wanda)


def _wanda(weight: Tensor, norm: Tensor) -> Tensor:
    return weight.abs() * norm


def _of_inputs(
    name: str,
    path: str,
    stats: Mapping[str, Tensor],
    leaf: Tensor,
    score: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    try:
        weight, restore = as_matrix(wide(leaf.detach()), stats)
    except ValueError as error:
        raise ValueError(f"{name}: at {path!r}, {error}") from None
    count = stats["count"]
    width = weight.shape[-1]
    square = stats["square"].reshape(*count.shape, 1, width)
    norm = sqrt(square / count[..., None, None])
    return restore(score(weight, norm.to(weight.dtype)))


def check_stats(name: str, stats: object, source: str = "inputs") -> None:
    """Raise TypeError for statistics that are not by path.

    >>> check_stats("wanda", torch.ones(2))
    Traceback (most recent call last):
        ...
    TypeError: wanda: expected stats by path, of sf.calibration.inputs, got Tensor
    """
    if not isinstance(stats, Mapping):
        raise TypeError(
            f"{name}: expected stats by path, of sf.calibration.{source}, got "
            f"{type(stats).__name__}"
        )


def _faults(name: str, stats: Stats) -> dict[str, str]:
    # What is wrong with the statistics of each leaf. Values are read here, as scores
    # may be computed in a transform.
    faults = {}
    check_stats(name, stats, "experts" if name == "reap" else "inputs")
    key = "norm" if name == "reap" else "square"
    flags: dict[str, list[Tensor]] = {}
    for path, of in stats.items():
        missing = [one for one in ("count", key) if one not in of]
        if missing:
            faults[path] = (
                f"{name}: expected {missing[0]!r} in the statistics at {path!r}, got "
                f"{', '.join(of)}"
            )
        else:
            reached = of["count"] > 0
            flags[path] = [
                reached.any() if name == "reap" else reached.all(),
                (of["count"] > 1).all(),
                of[key].isfinite().all(),
            ]
    # a device is waited for once
    known = iter(flags_of(list(itertools.chain.from_iterable(flags.values()))))
    for path in flags:
        reaches, repeats, finite = itertools.islice(known, 3)
        if not reaches and name == "reap":
            faults[path] = (
                f"reap: no data for the experts of {path!r}: no token was routed to any"
            )
        elif not reaches:
            some = " some outputs of" if stats[path]["count"].ndim else ""
            faults[path] = f"{name}: no data for{some} the leaf {path!r}: {UNREACHED}"
        elif not repeats and name != "reap":
            faults[path] = (
                f"{name}: expected more than one calibration input at {path!r}, got "
                f"1: {MENDS}"
            )
        elif not finite:
            faults[path] = (
                f"{name}: expected finite statistics at {path!r}, got NaN or infinity"
            )
    return faults
