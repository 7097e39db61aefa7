"""What the laws are tried on: trees of parameters, gradients like them, sparsities and keys."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

Tree = Any
STEPS = 3  # updates in a run
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Form(NamedTuple):
    """Which leaf shapes a pattern takes: multiples of rows and columns, and a least size (0 allows empty leaves)."""

    rows: int = 1
    columns: int = 1
    least: int = 0


class Case(NamedTuple):
    """One training run: update number i gets `grads[i]` at step i."""

    params: Tree
    grads: tuple[Tree, ...]
    sparsity: float
    seed: int


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor


# ---- values: one drawn byte an element, so that an example is cheap and shrinks to zeros ----------


def _ties(byte: int, dtype: torch.dtype) -> float:
    return (0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)[byte % 8]


def _exact(byte: int, dtype: torch.dtype) -> float:
    return (byte - 128) / 8  # sums of these are exact in any order


def _holes(byte: int, dtype: torch.dtype) -> float:
    return (0.0, -0.0, 1.0, -1.5, float("nan"), float("inf"), -float("inf"), 3.0)[byte % 8]


def _wild(byte: int, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    extreme = (0.0, -0.0, 1.0, -1.0, tiny, -tiny, info.smallest_normal, info.max, -info.max, float("nan"), float("inf"))
    return (*extreme, -float("inf"), 0.1, -0.1, 1e-5, 3.0)[byte % 16]


PALETTES: dict[str, Callable[[int, torch.dtype], float]] = {
    "ties": _ties,
    "exact": _exact,
    "holes": _holes,
    "wild": _wild,
}
EXACT = ("ties", "exact", "holes")  # sums do not round: for patterns that reduce, and for rescaling
FINITE = ("ties", "exact")


def _filled(data: bytes, palette: str, leaf: Tensor) -> Tensor:
    table = [PALETTES[palette](byte, leaf.dtype) for byte in range(256)]
    return torch.tensor([table[byte] for byte in data], dtype=torch.float64).to(leaf.dtype).reshape(leaf.shape)


def _distinct(data: bytes, start: int, stride: int, leaf: Tensor) -> Tensor:
    """Magnitudes that no other element of the tree has: the drawn bytes say in which order."""
    order = sorted(range(len(data)), key=lambda i: (data[i], i))
    values = [0.0] * len(data)
    for rank, i in enumerate(order):
        values[i] = (1 + start + stride * rank) * (1.0 if data[i] % 2 else -1.0)
    return torch.tensor(values, dtype=torch.float64).to(leaf.dtype).reshape(leaf.shape)


# ---- trees ----------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@st.composite
def shapes(draw: Draw, form: Form = Form()) -> tuple[int, ...]:
    """Shapes of two to four dimensions that fit a form; empty ones and single elements where it allows them."""
    rows = form.rows * draw(st.sampled_from([n for n in (2, 1, 3, 4, 0) if n >= form.least]))
    columns = form.columns * draw(st.sampled_from([n for n in (3, 1, 2, 5, 0) if n >= form.least]))
    return draw(st.sampled_from([(rows, columns), (rows, 2, columns), (rows, 2, 2, columns)]))  # type: ignore[no-any-return]


@st.composite
def tensors(draw: Draw, shape: tuple[int, ...], palettes: Sequence[str] = tuple(PALETTES)) -> Tensor:
    """Floating-point tensors of a shape."""
    n = math.prod(shape)
    data = draw(st.binary(min_size=n, max_size=n))
    like = torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)), device="meta")
    return _filled(data, draw(st.sampled_from(palettes)), like)


@st.composite
def masks(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Bool tensors of a shape."""
    n = math.prod(shape)
    data = draw(st.binary(min_size=n, max_size=n))
    return torch.tensor([byte % 2 == 1 for byte in data], dtype=torch.bool).reshape(shape)


def _wrapped(draw: Draw, layers: Sequence[Any]) -> Tree:
    kind = draw(st.sampled_from(["dict", "list", "tuple", "ordered", "nested"]))
    if kind == "list":
        return list(layers)
    if kind == "tuple":
        return tuple(layers)
    names = [f"layer{len(layers) - i}" for i in range(len(layers))]  # inserted against their order
    if kind == "ordered":
        return OrderedDict(zip(names, layers, strict=True))
    if kind == "dict":
        return dict(zip(names, layers, strict=True))
    return {"head": layers[-1], "body": [*layers[:-1]], "scale": torch.empty((), device="meta")}


def _skeleton(draw: Draw, form: Form) -> Tree:
    """A tree of meta tensors; at least one leaf is one that `default_where` chooses."""
    layers: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        shape, dtype, biased = draw(shapes(form)), draw(st.sampled_from(DTYPES)), draw(st.booleans())
        weight = torch.empty(shape, dtype=dtype, device="meta")
        bias = torch.empty(shape[:1], dtype=dtype, device="meta")
        kind = draw(st.sampled_from(["dict", "named", "tuple", "bare"]))
        if kind == "dict":
            layers.append({"weight": weight, "bias": bias} if biased else {"weight": weight})
        else:
            layers.append(Layer(weight, bias) if kind == "named" else (weight, bias) if kind == "tuple" else weight)
    tree = _wrapped(draw, layers)
    if draw(st.booleans()):
        tree = {"tree": tree, "norm": torch.empty((form.rows, form.columns), device="meta")}
    return tree


@st.composite
def cases(
    draw: Draw,
    form: Form = Form(),
    palettes: Sequence[str] = tuple(PALETTES),
    steps: int = STEPS,
    distinct: bool = False,
) -> Case:
    """Runs of `steps` updates over trees whose leaves fit `form`; `distinct` for trees without ties."""
    skeleton = _skeleton(draw, form)
    leaves, treedef = optree.tree_flatten(skeleton)
    palette, seed = draw(st.sampled_from(palettes)), draw(st.integers(0, 2**32))

    def tree(columns: list[list[bytes]], i: int) -> Tree:
        rows = enumerate(zip(leaves, columns, strict=True))
        if distinct:
            return treedef.unflatten([_distinct(parts[i], j, len(leaves), leaf) for j, (leaf, parts) in rows])
        return treedef.unflatten([_filled(parts[i], palette, leaf) for _, (leaf, parts) in rows])

    columns = []
    for leaf in leaves:
        n = leaf.numel()
        data = draw(st.binary(min_size=n * (steps + 1), max_size=n * (steps + 1)))
        columns.append([data[i * n : (i + 1) * n] for i in range(steps + 1)])
    trees = [tree(columns, i) for i in range(steps + 1)]
    sizes = [leaf.numel() for leaf in leaves if leaf.ndim > 1]
    return Case(trees[0], tuple(trees[1:]), draw(sparsities([*sizes, sum(sizes)])), seed)


def sparsities(sizes: Sequence[int]) -> st.SearchStrategy[float]:
    """Ends, round numbers, and halves of a unit in one of the sizes, where rounding to even shows."""
    halves = st.tuples(st.sampled_from(sizes), st.integers(0, 500)).map(lambda x: (2 * (x[1] % (x[0] or 1)) + 1) / (2 * x[0] or 2))
    return st.one_of(st.sampled_from([0.5, 0.0, 1.0, 0.9, 0.25, 1 / 3]), halves, st.floats(0.0, 1.0))


def large(form: Form = Form(), elements: int = 150) -> Case:
    """One fixed run over leaves of at least so many elements, where two masks do not agree by chance."""
    generator = torch.Generator().manual_seed(7)
    size = math.isqrt(elements // (form.rows * form.columns)) + 1

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def tree() -> Tree:
        weight = leaf(size * form.rows, size * form.columns)
        return {"a": weight, "b": Layer(leaf(4 * form.rows, 4 * form.columns), leaf(4)), "norm": leaf(3, 3)}

    return Case(tree(), tuple(tree() for _ in range(STEPS)), 0.5, 3)
