"""Laws of the primitives. Each takes the function under test first, so that a broken one can be shown to fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsefn as sf
from property_tests import oracle, strategies
from property_tests.harness import equal
from property_tests.oracle import Layout
from property_tests.strategies import EVERY, EXACT, Source, examples

# ---- random -----------------------------------------------------------------------------------------


def draws_depend_on_key_and_index_alone(draw: Callable[..., Tensor], example: tuple[int, int, list[int]]) -> None:
    seed, n, picks = example
    key = sf.random.key(seed)
    whole = draw(key, (n,))
    assert equal(draw(key, (n, 3))[:1].reshape(-1), draw(key, (3,))), "the shape matters"
    assert equal(draw(key, (n // 2,)), whole[: n // 2]), "the number of draws matters"
    index = torch.tensor([pick % n for pick in picks])
    assert equal(draw(key, index.shape, index=index), whole[index]), "other indices matter"
    assert n < 4 or not equal(draw(sf.random.key(seed ^ 1), (n,)), whole), "the key does not matter"


def folding_is_injective(fold_in: Callable[[Tensor, Any], Tensor], example: tuple[int, int]) -> None:
    seed, start = example
    key = sf.random.key(seed)
    numbers = [*range(start, start + 20), start + 2**16, start + 2**32, -start - 1]
    folded = [tuple(fold_in(key, number).tolist()) for number in numbers]
    folded += [tuple(fold_in(key, str(number)).tolist()) for number in numbers]
    assert len({tuple(key.tolist()), *folded}) == len(folded) + 1, "two numbers or names give one key"
    assert all(tuple(fold_in(key, torch.tensor(n)).tolist()) == k for n, k in zip(numbers, folded, strict=False))


def split_keys_are_independent(split: Callable[[Tensor, int], Tensor], example: tuple[int, int]) -> None:
    seed, n = example
    key = sf.random.key(seed)
    keys = split(key, n)
    assert torch.equal(split(key, n + 3)[:n], keys), "key i depends on how many there are"
    assert len({tuple(k) for k in [*keys.tolist(), key.tolist()]}) == n + 1, "two keys are the same"
    a, b = ((sf.random.uniform(k, (4096,)) * 8).long() for k in split(key, 2))
    table = torch.bincount(8 * a + b, minlength=64).double()
    chi = float(((table - 64) ** 2 / 64).sum())  # 63 degrees of freedom: above 150 once in 10^8 tables
    assert chi < 150, f"the streams of two keys are related: chi-square {chi}"


# ---- budgets ----------------------------------------------------------------------------------------


def quotas(shares: Mapping[str, float], total: int, caps: Mapping[str, int]) -> dict[str, Fraction]:
    """What an exact real-valued division gives each: in proportion, at most its cap, the overflow to the rest."""
    least = Fraction(max(shares.values(), default=0.0)) / 2**400  # less counts as that
    exact = {name: max(Fraction(share), least) for name, share in shares.items() if share > 0}
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
    assert all(type(n) is int and 0 <= n <= caps[name] for name, n in counts.items()), f"{counts} exceeds {caps}"
    positive = {name: share for name, share in shares.items() if share > 0}
    for name, quota in quotas(positive, min(total, sum(caps[name] for name in positive)), caps).items():
        assert abs(counts[name] - quota) < 1 + 1e-9, f"{name} gets {counts[name]}, its quota is {float(quota)}"
    last = [name for name in shares if name not in positive]
    full = all(counts[name] == caps[name] for name in positive)
    assert full or not any(counts[name] for name in last), "a share of 0 gets something before others are full"
    backwards = {name: shares[name] for name in reversed(shares)}
    assert apportion(backwards, total, caps) == counts, "the order of the dict matters"
    tensor = apportion({name: torch.tensor(share, dtype=torch.float64) for name, share in shares.items()}, total, caps)
    assert {name: int(n) for name, n in tensor.items()} == counts, "tensor shares give other counts"
    hidden = torch.vmap(lambda t: apportion(shares, t, caps))(torch.tensor([total]))
    assert {name: int(n) for name, n in hidden.items()} == counts, "a tensor total gives other counts"


@st.composite
def share_tables(draw: Any) -> Shares:
    names = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True))
    number = st.one_of(
        st.floats(0.0, 8.0),
        st.integers(0, 4).map(float),
        st.sampled_from([5e-324, 1e-310, 1e300, 1.7e308, 0.1, math.nan]),
    )
    caps = {name: draw(st.integers(0, 12)) for name in names}
    return Shares({name: draw(number) for name in names}, draw(st.integers(0, sum(caps.values()))), caps)


def erk_is_the_closed_form(
    erk: Callable[[float], Any], example: tuple[dict[str, tuple[int, ...]], float, float]
) -> None:
    """Density in proportion to (sum of dims / product of dims) ** power, at most 1, and the exact total."""
    sizes, sparsity, power = example
    counts = erk(power)(sizes, sparsity)
    whole = {path: math.prod(shape) for path, shape in sizes.items()}
    total = sum(whole.values()) - oracle.rounded(sparsity, sum(whole.values()))
    assert sum(counts.values()) == total, f"{counts} is not {total} in all"
    raw = {path: whole[path] * (sum(shape) / math.prod(shape)) ** power for path, shape in sizes.items()}
    for path, quota in quotas(raw, total, whole).items():
        assert abs(counts[path] - quota) < 1 + 1e-6, f"{path} gets {counts[path]}, the closed form {float(quota)}"


# ---- selection --------------------------------------------------------------------------------------


class Choice(NamedTuple):
    layout: Layout
    scores: Tensor
    mask: Tensor
    exclude: Tensor
    part: float  # of what can be chosen

    def groups(self) -> list[list[oracle.Unit]]:
        return [[("", unit) for unit in group] for group in oracle.groups(self.layout, tuple(self.scores.shape))]

    def values(self, group: Sequence[oracle.Unit]) -> list[float]:
        table = {"": self.scores.double().reshape(-1).tolist()}
        return [oracle.score(self.layout, table, unit) for unit in group]

    def any_of(self, mask: Tensor, group: Sequence[oracle.Unit]) -> list[bool]:
        flags = mask.reshape(-1).tolist()
        return [any(flags[i] for i in unit) for _, unit in group]

    def elements(self, chosen: list[tuple[list[oracle.Unit], set[int]]]) -> Tensor:
        flags = [False] * self.scores.numel()
        for group, picked in chosen:
            for i in picked:
                for element in group[i][1]:
                    flags[element] = True
        return torch.tensor(flags, dtype=torch.bool).reshape(self.scores.shape)


def choice(source: Source) -> Choice:
    layout = source.pick(oracle.LAYOUTS)
    shape = strategies.shape(source, layout.form)
    scores = strategies.tensor(source, shape, EXACT if layout.reduce is not None else EVERY)
    part = source.number(16) / 65535
    return Choice(layout, scores, strategies.mask(source, shape), strategies.mask(source, shape), part)


def _every_way(what: str, wanted: Tensor, select: Callable[[Any], Tensor], counts: Any) -> None:
    """An int, a 0-d tensor and a batched one give the same mask."""
    per_group = isinstance(counts, list)
    given = [torch.tensor(counts, dtype=torch.int64)] if per_group else [counts, torch.tensor(counts)]
    for count in given:
        got = select(count)
        assert torch.equal(got, wanted), f"{what} with {count}: expected\n{wanted}\ngot\n{got}"
    batched = torch.vmap(select)(given[-1].unsqueeze(0))[0]
    assert torch.equal(batched, wanted), f"{what} with a batched count: expected\n{wanted}\ngot\n{batched}"


def topk_keeps_the_best(topk_mask: Callable[..., Tensor], choice: Choice) -> None:
    groups, layout = choice.groups(), choice.layout
    if layout.fixed is not None:
        best = [(g, oracle.winners(choice.values(g), [True] * len(g), layout.fixed)) for g in groups]
        assert torch.equal(topk_mask(choice.scores, None, pattern=layout.pattern), choice.elements(best))
        return
    count = round(choice.part * min(map(len, groups), default=0))
    best = [(g, oracle.winners(choice.values(g), [True] * len(g), count)) for g in groups]
    select = lambda n: topk_mask(choice.scores, n, pattern=layout.pattern)  # noqa: E731
    _every_way("topk", choice.elements(best), select, count)
    counts = [round(choice.part * len(g) / (i + 1)) for i, g in enumerate(groups)]
    best = [(g, oracle.winners(choice.values(g), [True] * len(g), n)) for g, n in zip(groups, counts, strict=True)]
    _every_way("topk", choice.elements(best), select, counts)


def dropping_clears_the_worst(drop_lowest: Callable[..., Tensor], choice: Choice) -> None:
    groups = choice.groups()
    if choice.layout.fixed is not None:
        return
    active = [choice.any_of(choice.mask, group) for group in groups]
    count = round(choice.part * min(map(sum, active), default=0))
    stay = [
        (group, oracle.winners(choice.values(group), flags, sum(flags) - count))
        for group, flags in zip(groups, active, strict=True)
    ]
    wanted = choice.mask & choice.elements(stay)
    _every_way(
        "drop", wanted, lambda n: drop_lowest(choice.scores, choice.mask, n, pattern=choice.layout.pattern), count
    )


def growing_fills_the_best(grow_highest: Callable[..., Tensor], choice: Choice) -> None:
    groups = choice.groups()
    if choice.layout.fixed is not None:
        return
    free = [
        [not (a or b) for a, b in zip(choice.any_of(choice.mask, g), choice.any_of(choice.exclude, g), strict=True)]
        for g in groups
    ]
    count = round(choice.part * min(map(sum, free), default=0))
    grown = [(g, oracle.winners(choice.values(g), flags, count)) for g, flags in zip(groups, free, strict=True)]
    options = {"pattern": choice.layout.pattern, "exclude": choice.exclude}
    select = lambda n: grow_highest(choice.scores, choice.mask, n, **options)  # noqa: E731
    _every_way("grow", choice.mask | choice.elements(grown), select, count)


def one_competition_over_all_leaves(topk_masks: Callable[..., Any], example: tuple[Choice, Choice]) -> None:
    trees = {"b": example[0].scores, "a": example[1].scores}
    shapes = {path: tuple(trees[path].shape) for path in sorted(trees)}
    (units,) = oracle.competitions(oracle.ELEMENTS, shapes, joint=True)
    values = {path: leaf.double().reshape(-1).tolist() for path, leaf in trees.items()}
    scores = [oracle.score(oracle.ELEMENTS, values, unit) for unit in units]
    count = round(example[0].part * len(units))
    best = {(units[i][0], units[i][1][0]) for i in oracle.winners(scores, [True] * len(units), count)}
    for n in (count, torch.tensor(count)):
        for path, mask in topk_masks(trees, n).items():
            wanted = [(path, i) in best for i in range(mask.numel())]
            assert mask.reshape(-1).tolist() == wanted, f"{path}: expected {wanted}, got {mask}"


def thresholds_keep_what_is_above(threshold_mask: Callable[..., Tensor], choice: Choice) -> None:
    values = choice.scores.double().reshape(-1).tolist()
    least = round(choice.part * len(values))
    for tau in (0.0, 0.5, -1.0):
        best = oracle.winners(values, [True] * len(values), least)
        wanted = [value > tau or i in best for i, value in enumerate(values)]
        assert threshold_mask(choice.scores, tau, min_keep=least).reshape(-1).tolist() == wanted, f"above {tau}"


def packing_round_trips(pack_and_unpack: tuple[Callable[..., Any], Callable[..., Any]], choice: Choice) -> None:
    pack, unpack = pack_and_unpack
    tree = {"mask": choice.mask, "dense": torch.tensor(True), "turned": choice.exclude.movedim(0, -1)}
    packed = pack(tree)
    for path, mask in tree.items():
        assert torch.equal(unpack(packed, tree)[path], mask), f"{path}: {mask} comes back otherwise"
        assert mask.ndim == 0 or packed[path].numel() == -(-mask.numel() // 8), (
            f"{path} takes more than one bit a weight"
        )


# ---- schedules and triggers -------------------------------------------------------------------------


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
    "cosine_decay": (sf.schedules.cosine_decay(0.3, 75), Bounds(0.0, 0.3, {0: 0.3, 75: 0.0, 10**9: 0.0}, falls=True)),
    "linear_decay": (sf.schedules.linear_decay(0.7, 30, 0.1), Bounds(0.1, 0.7, {0: 0.7, 30: 0.1, 31: 0.1}, falls=True)),
    "cosine": (sf.schedules.cosine(0.8, 10, 0.1), Bounds(0.1, 0.8, {0: 0.8, 10: 0.1, 20: 0.8, 10**9: 0.8})),
    "exponential": (sf.schedules.exponential(0.1, -0.01, 0.9), Bounds(0.1, 0.9, {0: 0.1})),
    "piecewise": (sf.schedules.piecewise({0: 0.5, 20: 0.8}), Bounds(0.5, 0.8, {0: 0.5, 19: 0.5, 20: 0.8})),
    "cycling": (sf.schedules.cycling([0.5, 0.8], sf.every(7)), Bounds(0.5, 0.8, {0: 0.5, 6: 0.5, 7: 0.8, 14: 0.5})),
}


def schedules_stay_in_bounds(subject: tuple[Any, Bounds], steps: list[int]) -> None:
    schedule, bounds = subject
    values = [schedule(step) for step in steps]
    assert all(type(value) is float for value in values), "an int step does not give a float"
    assert all(bounds.low <= value <= bounds.high for value in values), f"{values} leaves its bounds"
    singles = [schedule(torch.tensor(step)) for step in steps]
    assert all(x.dtype == torch.float64 and x.item() == value for x, value in zip(singles, values, strict=True)), (
        f"tensor steps give {singles}, ints {values}"
    )
    assert torch.vmap(schedule)(torch.tensor(steps)).tolist() == values, "vmap gives other values"
    assert {step: schedule(step) for step in bounds.values} == bounds.values, "an end is not met"
    ordered = [schedule(step) for step in sorted(steps)]
    assert not bounds.falls or ordered == sorted(ordered, reverse=True), "it does not fall"


def triggers_fire_in_turn(every: Callable[..., Any], example: tuple[int, int, int, list[int]]) -> None:
    n, start, length, steps = example
    stop = start + length
    when, endless = every(n, start=start, stop=stop), every(n, start=start)
    for step in steps:
        for trigger, end in ((when, stop), (endless, math.inf)):
            fires = step in range(start, step + 1, n) and step < end
            assert bool(trigger(step)) == fires == bool(trigger(torch.tensor(step))), f"step {step} of {trigger}"
            count = len([s for s in range(start, step + 1, n) if s < end])
            assert trigger.count(step) == count == int(trigger.count(torch.tensor(step))), (
                f"count at {step} of {trigger}"
            )


# ---- the table --------------------------------------------------------------------------------------


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
_steps = st.lists(st.one_of(st.integers(0, 90), st.integers(0, 2**40)), min_size=1, max_size=8)

LAWS = [
    PrimitiveLaw(
        draws_depend_on_key_and_index_alone,
        {"bits": sf.random.bits, "uniform": sf.random.uniform, "normal": sf.random.normal},
        st.tuples(_seeds, st.integers(1, 300), st.lists(st.integers(0, 10**6), min_size=1, max_size=5)),
        share=1.0,
    ),
    PrimitiveLaw(
        folding_is_injective, {"fold_in": sf.random.fold_in}, st.tuples(_seeds, st.integers(0, 2**20)), share=0.5
    ),
    PrimitiveLaw(
        split_keys_are_independent, {"split": sf.random.split}, st.tuples(_seeds, st.integers(1, 20)), share=1.0
    ),
    PrimitiveLaw(shares_are_handed_out, {"apportion": sf.budgets.apportion}, share_tables()),
    PrimitiveLaw(
        erk_is_the_closed_form,
        {"erk": sf.budgets.erk},
        st.tuples(
            st.dictionaries(st.sampled_from("abcde"), _leaf_shapes, min_size=1),
            st.one_of(st.sampled_from([0.5, 0.0, 1.0, 0.9]), st.floats(0.0, 1.0)),
            st.sampled_from([1.0, 0.0, 0.5, 2.0]),
        ),
    ),
    PrimitiveLaw(topk_keeps_the_best, {"topk_mask": sf.topk_mask}, examples(choice)),
    PrimitiveLaw(dropping_clears_the_worst, {"drop_lowest": sf.drop_lowest}, examples(choice)),
    PrimitiveLaw(growing_fills_the_best, {"grow_highest": sf.grow_highest}, examples(choice)),
    PrimitiveLaw(
        one_competition_over_all_leaves,
        {"topk_masks": sf.topk_masks},
        examples(lambda source: (choice(source), choice(source))),
    ),
    PrimitiveLaw(thresholds_keep_what_is_above, {"threshold_mask": sf.threshold_mask}, examples(choice)),
    PrimitiveLaw(packing_round_trips, {"pack": (sf.masks.pack, sf.masks.unpack)}, examples(choice)),
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
