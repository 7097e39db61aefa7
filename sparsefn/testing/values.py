"""Trees, values and sparsities built from bytes.

An example is one string of bytes, from which shapes, containers and values are picked.
So it is cheap to draw, it shrinks to the first of all options and to zeros, and
Hypothesis does not spend most of its examples on copying one part of an example over
another.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from sparsefn.tree import Tree

T = TypeVar("T")

STEPS = 3  # updates in a run


class Form(NamedTuple):
    """Leaf shapes that a pattern accepts: multiples, a least size, and ranks.

    >>> sf.testing.Form(columns=4).least
    0

    The multiples are of rows and columns. A least size of 0 allows empty leaves.
    """

    rows: int = 1
    columns: int = 1
    least: int = 0
    ndims: tuple[int, ...] = (2, 3, 4)


class Case(NamedTuple):
    """One training run: update number i gets `grads[i]` at step i.

    >>> case = sf.testing.Case(
    ...     {"w": torch.ones(2, 2)}, ({"w": torch.zeros(2, 2)},), sparsity=0.5, seed=0
    ... )
    >>> case.sparsity
    0.5
    """

    params: Tree
    grads: tuple[Tree, ...]
    sparsity: float
    seed: int

    def __repr__(self) -> str:
        text = (
            f"Case(sparsity={self.sparsity}, seed={self.seed}, params={self.params}, "
            f"grads={self.grads})"
        )
        # Hypothesis warns of longer texts
        if len(text) < 4000:
            return text
        return text[:4000] + "..."


class WeightAndBias(NamedTuple):
    weight: Tensor
    bias: Tensor


class Source:
    """The bytes of an example, used up one after another: the first for choices, the
    rest for values.
    """

    choices = 96
    size = 1000

    def __init__(self, data: bytes) -> None:
        self._choices = list(data[: self.choices])
        self._values = data[self.choices :]
        self._used = 0

    def number(self, bits: int = 8) -> int:
        """A number of `bits` bits, a multiple of 8."""
        return int.from_bytes(
            [self._choices.pop(0) if self._choices else 0 for _ in range(bits // 8)],
            "big",
        )

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number() % len(options)]

    def values(self, n: int) -> list[int]:
        taken = [self._values[(self._used + i) % len(self._values)] for i in range(n)]
        self._used += n
        return taken


# ---- values --------------------------------------------------------------------------


@functools.cache
def _palette(name: str, dtype: torch.dtype) -> Sequence[float]:
    """The numbers of a palette, of which a byte picks one."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    extreme = (
        tiny,
        -tiny,
        info.smallest_normal,
        info.max,
        -info.max,
        math.nan,
        math.inf,
        -math.inf,
    )
    return {
        "ties": [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5],
        "exact": [
            (byte + 128) % 256 / 8 - 16 for byte in range(256)
        ],  # sums of these are exact in any order
        "holes": [0.0, -0.0, 1.0, -1.5, math.nan, math.inf, -math.inf, 3.0],
        "wild": [0.0, -0.0, 1.0, -1.0, *extreme, 0.1, -0.1, 1e-5, 3.0],
        "rare": [
            (1.0, -2.0, 3.0)[byte % 3] if byte % 8 == 7 else 0.0 for byte in range(256)
        ],
    }[name]


EVERY = ("ties", "exact", "holes", "wild")
# sums do not round: for patterns that pool scores, and for rescaling
EXACT = ("ties", "exact", "holes")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float16,
)


def _made_of(values: Sequence[float], like: Tensor) -> Tensor:
    return (
        torch.tensor(values, dtype=torch.float64, device="cpu")
        .to(like.dtype)
        .reshape(like.shape)
    )


def filled(source: Source, palette: str, like: Tensor) -> Tensor:
    numbers = _palette(palette, like.dtype)
    return _made_of(
        [numbers[byte % len(numbers)] for byte in source.values(like.numel())], like
    )


def _strided(source: Source, leaf: Tensor) -> Tensor:
    """The values of a leaf in another order of memory: columns first, channels last, or
    with gaps.
    """
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x,
        lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
        lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.ndim > 1 else x,
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ]
    way = source.pick(ways)
    return way(leaf) if leaf.ndim else leaf


def _distinct(source: Source, start: int, stride: int, leaf: Tensor) -> Tensor:
    """Distinct magnitudes over the whole tree, in an order that the bytes give."""
    data = source.values(leaf.numel())
    ranks = {
        i: rank for rank, i in enumerate(sorted(range(len(data)), key=data.__getitem__))
    }
    return _made_of(
        [
            (1 + start + stride * ranks[i]) * (1 if byte % 2 else -1)
            for i, byte in enumerate(data)
        ],
        leaf,
    )


# ---- shapes and trees ----------------------------------------------------------------


def _sides(form: Form) -> tuple[list[int], list[int]]:
    rows = [form.rows * n for n in (2, 3, 4, 3, 2, 4, 1, 3, 2, 4, 0) if n >= form.least]
    return rows, [
        form.columns * n for n in (3, 2, 5, 4, 3, 5, 1, 2, 5, 3, 0) if n >= form.least
    ]


def _with_sides(form: Form, rows: int, columns: int) -> list[tuple[int, ...]]:
    found = [
        (rows, columns),
        (rows, columns),
        (rows, 2, columns),
        (rows, 2, 2, columns),
    ]
    return [size for size in found if len(size) in form.ndims]


def shapes(form: Form = Form()) -> set[tuple[int, ...]]:
    """All leaf shapes that are drawn for a form.

    >>> sorted(shapes(sf.testing.Form(rows=4, columns=8, least=4, ndims=(2,))))
    [(16, 32), (16, 40)]
    """
    rows, columns = _sides(form)
    return {size for r in rows for c in columns for size in _with_sides(form, r, c)}


def shape(source: Source, form: Form = Form()) -> tuple[int, ...]:
    """Two to four dimensions that fit a form; empty ones and single elements now and
    then, where it allows them.
    """
    rows, columns = (source.pick(side) for side in _sides(form))
    return source.pick(_with_sides(form, rows, columns))


def _layer(source: Source, form: Form) -> Tree:
    size = shape(source, form)
    dtype = source.pick(DTYPES)
    weight, bias = (
        torch.empty(sides, dtype=dtype, device="meta") for sides in (size, size[:1])
    )
    named = {"weight": weight, "bias": bias}
    return source.pick(
        [{"weight": weight}, named, WeightAndBias(**named), (weight, bias), weight]
    )


def tree(source: Source, form: Form) -> Tree:
    """A tree of meta tensors; `default_where` chooses at least one of its leaves."""
    layers = [_layer(source, form) for _ in range(source.pick((1, 3, 4, 2, 5)))]
    scale = torch.empty(
        (),
        dtype=source.pick((torch.float32, torch.bfloat16, torch.float16)),
        device="meta",
    )
    # inserted against their order
    names = [f"layer{len(layers) - i}" for i in range(len(layers))]
    named = {**dict(zip(names, layers, strict=True)), "activation": {}, "scale": scale}
    nested = {"head": layers[-1], "body": layers[:-1], "activation": {}, "scale": scale}
    hollow = {**named, "blocks": {"0": (), "1": []}}
    tree = source.pick(
        [named, [*layers, scale], (*layers, scale), OrderedDict(named), nested, hollow]
    )
    norm = torch.empty((form.rows, form.columns), device="meta")
    return source.pick([tree, {"tree": tree, "norm": norm}])


def drawn_sparsity(source: Source, sizes: Sequence[int]) -> float:
    """Ends, round numbers, and halves of a unit in one of the sizes, where rounding to
    even shows.
    """
    n = max(source.pick(sizes), 1)
    half = (2 * (source.number(16) % n) + 1) / (2 * n)
    return source.pick(
        [0.5, half, source.number(16) / 65535, half, 0.9, half, 0.0, 1.0, 1 / 3, half]
    )


def case(
    source: Source,
    form: Form,
    palettes: Sequence[str],
    distinct: bool,
    like: Tree = None,
) -> Case:
    """A run over a drawn tree, or over one with the structure, shapes and dtypes of
    `like`.
    """
    leaves, treedef = optree.tree_flatten(tree(source, form) if like is None else like)
    palette = source.pick(palettes)
    # gradients that are nearly all zero
    empty = source.pick((palette, palette, palette, "rare"))

    def build(palette: str) -> Tree:
        if distinct:
            return treedef.unflatten(
                [
                    _distinct(source, i, len(leaves), leaf)
                    for i, leaf in enumerate(leaves)
                ]
            )
        return treedef.unflatten(
            [_strided(source, filled(source, palette, leaf)) for leaf in leaves]
        )

    sizes = [leaf.numel() for leaf in leaves if leaf.ndim > 1]
    level = drawn_sparsity(source, [*sizes, sum(sizes)])
    seed = source.number(32)
    params, *grads = (build(palette if i == 0 else empty) for i in range(STEPS + 1))
    return Case(params, tuple(grads), level, seed)
