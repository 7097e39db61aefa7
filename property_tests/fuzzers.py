"""What `million` tries beside the checks of rows: compiled updates, networks that get
smaller, and selection.

Each takes a seed and what counts the cases, and raises at the first that is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsefn as sf
from property_tests.laws_primitives import LAWS, PrimitiveLaw
from sparsefn.testing import coverage
from sparsefn.testing.byte_trees import DTYPES, EVERY, Source, filled
from sparsefn.testing.harness import hold
from tests.shrinking import by_masks, compare
from tests.shrinking.networks import networks

Run = Callable[[int, Counter[str]], None]
NETS_TRIED = 20  # networks at one seed
ROWS, LONGEST = 500, 16  # rows of scores in one call, and the longest


def counting(
    counted: Counter[str], check: Callable[[Any], object]
) -> Callable[[Any], None]:
    """The check, which counts what it is tried on."""

    def run(example: Any) -> None:
        counted.update([coverage.CASES])
        check(example)

    return run


# ---- shrinking -----------------------------------------------------------------------

NETWORKS: dict[str, Callable[[Any], object]] = {
    "units": lambda drawn: compare.check(
        *drawn[0], seed=drawn[1], counted=drawn[2], forms=(drawn[3],)
    ),
    "masks": lambda drawn: by_masks.check(*drawn[0], drawn[1]),
}
NETS = st.tuples(
    networks(most_steps=8),
    st.integers(0, 9999),
    st.booleans(),
    st.sampled_from([None, "program"]),
)


def shrinking(name: str) -> Run:
    """Random networks without random units, or under random masks, have the outputs of
    the masked ones.
    """

    def run(seed: int, counted: Counter[str]) -> None:
        hold(
            f"shrinking {name}",
            counting(counted, NETWORKS[name]),
            NETS,
            NETS_TRIED,
            seed,
        )

    return run


# ---- selection -----------------------------------------------------------------------


def primitive(law: PrimitiveLaw, name: str) -> Run:
    """A law of a primitive on drawn examples."""

    def run(seed: int, counted: Counter[str]) -> None:
        check = counting(
            counted, lambda example: law.check(law.subjects[name], example)
        )
        hold(f"{law.name} {name}", check, law.examples, 100 * law.share, seed)

    return run


def primitives() -> Iterator[tuple[str, str, Run]]:
    """The name of each law, of what it is about, and how it is tried."""
    return (
        (law.name, name, primitive(law, name)) for law in LAWS for name in law.subjects
    )


def ranks(scores: Tensor, free: Tensor) -> np.ndarray:
    """The rank of every entry in its row: the free ones first, NaN last of these, then
    the larger, then the first.
    """
    x, taken = scores.double().numpy(), ~free.numpy()
    nan = np.isnan(x)
    places = np.broadcast_to(np.arange(x.shape[1]), x.shape)
    order = np.lexsort((places, -np.where(nan, 0.0, x), nan, taken), axis=-1)
    return np.argsort(order, axis=-1)


def each_row(
    what: str,
    got: Tensor,
    wanted: np.ndarray,
    scores: Tensor,
    counts: Tensor,
    counted: Counter[str],
) -> None:
    """Every row is a case."""
    wrong = (got.numpy() != wanted).any(1).nonzero()[0]
    counted.update({coverage.CASES: len(scores)})
    if len(wrong):
        i = int(wrong[0])
        said = f"expected {wanted[i].tolist()}, got {got[i].tolist()}"
        raise AssertionError(
            f"{what} of {int(counts[i])} by {scores[i].tolist()}, {scores.dtype}: "
            f"{said}"
        )


def rows_of_scores(seed: int, counted: Counter[str]) -> None:
    """Short rows of hard scores, some hundred in each call, beside a sort of all of
    them by NumPy.
    """
    draw = np.random.default_rng(seed)
    rows = sf.patterns.row_balanced()
    for dtype in (*dict.fromkeys(DTYPES),):
        for palette in (*EVERY, "rare"):
            shape = (ROWS, int(draw.integers(1, LONGEST + 1)))
            source = Source(draw.bytes(Source.choices + ROWS * LONGEST))
            scores = filled(
                source, palette, torch.empty(shape, dtype=dtype, device="meta")
            )
            mask, exclude = (
                torch.from_numpy(draw.random(shape) < draw.random((ROWS, 1)))
                for _ in range(2)
            )
            parts = torch.from_numpy(draw.random(ROWS))

            def some(free: Tensor, parts: Tensor = parts) -> Tensor:
                return (parts * (free.sum(1) + 1)).long()

            whole = torch.ones_like(mask)
            counts = some(whole)
            best = ranks(scores, whole) < counts.numpy()[:, None]
            each_row(
                "topk_mask",
                sf.masks.topk_mask(scores, counts, pattern=rows),
                best,
                scores,
                counts,
                counted,
            )
            each_row(
                "a batched topk_mask",
                torch.vmap(sf.masks.topk_mask)(scores, counts),
                best,
                scores,
                counts,
                counted,
            )
            gone = some(mask)
            stay = mask.numpy() & (
                ranks(scores, mask) < (mask.sum(1) - gone).numpy()[:, None]
            )
            dropped = torch.vmap(sf.masks.drop_lowest)(scores, mask, gone)
            each_row("drop_lowest", dropped, stay, scores, gone, counted)
            free = ~(mask | exclude)
            new = some(free)
            grown = mask.numpy() | (
                free.numpy() & (ranks(scores, free) < new.numpy()[:, None])
            )
            got = torch.vmap(
                lambda s, m, n, e: sf.masks.grow_highest(s, m, n, exclude=e)
            )(scores, mask, new, exclude)
            each_row("grow_highest", got, grown, scores, new, counted)
