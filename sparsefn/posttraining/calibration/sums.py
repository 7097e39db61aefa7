"""Sums over the inputs of a product: how many, their squares and their products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparsefn._engine.leaves import as_tensor_on

# of some outputs: "count", "square" (inputs,) and, if asked for, "gram"
Sums = dict[str, Tensor]
Stats = dict[str, Sums]  # of leaves, by path


def row_sums(x: Tensor, gram: bool) -> Sums:
    """The sums over the rows of a matrix.

    >>> row_sums(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), gram=True)
    {'count': tensor(2), 'square': tensor([10.,  4.], dtype=torch.float64),
    'gram': tensor([[10.,  2.],
            [ 2.,  4.]])}

    Squares are rounded to float32, and added in float64. Products are added in float32,
    or in float64 if x is.
    """
    width = x.shape[1]
    sums = {"count": as_tensor_on(len(x), x.device), "square": _squares(x)}
    if gram:
        sums["gram"] = _gram(_parts(x, width, products=True), width, x)
    return sums


def patch_sums(
    x: Tensor,
    kernel: Sequence[int],
    sizes: Sequence[Sequence[int]],
    groups: int,
    gram: bool,
) -> list[Sums]:
    """The sums over the patches that a convolution multiplies by its kernel, for each
    of its groups.

    >>> patch_sums(torch.ones(1, 1, 3), (2,), ((1,), (0,), (1,)), 1, gram=True)
    [{'count': tensor(2), 'square': tensor([2., 2.], dtype=torch.float64),
    'gram': tensor([[2., 2.],
            [2., 2.]])}]

    `x` is (examples, channels, ...), `sizes` are stride, padding and dilation of each
    dimension.
    """
    # A patch adds the squares of its entries, whichever example it is from.
    rank = len(kernel)
    seen = _patches(_squares(x)[None], kernel, *sizes)
    places = len(x) * math.prod(seen.shape[2 : 2 + rank])
    count = as_tensor_on(places, x.device)
    square = seen.flatten(2, 1 + rank).sum(2).reshape(groups, -1)
    sums: list[Sums] = [{"count": count, "square": one} for one in square]
    if not gram:
        return sums
    width = square.shape[1]
    times = math.prod(kernel)

    def rows(own: Tensor) -> Iterator[Tensor]:
        for part in _parts(own, own[:1].numel() * times, products=True):
            patches = _patches(part, kernel, *sizes)
            yield patches.movedim(1, 1 + rank).reshape(-1, width)

    for group, own in enumerate(torch.split(x, x.shape[1] // groups, 1)):
        sums[group]["gram"] = _gram(rows(own), width, x)
    return sums


def added_sums(sums: Sums, more: Sums) -> Sums:
    """The sums over both inputs.

    >>> added_sums({"count": torch.tensor(1)}, {"count": torch.tensor(2)})
    {'count': tensor(3)}
    """
    return {name: x + more[name] for name, x in sums.items()}


def _parts(x: Tensor, width: int, products: bool = False) -> Iterator[Tensor]:
    # A few rows at a time, in the dtype of the sums, so that copies stay small: on a
    # CPU in its cache.
    if x.device.type == "cpu":
        size = 2**22 if products else 2**16
    else:
        size = 2**28 if products else 2**24
    for part in torch.split(x, max(1, size // max(1, width))):
        if part.dtype != torch.float64:
            part = part.float()
        yield part


def _squares(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1:], dtype=torch.float64, device=x.device)
    for part in _parts(x, x[:1].numel()):
        total += part.square().sum(0, dtype=torch.float64)
    return total


def _gram(parts: Iterator[Tensor], width: int, x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(width, width, dtype=dtype, device=x.device)
    for part in parts:
        total.addmm_(part.mT, part)
    return total


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    # (examples, channels, places..., kernel...), a view of the padded tensor.
    pads = [p for p in reversed(padding) for _ in range(2)]
    x = functional.pad(x, pads)
    for d, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        span = (size - 1) * gap + 1
        x = x.unfold(2 + d, span, step)[..., ::gap]
    return x


def fill_unreached(stats: Mapping[str, Mapping[str, Tensor]]) -> Stats:
    """Statistics with plain inputs for outputs that no data reached.

    >>> stats = {
    ...     "experts": {
    ...         "count": torch.tensor([4, 0]),
    ...         "square": torch.tensor([[8.0, 4.0], [0.0, 0.0]]),
    ...     }
    ... }
    >>> sf.calibration.fill_unreached(stats)["experts"]
    {'count': tensor([4, 2]), 'square': tensor([[8., 4.],
            [3., 3.]])}

    Experts that no token is routed to have no statistics of their own, and scores and
    solvers that read data refuse them. Here outputs that fewer than two inputs reached,
    or zeros alone, get two: of one size in all entries, the size of the leaf's other
    outputs (1 where there are none), and independent of each other, so that "gram" is a
    multiple of the identity. Then Wanda and SparseGPT rank the weights of an output
    as magnitude does, and change none; RIA ranks them by their shares in rows and
    columns alone.

    Args:
        stats: Statistics from `sf.calibration.inputs`, of all batches: add them before.

    Returns:
        Statistics of the same leaves, shapes and dtypes. Leaves that data reached keep
        their tensors.

    Raises:
        ValueError: Statistics without "count" and "square", such as
            `sf.calibration.experts` returns; attention that no batch reached.
    """
    return {path: _filled(path, of) for path, of in stats.items()}


def _filled(path: str, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "count" not in of or "square" not in of:
        got = ", ".join(map(repr, of))
        raise ValueError(
            "fill_unreached: expected 'count' and 'square' in the statistics at "
            f"{path!r}, got {got}"
        )
    count = of["count"]
    square = of["square"]
    if square.ndim == count.ndim:
        raise ValueError(
            f"fill_unreached: expected statistics with a shape at {path!r}, but no "
            "batch reached its layer, whose inputs may be of several kinds: leave it "
            "out with where="
        )
    entries = tuple(range(count.ndim, square.ndim))
    few = (count < 2) | (square.sum(entries) == 0)
    if not few.any():
        return dict(of)

    def where_few(value: Tensor | float, old: Tensor) -> Tensor:
        flags = few.reshape(count.shape + (1,) * (old.ndim - count.ndim))
        if isinstance(value, Tensor):
            new = value.to(old.dtype)
        else:
            new = torch.full((), value, dtype=old.dtype, device=old.device)
        return torch.where(flags, new, old)

    width = math.prod(square.shape[count.ndim :])
    inputs = where_few(0, count).sum() * width
    mean = where_few(0.0, square).sum() / inputs.clamp(min=1)
    size = torch.where(inputs > 0, mean, 1.0)
    filled = {"count": where_few(2, count), "square": where_few(2 * size, square)}
    if "gram" in of:
        eye = torch.eye(width, device=size.device)
        filled["gram"] = where_few(2 * size * eye, of["gram"])
    return filled


def as_stats(
    parts: dict[tuple[int, int], Sums], outputs: int, transposed: bool
) -> Sums:
    """The statistics of a leaf from the sums of parts of its outputs,
    `{(first, end): sums}`.

    >>> {
    ...     k: tuple(x.shape)
    ...     for k, x in as_stats(
    ...         {(0, 4): row_sums(torch.ones(5, 3), True)}, 4, False
    ...     ).items()
    ... }
    {'count': (), 'square': (3,), 'gram': (3, 3)}
    >>> halves = {
    ...     (0, 2): row_sums(torch.ones(5, 3), True),
    ...     (2, 4): row_sums(torch.zeros(6, 3), True),
    ... }
    >>> {k: tuple(x.shape) for k, x in as_stats(halves, 4, False).items()}
    {'count': (2,), 'square': (2, 3), 'gram': (2, 3, 3)}
    """
    one = next(iter(parts.values()))
    nothing = {name: torch.zeros_like(x) for name, x in one.items()}
    step = math.gcd(outputs, *itertools.chain(*parts))
    groups = list[Sums]()
    for first in range(0, outputs, step):
        total = nothing
        for (begin, end), sums in parts.items():
            if begin <= first < end:
                total = sums if total is nothing else added_sums(total, sums)
        groups.append(total)
    stats = dict(groups[0])
    if len(groups) > 1:
        for name in stats:
            stats[name] = torch.stack([own[name] for own in groups])
    if transposed:
        stats["square"] = stats["square"][..., None]
    return stats
