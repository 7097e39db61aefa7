"""Laws of selection. Each takes the function under test first, so that a broken one can
be shown to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from property_tests.layouts import ELEMENTS, LAYOUTS
from sparsefn.testing import byte_trees, oracle
from sparsefn.testing.byte_trees import EVERY, EXACT, Source
from sparsefn.testing.oracle import Layout


class Choice(NamedTuple):
    layout: Layout
    scores: Tensor
    mask: Tensor
    exclude: Tensor
    part: float  # of what can be chosen

    def groups(self) -> list[list[oracle.Unit]]:
        return [
            [("", unit) for unit in group]
            for group in oracle.unit_groups(self.layout, tuple(self.scores.shape))
        ]

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


def _mask(source: Source, shape: tuple[int, ...]) -> Tensor:
    flags = [byte % 2 == 1 for byte in source.values(math.prod(shape))]
    return torch.tensor(flags, dtype=torch.bool).reshape(shape)


def choice(source: Source) -> Choice:
    layout = source.pick(LAYOUTS)
    shape = byte_trees.shape(source, layout.form)
    like = torch.empty(shape, dtype=source.pick(byte_trees.DTYPES), device="meta")
    scores = byte_trees.filled(
        source, source.pick(EXACT if layout.reduce is not None else EVERY), like
    )
    part = source.number(16) / 65535
    return Choice(layout, scores, _mask(source, shape), _mask(source, shape), part)


def _every_way(
    what: str, wanted: Tensor, select: Callable[[Any], Tensor], counts: Any
) -> None:
    """An int, a 0-d tensor and a batched one give the same mask."""
    per_group = isinstance(counts, list)
    given = (
        [torch.tensor(counts, dtype=torch.int64)]
        if per_group
        else [counts, torch.tensor(counts)]
    )
    for count in given:
        got = select(count)
        assert torch.equal(got, wanted), (
            f"{what} with {count}: expected\n{wanted}\ngot\n{got}"
        )
    batched = torch.vmap(select)(given[-1].unsqueeze(0))[0]
    assert torch.equal(batched, wanted), (
        f"{what} with a batched count: expected\n{wanted}\ngot\n{batched}"
    )


def topk_keeps_the_best(topk_mask: Callable[..., Tensor], choice: Choice) -> None:
    groups, layout = choice.groups(), choice.layout
    if layout.fixed is not None:
        best = [
            (g, oracle.best_of(choice.values(g), [True] * len(g), layout.fixed))
            for g in groups
        ]
        assert torch.equal(
            topk_mask(choice.scores, None, pattern=layout.pattern),
            choice.elements(best),
        )
        return
    count = round(choice.part * min(map(len, groups), default=0))
    best = [
        (g, oracle.best_of(choice.values(g), [True] * len(g), count)) for g in groups
    ]
    select = lambda n: topk_mask(choice.scores, n, pattern=layout.pattern)  # noqa: E731
    _every_way("topk", choice.elements(best), select, count)
    counts = [round(choice.part * len(g) / (i + 1)) for i, g in enumerate(groups)]
    best = [
        (g, oracle.best_of(choice.values(g), [True] * len(g), n))
        for g, n in zip(groups, counts, strict=True)
    ]
    _every_way("topk", choice.elements(best), select, counts)


def dropping_clears_the_worst(
    drop_lowest: Callable[..., Tensor], choice: Choice
) -> None:
    groups = choice.groups()
    if choice.layout.fixed is not None:
        return
    active = [choice.any_of(choice.mask, group) for group in groups]
    count = round(choice.part * min(map(sum, active), default=0))
    stay = [
        (group, oracle.best_of(choice.values(group), flags, sum(flags) - count))
        for group, flags in zip(groups, active, strict=True)
    ]
    wanted = choice.mask & choice.elements(stay)
    _every_way(
        "drop",
        wanted,
        lambda n: drop_lowest(
            choice.scores, choice.mask, n, pattern=choice.layout.pattern
        ),
        count,
    )


def growing_fills_the_best(grow_highest: Callable[..., Tensor], choice: Choice) -> None:
    groups = choice.groups()
    if choice.layout.fixed is not None:
        return
    free = [
        [
            not (a or b)
            for a, b in zip(
                choice.any_of(choice.mask, g),
                choice.any_of(choice.exclude, g),
                strict=True,
            )
        ]
        for g in groups
    ]
    count = round(choice.part * min(map(sum, free), default=0))
    grown = [
        (g, oracle.best_of(choice.values(g), flags, count))
        for g, flags in zip(groups, free, strict=True)
    ]
    options = {"pattern": choice.layout.pattern, "exclude": choice.exclude}
    select = lambda n: grow_highest(choice.scores, choice.mask, n, **options)  # noqa: E731
    _every_way("grow", choice.mask | choice.elements(grown), select, count)


def one_competition_over_all_leaves(
    topk_masks: Callable[..., Any], example: tuple[Choice, Choice]
) -> None:
    trees = {"b": example[0].scores, "a": example[1].scores}
    shapes = {path: tuple(trees[path].shape) for path in sorted(trees)}
    (units,) = oracle.competing_units(ELEMENTS, shapes, joint=True)
    values = {path: leaf.double().reshape(-1).tolist() for path, leaf in trees.items()}
    scores = [oracle.score(ELEMENTS, values, unit) for unit in units]
    count = round(example[0].part * len(units))
    best = {
        (units[i][0], units[i][1][0])
        for i in oracle.best_of(scores, [True] * len(units), count)
    }
    for n in (count, torch.tensor(count)):
        for path, mask in topk_masks(trees, n).items():
            wanted = [(path, i) in best for i in range(mask.numel())]
            assert mask.reshape(-1).tolist() == wanted, (
                f"{path}: expected {wanted}, got {mask}"
            )


def thresholds_keep_what_is_above(
    threshold_mask: Callable[..., Tensor], choice: Choice
) -> None:
    values = choice.scores.double().reshape(-1).tolist()
    least = round(choice.part * len(values))
    for tau in (0.0, 0.5, -1.0):
        best = oracle.best_of(values, [True] * len(values), least)
        wanted = [value > tau or i in best for i, value in enumerate(values)]
        assert (
            threshold_mask(choice.scores, tau, min_keep=least).reshape(-1).tolist()
            == wanted
        ), f"above {tau}"


def packing_round_trips(
    pack_and_unpack: tuple[Callable[..., Any], Callable[..., Any]], choice: Choice
) -> None:
    pack, unpack = pack_and_unpack
    tree = {
        "mask": choice.mask,
        "dense": torch.tensor(True),
        "turned": choice.exclude.movedim(0, -1),
    }
    packed = pack(tree)
    for path, mask in tree.items():
        assert torch.equal(unpack(packed, tree)[path], mask), (
            f"{path}: {mask} comes back otherwise"
        )
        assert mask.ndim == 0 or packed[path].numel() == -(-mask.numel() // 8), (
            f"{path} takes more than one bit a weight"
        )
