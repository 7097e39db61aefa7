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

from sparsefn.typing import Tree

T = TypeVar("T")

STEPS = 3  # updates in a run


class Form(NamedTuple):
    """Leaf shapes that a pattern accepts: multiples, a least size, and ranks.

    >>> sf.testing.Form(columns=4).least
    0

    Attributes:
        rows: What the size of the first dimension is a multiple of.
        columns: What the size of the last dimension is a multiple of.
        least: The least of these multiples. 0 allows empty leaves.
        ndims: The numbers of dimensions.
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

    Attributes:
        params: A tree of parameters.
        grads: A tree of gradients for each update.
        sparsity: The sparsity that is asked for, in [0, 1].
        seed: Number that the key is made from.
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
        number = 0
        for _ in range(bits // 8):
            byte = self._choices.pop(0) if self._choices else 0
            number = number << 8 | byte
        return number

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number() % len(options)]

    def values(self, n: int) -> list[int]:
        taken = []
        for i in range(self._used, self._used + n):
            taken.append(self._values[i % len(self._values)])
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
    exact = torch.tensor(values, dtype=torch.float64, device="cpu")
    return exact.to(like.dtype).reshape(like.shape)


def filled(source: Source, palette: str, like: Tensor) -> Tensor:
    numbers = _palette(palette, like.dtype)
    picked = []
    for byte in source.values(like.numel()):
        picked.append(numbers[byte % len(numbers)])
    return _made_of(picked, like)


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
    if not leaf.ndim:
        return leaf
    return way(leaf)


def _distinct(source: Source, start: int, stride: int, leaf: Tensor) -> Tensor:
    """Distinct magnitudes over the whole tree, in an order that the bytes give."""
    data = source.values(leaf.numel())
    order = sorted(range(len(data)), key=data.__getitem__)
    numbers = [0.0] * len(data)
    for rank, i in enumerate(order):
        size = 1 + start + stride * rank
        numbers[i] = size if data[i] % 2 else -size
    return _made_of(numbers, leaf)


# ---- shapes and trees ----------------------------------------------------------------


def _sides(form: Form) -> tuple[list[int], list[int]]:
    rows = (2, 3, 4, 3, 2, 4, 1, 3, 2, 4, 0)
    columns = (3, 2, 5, 4, 3, 5, 1, 2, 5, 3, 0)
    return (
        [form.rows * n for n in rows if n >= form.least],
        [form.columns * n for n in columns if n >= form.least],
    )


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
    found: set[tuple[int, ...]] = set()
    for r in rows:
        for c in columns:
            found |= set(_with_sides(form, r, c))
    return found


def shape(source: Source, form: Form = Form()) -> tuple[int, ...]:
    """Two to four dimensions that fit a form; empty ones and single elements now and
    then, where it allows them.
    """
    rows, columns = (source.pick(side) for side in _sides(form))
    return source.pick(_with_sides(form, rows, columns))


def _layer(source: Source, form: Form) -> Tree:
    size = shape(source, form)
    dtype = source.pick(DTYPES)
    weight = torch.empty(size, dtype=dtype, device="meta")
    bias = torch.empty(size[:1], dtype=dtype, device="meta")
    named = {"weight": weight, "bias": bias}
    return source.pick(
        [{"weight": weight}, named, WeightAndBias(**named), (weight, bias), weight]
    )


def tree(source: Source, form: Form) -> Tree:
    """A tree of meta tensors; `default_where` chooses at least one of its leaves."""
    count = source.pick((1, 3, 4, 2, 5))
    layers = [_layer(source, form) for _ in range(count)]
    dtype = source.pick((torch.float32, torch.bfloat16, torch.float16))
    scale = torch.empty((), dtype=dtype, device="meta")
    named = {}
    for i, layer in enumerate(layers):  # inserted against their order
        named[f"layer{count - i}"] = layer
    rest = {"activation": {}, "scale": scale}
    named |= rest
    nested = {"head": layers[-1], "body": layers[:-1], **rest}
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
    units = source.number(16) % n
    half = (2 * units + 1) / (2 * n)
    any_share = source.number(16) / 65535
    return source.pick([0.5, half, any_share, half, 0.9, half, 0.0, 1.0, 1 / 3, half])


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
    if like is None:
        like = tree(source, form)
    leaves, treedef = optree.tree_flatten(like)
    palette = source.pick(palettes)
    # gradients that are nearly all zero
    empty = source.pick((palette, palette, palette, "rare"))

    def build(palette: str) -> Tree:
        made = []
        for i, leaf in enumerate(leaves):
            if distinct:
                made.append(_distinct(source, i, len(leaves), leaf))
            else:
                made.append(_strided(source, filled(source, palette, leaf)))
        return treedef.unflatten(made)

    sizes = [leaf.numel() for leaf in leaves if leaf.ndim > 1]
    level = drawn_sparsity(source, [*sizes, sum(sizes)])
    seed = source.number(32)
    params = build(palette)
    grads = tuple([build(empty) for _ in range(STEPS)])
    return Case(params, grads, level, seed)
