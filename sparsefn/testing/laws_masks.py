"""Laws on which weights are kept: how many, which ones, and what may change from one
update to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import optree
import torch

from sparsefn.core.state import Accumulated, State
from sparsefn.masks.budgets.distributions import Global
from sparsefn.testing import oracle
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import (
    algorithm_of,
    bits_of,
    equal,
    leaves,
    sparse,
    states_of,
    updates,
)
from sparsefn.testing.meta import Exchange, Meta, Row
from sparsefn.typing import Score, Tree

Counts = list[int]


class Rivals(NamedTuple):
    """Units that compete, whether each is active, and the scores of a tree for them."""

    units: list[oracle.Unit]
    meta: Meta

    def active(self, state: State) -> list[bool]:
        kept = {
            path: mask.reshape(-1).tolist()
            for path, mask in leaves(state.masks).items()
        }
        return [
            oracle.is_active(self.meta.layout, kept[path], unit)
            for path, unit in self.units
        ]

    def scores(self, tree: Tree) -> list[float]:
        values = {
            path: leaf.double().reshape(-1).tolist()
            for path, leaf in leaves(tree).items()
        }
        return [oracle.score(self.meta.layout, values, unit) for unit in self.units]


def rivals_of(meta: Meta, state: State) -> list[Rivals]:
    return [
        Rivals(units, meta)
        for units in oracle.competing_units(meta.layout, _shapes(state), meta.joint)
    ]


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {path: tuple(mask.shape) for path, mask in sparse(state).items()}


def _transitions(
    case: Case, states: list[State]
) -> Iterator[tuple[int, State, Tree, State]]:
    """(step, state before, grads, state after) of every update."""
    return zip(range(len(case.grads)), states, case.grads, states[1:], strict=False)


# ---- how many ------------------------------------------------------------------------


def goals_of(meta: Meta, state: State, sparsity: float) -> Counts:
    """The kept count of every competition at a sparsity.

    It is only the total if `Meta` promises no more.
    """
    shapes = _shapes(state)
    groups = {
        path: oracle.unit_groups(meta.layout, shape) for path, shape in shapes.items()
    }
    sizes = {path: sum(map(len, found)) for path, found in groups.items()}
    if meta.layout.fixed is not None:
        return [
            oracle.fixed(meta.layout, shapes[path]) or 0
            for path, found in groups.items()
            for _ in found
        ]
    if meta.joint:
        return [
            sum(sizes.values()) - oracle.half_to_even(sparsity, sum(sizes.values()))
        ]
    counts = meta.distribution(
        {
            path: oracle.budget_shape(meta.layout, shape)
            for path, shape in shapes.items()
        },
        sparsity,
    )
    goals = [
        n
        for path, found in groups.items()
        for n in oracle.even_shares(int(counts[path]), len(found))
    ]
    return [sum(goals)] if meta.total else goals


def counts_of(meta: Meta, state: State) -> Counts:
    counts = [sum(rivals.active(state)) for rivals in rivals_of(meta, state)]
    return [sum(counts)] if meta.total else counts


def expected_counts(row: Row, case: Case) -> Iterator[tuple[str, Counts, Counts]]:
    """After init and each update: its name, how many units the masks keep, and how many
    the sparsity says.
    """
    meta = row.meta
    level = meta.level(case.sparsity)
    first, *states = states_of(row, case)
    sizes = [len(rivals.units) for rivals in rivals_of(meta, first)]
    if meta.start == "dense":
        expected = [sum(sizes)] if meta.total else sizes
    else:
        expected = goals_of(meta, first, float(level(0)))
    yield "after init", counts_of(meta, first), expected
    for step, state in enumerate(states):
        if meta.when(step) and meta.exact_count == "relative":
            expected = [
                n - oracle.half_to_even(float(level(step)), n) for n in expected
            ]
        elif meta.when(step):
            goals = goals_of(meta, state, float(level(step)))
            # Masks that only shrink cannot follow a budget whose rounding would have a
            # leaf gain a unit.
            if meta.monotone:
                expected = [min(n, m) for n, m in zip(goals, expected, strict=True)]
            else:
                expected = goals
        yield f"after step {step}", counts_of(meta, state), expected


def counts_are_exact(row: Row, case: Case) -> None:
    """Kept units are as many as the sparsity says, to the unit, after init and after
    every trigger.
    """
    for when, counted, expected in expected_counts(row, case):
        assert counted == expected, f"{when}: {counted} kept, expected {expected}"


def floors_are_respected(row: Row, case: Case) -> None:
    """In one competition over all leaves, each leaf keeps at least its floor and at
    most its ceiling.
    """
    assert isinstance(row.meta.distribution, Global)
    floor = row.meta.distribution.floor
    ceiling = row.meta.distribution.ceiling
    for state in updates(algorithm_of(row, case), case):
        (rivals,) = rivals_of(row.meta, state)
        active = rivals.active(state)
        for path in sparse(state):
            flags = [
                flag
                for (own, _), flag in zip(rivals.units, active, strict=True)
                if own == path
            ]
            least = math.ceil(floor * len(flags))
            most = math.floor(ceiling * len(flags))
            assert least <= sum(flags) <= most, (
                f"{path} keeps {sum(flags)} of {len(flags)}, not {least} to {most}"
            )


def units_are_whole(row: Row, case: Case) -> None:
    """A unit of the pattern is kept or pruned as one."""
    for state in updates(algorithm_of(row, case), case):
        kept = {path: mask.reshape(-1).tolist() for path, mask in sparse(state).items()}
        for rivals in rivals_of(row.meta, state):
            for path, unit in rivals.units:
                assert len({kept[path][i] for i in unit}) == 1, (
                    f"a unit of {path} is kept in part"
                )


# ---- which ones ----------------------------------------------------------------------


def _read(
    role: str,
    score: Score,
    before: State,
    after: State,
    grads: Tree,
    step: int,
) -> Tree:
    """A score as the algorithm read it: its memory has been advanced by then."""
    if isinstance(score, Accumulated):
        return score.value(after.scores[role], before, grads, step)
    return score(before, grads, step)


def the_best_are_kept(row: Row, case: Case) -> None:
    """No kept unit loses to a pruned unit that could have been kept: by score, NaN
    last, then the lower index.
    """
    meta = row.meta
    states = states_of(row, case)
    if meta.start == "magnitude":
        _check_best(meta, states[0], optree.tree_map(torch.abs, case.params), None)
    for step, before, grads, after in _transitions(case, states):
        if meta.score is not None and meta.when(step):
            scores = _read("score", meta.score, before, after, grads, step)
            _check_best(meta, after, scores, before if meta.monotone else None)


def _check_best(meta: Meta, state: State, scores: Tree, among: State | None) -> None:
    for rivals in rivals_of(meta, state):
        active = rivals.active(state)
        if among is None:
            eligible = [True] * len(active)
        else:
            eligible = rivals.active(among)
        wanted = oracle.best_of(rivals.scores(scores), eligible, sum(active))
        kept = {i for i, flag in enumerate(active) if flag}
        assert kept == wanted, (
            f"kept {sorted(kept)}, the best are {sorted(wanted)} by "
            f"{rivals.scores(scores)}"
        )


def the_worst_are_exchanged(row: Row, case: Case) -> None:
    """The worst kept units are dropped, as many as the fraction says, and the best of
    the free units grow.
    """
    meta = row.meta
    exchange = row.meta.exchange
    assert exchange is not None
    for step, before, grads, after in _transitions(case, states_of(row, case)):
        if not meta.when(step):
            continue
        drops = _read("drop", exchange.drop, before, after, grads, step)
        if exchange.grow is None:
            grows = None
        else:
            grows = _read("grow", exchange.grow, before, after, grads, step)
        for rivals in rivals_of(meta, before):
            had = rivals.active(before)
            has = rivals.active(after)
            lost = _lost(meta, exchange, step, sum(had), sum(has), len(had))
            stay = oracle.best_of(rivals.scores(drops), had, sum(had) - lost)
            kept = {i for i, flag in enumerate(has) if flag}
            assert stay <= kept, f"step {step}: {sorted(stay - kept)} had to stay"
            if grows is None:
                continue
            free = [
                not (flag if exchange.exclude else i in stay)
                for i, flag in enumerate(had)
            ]
            wanted = stay | oracle.best_of(
                rivals.scores(grows), free, sum(has) - len(stay)
            )
            assert kept == wanted, (
                f"step {step}: kept {sorted(kept)}, expected {sorted(wanted)}"
            )


def _lost(
    meta: Meta,
    exchange: Exchange,
    step: int,
    had: int,
    goal: int,
    size: int,
) -> int:
    lost = oracle.half_to_even(float(exchange.fraction(step)), had)
    if meta.total and not meta.joint:
        goal = had  # the leaf's count depends on its share of the regrowth
    if exchange.exclude:
        lost = min(lost, max(size - goal, 0))
    return min(max(lost, had - goal), had)


# ---- from one update to the next -----------------------------------------------------


def masks_only_shrink(row: Row, case: Case) -> None:
    """No pruned weight comes back, even if the weights off the mask were changed from
    outside.
    """
    algorithm = algorithm_of(row, case)
    state = algorithm.init(case.params)
    for step, grads in enumerate(case.grads):
        tampered = optree.tree_map(
            lambda p, m, g: torch.where(m, p, 7 + g.abs()) if m.ndim else p,
            state.params,
            state.masks,
            grads,
        )
        before = state
        state = algorithm.update(state._replace(params=tampered), grads, step)
        for path, mask in sparse(state).items():
            back = mask & ~leaves(before.masks)[path]
            assert not back.any(), (
                f"step {step}: {path} gained {back.nonzero().tolist()}"
            )


def exchanges_conserve(row: Row, case: Case) -> None:
    """As many weights grow as are dropped, at most the fraction; grown weights are
    zero, other weights keep their values.
    """
    meta = row.meta
    exchange = row.meta.exchange
    assert exchange is not None
    for step, before, _, after in _transitions(case, states_of(row, case)):
        if meta.when(step):
            fraction = float(exchange.fraction(step))
        else:
            fraction = 0.0
        balance = []
        for rivals in rivals_of(meta, before):
            pairs = list(zip(rivals.active(before), rivals.active(after), strict=True))
            gone = sum(a and not b for a, b in pairs)
            come = sum(b and not a for a, b in pairs)
            most = oracle.half_to_even(fraction, sum(a for a, _ in pairs))
            assert gone <= most, f"step {step}: {gone} went, at most {most} may"
            balance.append(come - gone)
        if meta.total:
            balance = [sum(balance)]
        assert not any(balance), f"step {step}: more or fewer came than went: {balance}"
        _check_values(before, after)


def _check_values(before: State, after: State) -> None:
    masks = leaves(before.masks)
    old = leaves(before.params)
    new = leaves(after.params)
    for path, mask in sparse(after).items():
        grown = mask & ~masks[path]
        stayed = mask & masks[path]
        assert not bits_of(new[path])[grown].any(), (
            f"{path}: a grown weight does not start at zero"
        )
        assert equal(new[path][stayed], old[path][stayed]), (
            f"{path}: a weight that stayed has changed"
        )
