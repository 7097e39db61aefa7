"""Laws of tied sets that meet in leaves and lie anyhow, against brute force."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.core.state import Algorithm
from sparsefn.core.tree import Leaves
from sparsefn.masks.patterns import Pattern

Member = tuple[str, int, list[int]]


class Model(NamedTuple):
    """Leaves, the members of some sets, and how many units each has."""

    params: Leaves
    grads: Leaves
    sets: list[list[Member]]
    units: list[int]

    @property
    def pattern(self) -> Pattern:
        return sf.patterns.tied(
            [[list(member) for member in members] for members in self.sets],
            reduce="sum",
        )

    @property
    def meet(self) -> bool:
        paths = [path for members in self.sets for path, *_ in members]
        return len(set(paths)) < len(paths)


@st.composite
def models(draw: st.DrawFn) -> Model:
    shapes = draw(
        st.lists(
            st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4
        )
    )
    values = [
        st.lists(st.integers(-3, 3), min_size=(n := torch.Size(s).numel()), max_size=n)
        for s in shapes
    ]
    params, grads = (
        {
            f"{i}": torch.tensor(draw(some), dtype=torch.float32).reshape(s)
            for i, (some, s) in enumerate(zip(values, shapes, strict=True))
        }
        for _ in range(2)
    )
    sets, units = [], []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 3))
        places = [
            (f"{i}", d, size)
            for i, shape in enumerate(shapes)
            for d, size in enumerate(shape)
            if size >= n
        ]
        assume(places)
        chosen = draw(
            st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True)
        )
        sets.append([(path, d, draw(numbers(n, size))) for path, d, size in chosen])
        units.append(n)
    model = Model(params, grads, sets, units)
    try:
        sf.static(0.0, pattern=model.pattern, where="*").init(params)
    except ValueError as error:
        assume("for all combinations of units" not in str(error))
        raise
    return model


@st.composite
def numbers(draw: st.DrawFn, units: int, size: int) -> list[int]:
    rest = draw(
        st.lists(
            st.integers(-1, units - 1), min_size=size - units, max_size=size - units
        )
    )
    return list(draw(st.permutations([*range(units), *rest])))


def entries(
    model: Model, members: list[Member], unit: int, leaves: Leaves
) -> torch.Tensor:
    """The entries of a unit."""
    rows = [
        leaves[path].movedim(d, 0)[torch.tensor(each) == unit].reshape(-1)
        for path, d, each in members
    ]
    return torch.cat(rows)


def kept(model: Model, masks: Leaves) -> list[list[bool]]:
    """Which units are kept, after checking that each mask is where all units of an
    entry are.
    """
    flags = [
        [bool(entries(model, s, u, masks).any()) for u in range(n)]
        for s, n in zip(model.sets, model.units, strict=True)
    ]
    whole = {
        path: torch.ones_like(leaf, dtype=torch.bool)
        for path, leaf in model.params.items()
    }
    for members, own in zip(model.sets, flags, strict=True):
        for path, d, each in members:
            line = torch.tensor([own[unit] if unit >= 0 else True for unit in each])
            whole[path] &= line.reshape(
                [-1 if i == d else 1 for i in range(whole[path].ndim)]
            )
    for path, mask in masks.items():
        assert torch.equal(mask.expand(whole[path].shape), whole[path])
    return flags


def goal(model: Model, n: int, sparsity: float) -> int:
    return max(sf.budgets.n_kept(n, sparsity), int(model.meet))


def states(algorithm: Algorithm, model: Model) -> list[sf.State]:
    made = [algorithm.init(model.params)]
    for step in range(3):
        made.append(algorithm.update(made[-1], model.grads, step))
    return made


SPARSITIES = st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])


@given(models(), SPARSITIES)
def test_counts_are_exact_and_masks_are_those_of_whole_units(
    model: Model, sparsity: float
) -> None:
    rise = sf.schedules.polynomial(0.0, sparsity, begin=0, end=2)
    for algorithm in (
        sf.gmp(rise, pattern=model.pattern, where="*", init="dense"),
        sf.rigl(
            sparsity,
            pattern=model.pattern,
            where="*",
            when=sf.always(),
            drop_fraction=0.5,
        ),
        sf.rigl(
            sparsity,
            pattern=model.pattern,
            where="*",
            when=sf.always(),
            drop_fraction=1.0,
            restart_dropped=True,
        ),
    ):
        flags = [kept(model, state.masks) for state in states(algorithm, model)][-1]
        assert [sum(own) for own in flags] == [
            goal(model, n, sparsity) for n in model.units
        ]


@given(models(), SPARSITIES)
def test_the_best_units_are_kept(model: Model, sparsity: float) -> None:
    algorithm = sf.one_shot(sparsity, pattern=model.pattern, where="*")
    state = algorithm.update(algorithm.init(model.params), model.grads, 0)
    for members, own in zip(model.sets, kept(model, state.masks), strict=True):
        scores = [
            float(entries(model, members, u, model.params).abs().sum())
            for u in range(len(own))
        ]
        order = sorted(range(len(own)), key=lambda u: (-scores[u], u))
        assert sorted(order[: sum(own)]) == [u for u, flag in enumerate(own) if flag]


@given(models(), SPARSITIES)
def test_scores_of_units_are_remembered_and_the_best_units_are_kept(
    model: Model, sparsity: float
) -> None:
    pattern = model.pattern
    unit = sf.scores.by_unit(
        sf.scores.movement, pattern, lambda rows: rows.sum(-1).square()
    )
    score = sf.scores.sum(unit)
    algorithm = sf.one_shot(
        sparsity, score, pattern=pattern, where="*", when=sf.at([1])
    )
    state, taken = algorithm.init(model.params), [model.grads, model.params]
    for step, grads in enumerate(taken):
        state = algorithm.update(state, grads, step)
    values = score.value(state.scores["score"], state, (), 1)
    assert len(values) == len(model.sets)
    flags = kept(model, state.masks)
    for members, own, found in zip(model.sets, flags, values.values(), strict=True):
        products = [
            {path: w * grads[path] for path, w in model.params.items()}
            for grads in taken
        ]
        for u in range(len(own)):
            assert float(found[u]) == sum(
                float(entries(model, members, u, some).sum()) ** 2 for some in products
            )
        order = sorted(range(len(own)), key=lambda u: (-float(found[u]), u))
        assert sorted(order[: sum(own)]) == [u for u, flag in enumerate(own) if flag]


@given(models(), SPARSITIES)
def test_one_competition_keeps_its_total(model: Model, sparsity: float) -> None:
    algorithm = sf.one_shot(
        sparsity, pattern=model.pattern, where="*", distribution=sf.budgets.global_()
    )
    flags = kept(
        model, algorithm.update(algorithm.init(model.params), model.grads, 0).masks
    )
    least = len(model.sets) if model.meet else 0
    assert sum(map(sum, flags)) == max(
        sf.budgets.n_kept(sum(model.units), sparsity), least
    )
    assert not model.meet or all(map(any, flags))


@given(models(), SPARSITIES)
def test_vmap_is_a_loop(model: Model, sparsity: float) -> None:
    algorithm = sf.rigl(
        sparsity, pattern=model.pattern, where="*", when=sf.always(), drop_fraction=0.5
    )
    both = [model.params, model.grads]
    stacked = torch.func.vmap(
        lambda w: algorithm.update(algorithm.init(w), w, 0).masks
    )(sf.ensemble.stack(both))
    for i, weights in enumerate(both):
        alone = algorithm.update(algorithm.init(weights), weights, 0).masks
        assert sf.checkpoint.tree_equal(
            {path: mask[i] for path, mask in stacked.items()}, alone
        )


@given(models(), SPARSITIES)
def test_given_masks_of_whole_units_are_taken_and_others_refused(
    model: Model, sparsity: float
) -> None:
    masks = (
        sf.static(sparsity, pattern=model.pattern, where="*").init(model.params).masks
    )
    given_ = sf.static(None, pattern=model.pattern, where="*", init=masks)
    assert sf.checkpoint.tree_equal(given_.init(model.params).masks, masks)
    for path, mask in masks.items():
        if mask.ndim and int(mask.sum()) > 1:
            part = mask.clone().reshape(-1)
            part[int(part.nonzero()[0])] = False
            other = {**masks, path: part.reshape(mask.shape)}
            try:
                sf.static(None, pattern=model.pattern, where="*", init=other).init(
                    model.params
                )
            except ValueError as error:
                assert "expected masks that prune whole units" in str(error)
            else:
                kept(model, other)  # the entry was a unit
