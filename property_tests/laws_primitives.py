"""Laws of the primitives. Each takes the function under test first, so that a broken
one can be shown to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsefn as sf
from property_tests import laws_selection as selection
from sparsefn.testing import oracle
from sparsefn.testing.harness import equal
from sparsefn.testing.strategies import examples

# ---- random --------------------------------------------------------------------------


def draws_depend_on_key_and_index_alone(
    draw: Callable[..., Tensor], example: tuple[int, int, list[int]]
) -> None:
    seed, n, picks = example
    key = sf.random.key(seed)
    whole = draw(key, (n,))
    assert equal(draw(key, (n, 3))[:1].reshape(-1), draw(key, (3,))), (
        "the shape matters"
    )
    assert equal(draw(key, (n // 2,)), whole[: n // 2]), "the number of draws matters"
    index = torch.tensor([pick % n for pick in picks])
    assert equal(draw(key, index.shape, index=index), whole[index]), (
        "other indices matter"
    )
    assert n < 4 or not equal(draw(sf.random.key(seed ^ 1), (n,)), whole), (
        "the key does not matter"
    )


def shards_are_parts_of_the_whole(
    draw: Callable[..., Tensor], example: tuple[int, int, int, int]
) -> None:
    """A leaf cut into shards, each drawn by its global element indices, is the leaf
    drawn as a whole.
    """
    seed, rows, columns, cut = example
    key, index = (
        sf.random.key(seed),
        torch.arange(rows * columns).reshape(rows, columns),
    )
    whole = draw(key, (rows, columns))
    for dim in (0, 1):
        shards = index.tensor_split([cut % index.shape[dim]], dim)
        drawn = torch.cat(
            [draw(key, tuple(shard.shape), index=shard) for shard in shards], dim
        )
        assert equal(drawn, whole), (
            f"shards along dimension {dim} differ from the whole"
        )


def _kept(key: Tensor, shape: tuple[int, ...], index: Tensor | None = None) -> Tensor:
    return sf.random.bernoulli(key, 0.3, shape, index=index)


def folding_is_injective(
    fold_in: Callable[[Tensor, Any], Tensor], example: tuple[int, int]
) -> None:
    seed, start = example
    key = sf.random.key(seed)
    numbers = [*range(start, start + 20), start + 2**16, start + 2**32, -start - 1]
    folded = [tuple(fold_in(key, number).tolist()) for number in numbers]
    folded += [tuple(fold_in(key, str(number)).tolist()) for number in numbers]
    assert len({tuple(key.tolist()), *folded}) == len(folded) + 1, (
        "two numbers or names give one key"
    )
    assert all(
        tuple(fold_in(key, torch.tensor(n)).tolist()) == k
        for n, k in zip(numbers, folded, strict=False)
    )


def split_keys_are_independent(
    split: Callable[[Tensor, int], Tensor], example: tuple[int, int]
) -> None:
    seed, n = example
    key = sf.random.key(seed)
    keys = split(key, n)
    assert torch.equal(split(key, n + 3)[:n], keys), (
        "key i depends on how many there are"
    )
    assert len({tuple(k) for k in [*keys.tolist(), key.tolist()]}) == n + 1, (
        "two keys are the same"
    )
    a, b = ((sf.random.uniform(k, (4096,)) * 8).long() for k in split(key, 2))
    table = torch.bincount(8 * a + b, minlength=64).double()
    # 63 degrees of freedom: above 150 once in 10^8 tables
    chi = float(((table - 64) ** 2 / 64).sum())
    assert chi < 150, f"the streams of two keys are related: chi-square {chi}"


# ---- budgets -------------------------------------------------------------------------


def quotas(
    shares: Mapping[str, float], total: int, caps: Mapping[str, int]
) -> dict[str, Fraction]:
    """The exact real-valued division: in proportion, each at most its cap, the overflow
    to the rest.
    """
    least = Fraction(max(shares.values(), default=0.0)) / 2**400  # less counts as that
    exact = {
        name: max(Fraction(share), least) for name, share in shares.items() if share > 0
    }
    full: dict[str, Fraction] = {}
    while exact:
        left = total - sum(full.values(), Fraction(0))
        level = left / sum(exact.values())
        over = {name for name, share in exact.items() if share * level >= caps[name]}
        if not over:
            return {**full, **{name: share * level for name, share in exact.items()}}
        full |= {name: Fraction(caps[name]) for name in over}
        exact = {name: share for name, share in exact.items() if name not in over}
    return full


class Shares(NamedTuple):
    shares: dict[str, float]
    total: int
    caps: dict[str, int]


def shares_are_handed_out(apportion: Callable[..., Any], example: Shares) -> None:
    shares, total, caps = example
    counts = apportion(shares, total, caps)
    assert sum(counts.values()) == total, f"{counts} is not {total} in all"
    assert all(type(n) is int and 0 <= n <= caps[name] for name, n in counts.items()), (
        f"{counts} exceeds {caps}"
    )
    positive = {name: share for name, share in shares.items() if share > 0}
    for name, quota in quotas(
        positive, min(total, sum(caps[name] for name in positive)), caps
    ).items():
        assert abs(counts[name] - quota) < 1 + 1e-9, (
            f"{name} gets {counts[name]}, its quota is {float(quota)}"
        )
    last = [name for name in shares if name not in positive]
    full = all(counts[name] == caps[name] for name in positive)
    assert full or not any(counts[name] for name in last), (
        "a share of 0 gets something before others are full"
    )
    backwards = {name: shares[name] for name in reversed(shares)}
    assert apportion(backwards, total, caps) == counts, "the order of the dict matters"
    tensor = apportion(
        {
            name: torch.tensor(share, dtype=torch.float64)
            for name, share in shares.items()
        },
        total,
        caps,
    )
    assert {name: int(n) for name, n in tensor.items()} == counts, (
        "tensor shares give other counts"
    )
    hidden = torch.vmap(lambda t: apportion(shares, t, caps))(torch.tensor([total]))
    assert {name: int(n) for name, n in hidden.items()} == counts, (
        "a tensor total gives other counts"
    )


@st.composite
def share_tables(draw: Any) -> Shares:
    names = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True))
    number = st.one_of(
        st.floats(0.0, 8.0),
        st.integers(0, 4).map(float),
        st.sampled_from([5e-324, 1e-310, 1e300, 1.7e308, 0.1, math.nan]),
    )
    caps = {name: draw(st.integers(0, 12)) for name in names}
    return Shares(
        {name: draw(number) for name in names},
        draw(st.integers(0, sum(caps.values()))),
        caps,
    )


def erk_is_the_closed_form(
    erk: Callable[[float], Any],
    example: tuple[dict[str, tuple[int, ...]], float, float],
) -> None:
    """Density in proportion to (sum of dims / product of dims) ** power, at most 1, and
    the exact total.
    """
    sizes, sparsity, power = example
    counts = erk(power)(sizes, sparsity)
    whole = {path: math.prod(shape) for path, shape in sizes.items()}
    total = sum(whole.values()) - oracle.half_to_even(sparsity, sum(whole.values()))
    assert sum(counts.values()) == total, f"{counts} is not {total} in all"
    raw = {
        path: whole[path] * (sum(shape) / math.prod(shape)) ** power
        for path, shape in sizes.items()
    }
    for path, quota in quotas(raw, total, whole).items():
        assert abs(counts[path] - quota) < 1 + 1e-6, (
            f"{path} gets {counts[path]}, the closed form {float(quota)}"
        )


# ---- schedules and triggers ----------------------------------------------------------


class Bounds(NamedTuple):
    low: float
    high: float
    values: dict[int, float]
    falls: bool = False


SCHEDULES: dict[str, tuple[Any, Bounds]] = {
    "constant": (sf.schedules.constant(0.3), Bounds(0.3, 0.3, {0: 0.3, 10**9: 0.3})),
    "polynomial": (
        sf.schedules.polynomial(0.0, 0.9, 10, 50),
        Bounds(0.0, 0.9, {0: 0.0, 10: 0.0, 50: 0.9, 10**12: 0.9}),
    ),
    "cosine_decay": (
        sf.schedules.cosine_decay(0.3, 75),
        Bounds(0.0, 0.3, {0: 0.3, 75: 0.0, 10**9: 0.0}, falls=True),
    ),
    "linear_decay": (
        sf.schedules.linear_decay(0.7, 30, 0.1),
        Bounds(0.1, 0.7, {0: 0.7, 30: 0.1, 31: 0.1}, falls=True),
    ),
    "cosine": (
        sf.schedules.cosine(0.8, 10, 0.1),
        Bounds(0.1, 0.8, {0: 0.8, 10: 0.1, 20: 0.8, 10**9: 0.8}),
    ),
    "exponential": (
        sf.schedules.exponential(0.1, -0.01, 0.9),
        Bounds(0.1, 0.9, {0: 0.1}),
    ),
    "piecewise": (
        sf.schedules.piecewise({0: 0.5, 20: 0.8}),
        Bounds(0.5, 0.8, {0: 0.5, 19: 0.5, 20: 0.8}),
    ),
    "cycling": (
        sf.schedules.cycling([0.5, 0.8], sf.every(7)),
        Bounds(0.5, 0.8, {0: 0.5, 6: 0.5, 7: 0.8, 14: 0.5}),
    ),
}


def schedules_stay_in_bounds(subject: tuple[Any, Bounds], steps: list[int]) -> None:
    schedule, bounds = subject
    values = [schedule(step) for step in steps]
    assert all(type(value) is float for value in values), (
        "an int step does not give a float"
    )
    assert all(bounds.low <= value <= bounds.high for value in values), (
        f"{values} leaves its bounds"
    )
    singles = [schedule(torch.tensor(step)) for step in steps]
    assert all(
        x.dtype == torch.float64 and x.item() == value
        for x, value in zip(singles, values, strict=True)
    ), f"tensor steps give {singles}, ints {values}"
    assert torch.vmap(schedule)(torch.tensor(steps)).tolist() == values, (
        "vmap gives other values"
    )
    assert {step: schedule(step) for step in bounds.values} == bounds.values, (
        "an end is not met"
    )
    ordered = [schedule(step) for step in sorted(steps)]
    assert not bounds.falls or ordered == sorted(ordered, reverse=True), (
        "it does not fall"
    )


def triggers_fire_in_turn(
    every: Callable[..., Any], example: tuple[int, int, int, list[int]]
) -> None:
    n, start, length, steps = example
    stop = start + length
    when, endless = every(n, start=start, stop=stop), every(n, start=start)
    for step in steps:
        for trigger, end in ((when, stop), (endless, math.inf)):
            fires = step in range(start, step + 1, n) and step < end
            assert bool(trigger(step)) == fires == bool(trigger(torch.tensor(step))), (
                f"step {step} of {trigger}"
            )
            count = len([s for s in range(start, step + 1, n) if s < end])
            assert (
                trigger.count(step) == count == int(trigger.count(torch.tensor(step)))
            ), f"count at {step} of {trigger}"


# ---- the table -----------------------------------------------------------------------


class PrimitiveLaw(NamedTuple):
    """`check(subject, example)` raises where the subject breaks the law."""

    check: Callable[[Any, Any], None]
    subjects: dict[str, Any]
    examples: st.SearchStrategy[Any]
    share: float = 4.0  # of the profile's examples

    @property
    def name(self) -> str:
        return self.check.__name__


_seeds = st.integers(0, 2**64 - 1)
_leaf_shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)
_choices = examples(selection.choice)
_pairs = examples(lambda source: (selection.choice(source), selection.choice(source)))
_steps = st.lists(
    st.one_of(st.integers(0, 90), st.integers(0, 2**40)), min_size=1, max_size=8
)

LAWS = [
    PrimitiveLaw(
        draws_depend_on_key_and_index_alone,
        {
            "bits": sf.random.bits,
            "uniform": sf.random.uniform,
            "normal": sf.random.normal,
        },
        st.tuples(
            _seeds,
            st.integers(1, 300),
            st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
        ),
        share=1.0,
    ),
    PrimitiveLaw(
        shards_are_parts_of_the_whole,
        {"uniform": sf.random.uniform, "normal": sf.random.normal, "masks": _kept},
        st.tuples(_seeds, st.integers(1, 12), st.integers(1, 12), st.integers(0, 11)),
        share=1.0,
    ),
    PrimitiveLaw(
        folding_is_injective,
        {"fold_in": sf.random.fold_in},
        st.tuples(_seeds, st.integers(0, 2**20)),
        share=0.5,
    ),
    PrimitiveLaw(
        split_keys_are_independent,
        {"split": sf.random.split},
        st.tuples(_seeds, st.integers(1, 20)),
        share=1.0,
    ),
    PrimitiveLaw(
        shares_are_handed_out, {"apportion": sf.budgets.apportion}, share_tables()
    ),
    PrimitiveLaw(
        erk_is_the_closed_form,
        {"erk": sf.budgets.erk},
        st.tuples(
            st.dictionaries(st.sampled_from("abcde"), _leaf_shapes, min_size=1),
            st.one_of(st.sampled_from([0.5, 0.0, 1.0, 0.9]), st.floats(0.0, 1.0)),
            st.sampled_from([1.0, 0.0, 0.5, 2.0]),
        ),
    ),
    PrimitiveLaw(
        selection.topk_keeps_the_best, {"topk_mask": sf.masks.topk_mask}, _choices
    ),
    PrimitiveLaw(
        selection.dropping_clears_the_worst,
        {"drop_lowest": sf.masks.drop_lowest},
        _choices,
    ),
    PrimitiveLaw(
        selection.growing_fills_the_best,
        {"grow_highest": sf.masks.grow_highest},
        _choices,
    ),
    PrimitiveLaw(
        selection.one_competition_over_all_leaves,
        {"topk_masks": sf.masks.topk_masks},
        _pairs,
    ),
    PrimitiveLaw(
        selection.thresholds_keep_what_is_above,
        {"threshold_mask": sf.masks.threshold_mask},
        _choices,
    ),
    PrimitiveLaw(
        selection.packing_round_trips,
        {"pack": (sf.masks.pack, sf.masks.unpack)},
        _choices,
    ),
    PrimitiveLaw(schedules_stay_in_bounds, dict(SCHEDULES), _steps),
    PrimitiveLaw(
        triggers_fire_in_turn,
        {"every": sf.every},
        st.tuples(
            st.integers(1, 9),
            st.integers(0, 9),
            st.integers(1, 40),
            st.lists(st.integers(0, 60), min_size=1, max_size=6),
        ),
    ),
]
