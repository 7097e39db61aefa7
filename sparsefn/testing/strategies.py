"""Hypothesis strategies: trees of parameters and gradients, steps, sparsities,
schedules, patterns, whole runs.

Trees nest dicts, lists, tuples and named tuples, some of them empty; leaves are
float32, float64, bfloat16 or float16, some of one element, of no dimension or empty,
some with strides of other orders; values hold ties, zeros of both signs, subnormals,
infinities and NaN, and gradients may be zero nearly everywhere. All of it is drawn from
one string of bytes (see `sparsefn.testing.byte_trees`), so examples are cheap and
shrink to small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsefn.core import schedules as _schedules
from sparsefn.core import triggers as _triggers
from sparsefn.masks import patterns as _patterns
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.testing import byte_trees
from sparsefn.testing.byte_trees import EVERY, STEPS, Case, Form, Source, WeightAndBias
from sparsefn.typing import Reduce, Schedule, Tree, Trigger

__all__ = [
    "cases",
    "examples",
    "grads_like",
    "large",
    "params_trees",
    "patterns",
    "schedules",
    "sparsities",
    "steps",
    "triggers",
]
__dir__ = __all__.copy


T = TypeVar("T")


def examples(build: Callable[[Source], T]) -> st.SearchStrategy[T]:
    """The objects that `build` makes from strings of bytes.

    >>> strategy = sf.testing.strategies.examples(lambda source: source.pick("abc"))
    >>> from hypothesis import find
    >>> find(strategy, lambda _: True) in "abc"
    True

    Args:
        build: Function of a `Source`, from whose bytes it picks choices and values.

    Returns:
        A Hypothesis strategy.
    """
    return st.binary(min_size=Source.size, max_size=Source.size).map(
        lambda data: build(Source(data))
    )


def params_trees(
    form: Form = Form(), palettes: Sequence[str] = EVERY, distinct: bool = False
) -> st.SearchStrategy[Tree]:
    """Trees of parameters; `sf.default_where` chooses at least one of their leaves.

    >>> from hypothesis import find
    >>> tree = find(
    ...     sf.testing.strategies.params_trees(palettes=["ties"]), lambda _: True
    ... )
    >>> any(
    ...     sf.default_where(path, leaf)
    ...     for path, leaf in sf.tree.flatten(tree)[0].items()
    ... )
    True

    Args:
        form: Which shapes leaves have.
        palettes: Which values: some of "ties", "exact" (sums do not round), "holes"
            (NaN and infinities), "rare" (mostly zeros) and "wild" (subnormals and the
            largest numbers, too). Default: all but "rare".
        distinct: Whether no two magnitudes are equal.

    Returns:
        A Hypothesis strategy.
    """
    return cases(form, palettes, distinct).map(lambda case: case.params)


def grads_like(
    params: Tree, palettes: Sequence[str] = EVERY
) -> st.SearchStrategy[Tree]:
    """Trees of gradients with the structure, shapes and dtypes of params.

    >>> from hypothesis import find
    >>> find(sf.testing.strategies.grads_like({"w": torch.ones(2, 3)}), lambda _: True)[
    ...     "w"
    ... ].shape
    torch.Size([2, 3])

    Args:
        params: The params.
        palettes: As in `params_trees`.

    Returns:
        A Hypothesis strategy.
    """
    return cases(palettes=palettes, like=params).map(lambda case: case.grads[0])


def steps() -> st.SearchStrategy[int | Tensor]:
    """Steps, small ones most of the time, as ints or as 0-d int64 tensors.

    >>> from hypothesis import find
    >>> int(find(sf.testing.strategies.steps(), lambda _: True)) >= 0
    True

    Returns:
        A Hypothesis strategy.
    """
    numbers = st.one_of(st.integers(0, 90), st.integers(0, 2**40))
    return st.one_of(numbers, numbers.map(torch.tensor))


def sparsities(size: int = 12) -> st.SearchStrategy[float]:
    """Sparsities in [0, 1]: both ends, round numbers, and halves of a unit of `size`.

    >>> from hypothesis import find
    >>> 0.0 <= find(sf.testing.strategies.sparsities(), lambda _: True) <= 1.0
    True

    Args:
        size: Number of units. Rounding shows at halves of a unit.

    Returns:
        A Hypothesis strategy.
    """
    return examples(lambda source: byte_trees.drawn_sparsity(source, [size]))


def schedules() -> st.SearchStrategy[Schedule]:
    """Schedules with values in [0, 1], one of each kind.

    >>> from hypothesis import find
    >>> 0.0 <= find(sf.testing.strategies.schedules(), lambda _: True)(7) <= 1.0
    True

    Returns:
        A Hypothesis strategy.
    """

    def build(source: Source) -> Schedule:
        first = source.number() / 255
        last = source.number() / 255
        n = 1 + source.number() % 50
        kinds = [
            _schedules.constant(first),
            _schedules.polynomial(first, last, begin=n // 2, end=n),
            _schedules.cosine_decay(first, n, final=last),
            _schedules.linear_decay(first, n, final=last),
            _schedules.cosine(first, n, minimum=first * last),
            _schedules.exponential(first, -1 / n, final=last),
            _schedules.piecewise({0: first, n: last}),
            _schedules.cycling([first, last], _triggers.every(n)),
        ]
        return source.pick(kinds)

    return examples(build)


def triggers() -> st.SearchStrategy[Trigger]:
    """Triggers: every n steps between two steps, lists of steps, always and never.

    >>> from hypothesis import find
    >>> find(sf.testing.strategies.triggers(), lambda _: True)(3) in (True, False)
    True

    Returns:
        A Hypothesis strategy.
    """

    def build(source: Source) -> Trigger:
        n = 1 + source.number() % 9
        start = source.number() % 9
        options: list[Trigger] = [
            _triggers.every(n, start=start),
            _triggers.every(n, start=start, stop=start + 1 + source.number() % 40),
            _triggers.at([source.number() % 60 for _ in range(n)]),
            _triggers.always(),
            _triggers.never(),
        ]
        return source.pick(options)

    return examples(build)


def patterns() -> st.SearchStrategy[Pattern]:
    """Patterns of every kind, small enough for the leaves that `sf.testing.Meta` draws.

    >>> from hypothesis import find
    >>> isinstance(
    ...     find(sf.testing.strategies.patterns(), lambda _: True), sf.patterns.Pattern
    ... )
    True

    Returns:
        A Hypothesis strategy.
    """

    def build(source: Source) -> Pattern:
        m = 1 + source.number() % 4
        reductions: list[Reduce] = ["mean", "sum", "max", "min", "l2"]
        n = source.number() % (m + 1)
        reduce = source.pick(reductions)
        kinds = [
            _patterns.unstructured(),
            _patterns.nm(n, m),
            _patterns.nm(n, m, axis=0),
            _patterns.block((m, 2), reduce),
            _patterns.channel(source.pick([0, 1, -1]), source.pick([1, 2, math.inf])),
            _patterns.kernel(reduce),
            _patterns.out_groups(m),
            _patterns.in_groups(m),
            _patterns.row_balanced(),
        ]
        return source.pick(kinds)

    return examples(build)


def cases(
    form: Form = Form(),
    palettes: Sequence[str] = EVERY,
    distinct: bool = False,
    like: Tree = None,
) -> st.SearchStrategy[Case]:
    """Whole runs: parameters, gradients for a few updates, a sparsity and a seed.

    >>> from hypothesis import find
    >>> import optree
    >>> case = find(sf.testing.strategies.cases(), lambda _: True)
    >>> (
    ...     len(case.grads),
    ...     optree.tree_structure(case.grads[0]) == optree.tree_structure(case.params),
    ... )
    (3, True)

    Args:
        form: As in `params_trees`.
        palettes: As in `params_trees`.
        distinct: As in `params_trees`.
        like: A tree whose structure, shapes and dtypes the trees have. Default: it is
            drawn.

    Returns:
        A Hypothesis strategy of `Case`.
    """
    return examples(
        lambda source: byte_trees.case(source, form, palettes, distinct, like)
    )


def large(form: Form = Form(), elements: int = 150) -> Case:
    """One fixed run over a leaf of at least `elements` elements, and other leaves.

    >>> sf.testing.strategies.large().params["a"].shape
    torch.Size([13, 13])

    Args:
        form: Form that the shape of each leaf fits.
        elements: The least number of elements of the largest leaf. In so large a leaf
            two masks do not agree by chance.

    Returns:
        The `Case`, the same each time.
    """
    generator, of_wide = (torch.Generator("cpu").manual_seed(seed) for seed in (7, 8))
    size = math.isqrt(elements // (form.rows * form.columns)) + 1

    def leaf(
        *shape: int,
        drawn: torch.Generator = generator,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return torch.randn(shape, generator=drawn, dtype=dtype, device="cpu")

    def tree() -> Tree:
        weight = leaf(size * form.rows, size * form.columns)
        layer = WeightAndBias(leaf(4 * form.rows, 4 * form.columns), leaf(4))
        wide = leaf(4 * form.rows, 4 * form.columns, drawn=of_wide, dtype=torch.float64)
        return {"a": weight, "b": layer, "c": wide, "norm": leaf(3, 3)}

    return Case(tree(), tuple(tree() for _ in range(STEPS)), 0.5, 3)
