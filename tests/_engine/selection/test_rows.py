"""Top-k of every row, against the keys of `reference`."""

import numpy as np
import pytest
import torch

from sparsefn._engine.leaves import buffers
from sparsefn._engine.selection import entries, reference, rows


def arrays(*fields, absolute=False):
    (at,) = entries.arrays([entries.Entry(*fields, absolute=absolute)])
    return at


KINDS = {
    "continuous": lambda x: x,
    "ties": lambda x: x.round(),
    "zeros": lambda x: torch.where(x > 1.0, x, 0.0),
    "signed zeros": lambda x: torch.where(x > 0, -0.0, 0.0),
    "equal": lambda x: torch.ones_like(x),
    "neighbours": lambda x: (
        (torch.full_like(x, 1.5).view(torch.int32) + (4 * x).int())
        .view(x.dtype)
        .copysign(x)
    ),
    "NaN": lambda x: torch.where(x > 0.3, torch.nan, x),
    "-NaN and -inf": lambda x: torch.where(
        x > 0.3, -torch.nan, torch.where(x < -0.3, -torch.inf, x)
    ),
}
SHAPES = [
    (1, 1),
    (4, 1),
    (3, 7),
    (300, 40),
    (2, 9000),
    (0, 5),
    (5, 0),
    (3 * (buffers.BLOCK // 1000) + 1, 1000),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_integers(shape, kind):
    height, width = shape
    x = KINDS[kind](torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    flags = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1)) > 0.4
    own = torch.arange(height) % (width + 2) - 1
    for absolute, (allow, deny) in (
        (False, (None, None)),
        (True, (flags[0], None)),
        (False, (flags[0], flags[1])),
    ):
        open_ = (flags[0] if allow is not None else torch.ones(shape) > 0) & (
            flags[1] == 0 if deny is not None else True
        )
        keys = reference.rank_keys(x.abs() if absolute else x, open_)
        for counts in (
            own,
            torch.full((height,), width // 3),
            torch.full((height,), width + 1),
            torch.zeros(height).long(),
        ):
            at = arrays(x, allow, deny, absolute=absolute)
            rows.select_rows(at, counts.numpy())
            assert np.array_equal(at.out, reference.top_of_rows(keys, counts).numpy())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_every_dtype(dtype):
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    at = arrays(x, absolute=True)
    rows.select_rows(at, np.full(50, 10))
    assert np.array_equal(
        at.out, reference.top_of_rows(reference.rank_keys(x.abs()), 10).numpy()
    )


def test_float64_keeps_its_digits():
    x = 1 + 1e-12 * torch.randn(
        50, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for absolute in (False, True):
        at = arrays(x, absolute=absolute)
        rows.select_rows(at, np.full(50, 10))
        assert np.array_equal(
            at.out, reference.top_of_rows(reference.rank_keys(x), 10).numpy()
        )


def test_rows_need_not_lie_end_to_end():
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x[::2, 3:], x.flip(0)):
        at = arrays(view)
        rows.select_rows(at, np.full(len(view), 5))
        assert np.array_equal(
            at.out, reference.top_of_rows(reference.rank_keys(view), 5).numpy()
        )


def test_the_scores_are_not_written_to():
    x = torch.tensor([[1.0, -0.0, torch.nan], [2.0, 3.0, -1.0]])
    before = x.clone()
    rows.select_rows(arrays(x, x > 0, absolute=True), np.array([1, 2]))
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert x[0, 1].signbit()


@pytest.mark.parametrize("absolute", [False, True])
def test_tables_of_many_kinds_are_selected_from_together(absolute):
    seed = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 40, generator=seed).round() for _ in range(9)]
    tensors += [
        torch.randn(1, 41, generator=seed),
        torch.randn(2, 40, generator=seed),
        torch.zeros(1, 0),
    ]
    tensors += [
        torch.randn(1, 40, generator=seed).double(),
        torch.randn(1, 40, generator=seed).bfloat16(),
    ]
    tensors += [torch.randn(2, 42, generator=seed) for _ in range(12)]
    allow = [
        None if i % 3 else torch.rand(x.shape, generator=seed) > 0.5
        for i, x in enumerate(tensors)
    ]
    counts = [torch.full((len(x),), (5 * i) % 43) for i, x in enumerate(tensors)]
    listed = [
        arrays(x, flags, absolute=absolute)
        for x, flags in zip(tensors, allow, strict=True)
    ]
    rows.select_each([(at, n.numpy()) for at, n in zip(listed, counts, strict=True)])
    for at, x, flags, n in zip(listed, tensors, allow, counts, strict=True):
        assert np.array_equal(
            at.out,
            reference.top_of_rows(
                reference.rank_keys(x.abs() if absolute else x, flags), n
            ).numpy(),
        )


def test_scores_have_signs_unless_asked_otherwise():
    at = arrays(torch.tensor([[-3.0, 1.0]]))
    rows.select_each([(at, np.array([1]))])
    assert at.out.tolist() == [[False, True]]
