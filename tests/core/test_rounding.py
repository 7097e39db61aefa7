"""Counts from fractions: half to even, exact, NaN in a tensor as 0."""

import math

import pytest
import torch

import sparsefn as sf
from sparsefn.core import rounding

B = sf.budgets


def test_n_kept_rounds_half_to_even():
    assert [B.n_kept(n, 0.5) for n in (1, 2, 3, 5, 7)] == [1, 1, 1, 3, 3]
    assert (
        B.n_kept(10, 0.9) == 1 and B.n_kept(1000, 0.9) == 100 and B.n_kept(7, 0.9) == 1
    )
    assert B.n_kept(0, 0.3) == 0 and B.n_kept(9, 0.0) == 9 and B.n_kept(9, 1.0) == 0
    for n in range(60):
        for s in [i / 40 for i in range(41)]:
            assert B.n_kept(n, s) == n - round(s * n)
            assert int(B.n_kept(n, torch.tensor(s, dtype=torch.float64))) == n - round(
                s * n
            )


def test_n_kept_of_a_tensor():
    kept = torch.func.vmap(lambda s: B.n_kept(1000, s))(torch.tensor([0.9, 0.8]))
    assert kept.tolist() == [100, 200] and kept.dtype == torch.int64


def test_nan_in_a_tensor_is_sparsity_zero():
    nan = torch.tensor(math.nan)
    assert B.n_kept(10, nan) == 10
    assert [
        int(B.n_kept(10, torch.tensor(s))) for s in (-0.5, 1.5, math.inf, -math.inf)
    ] == [10, 0, 0, 10]
    for rule in (B.rounded, B.rounded_up, B.rounded_down):
        assert rule(nan, torch.tensor([3, 4])).tolist() == [0, 0] and rule(nan, 3) == 0
        for n in (3, torch.tensor([3])):
            with pytest.raises(
                ValueError, match=r"expected a fraction in \[0, 1\], got nan"
            ):
                rule(math.nan, n)
    params = {"w": torch.randn(4, 8), "v": torch.randn(8, 8)}
    for distribution in (B.uniform(), B.erk(), B.global_()):
        state = sf.gmp(nan, distribution=distribution).init(params)
        assert all(mask.all() for mask in state.masks.values())
    swap = sf.rigl(0.5, drop_fraction=nan, init="magnitude")
    state = swap.init(params)
    assert torch.equal(swap.update(state, params, 0).masks["w"], state.masks["w"])
    with pytest.raises(
        ValueError,
        match="expected a sparsity schedule to give numbers, got nan at step 0",
    ):
        sf.gmp(lambda step: math.nan).init(params)
    hidden = torch.vmap(lambda s: sf.gmp(s).init(params).masks["w"])(
        torch.tensor([math.nan, 0.5])
    )
    assert hidden.sum((1, 2)).tolist() == [32, 16]
    assert sf.masks.checkerboard((2, 8), nan).all()


def test_the_three_roundings():
    counts = torch.tensor([5, 7, 10])
    rules = (B.rounded, B.rounded_up, B.rounded_down)
    assert [rule(0.5, 5) for rule in rules] == [2, 3, 2]
    for ten in (10, torch.tensor(10)):
        # in float32 0.3 is above 3 / 10
        assert [int(rule(0.3, ten)) for rule in rules] == [3, 3, 3]
    assert [int(rule(1.0, torch.tensor(2**24 + 1))) for rule in rules] == [
        2**24 + 1
    ] * 3  # no float32
    for rule, wanted in zip(rules, ([2, 4, 5], [3, 4, 5], [2, 3, 5]), strict=True):
        for fraction in (
            0.5,
            torch.tensor(0.5),
            torch.tensor(0.5, dtype=torch.float64),
        ):
            got = rule(fraction, counts)
            assert (got.dtype, got.tolist()) == (torch.int64, wanted)


def test_counts_of_rows_come_from_ints_and_tensors():
    counts = [2, torch.tensor(7), torch.tensor([4, 5], dtype=torch.int32), -1]
    made = rounding.counts_of_rows(counts, [2, 1, 2, 1], torch.device("cpu"))
    assert made.tolist() == [2, 2, 7, 4, 5, -1] and made.dtype == torch.int64
    assert rounding.counts_of_rows(counts[::3], [2, 1], torch.device("meta")).shape == (
        3,
    )


def test_counts_of_rows_are_repeated_for_rows_of_one_count():
    counts = [2, torch.tensor(3), torch.tensor([4, 5])]
    assert rounding.counts_of_rows(counts, [1, 2, 2], torch.device("cpu")).tolist() == [
        2,
        3,
        3,
        4,
        5,
    ]
    assert rounding.counts_of_rows([2, 1], [1, 2], torch.device("cpu")).tolist() == [
        2,
        1,
        1,
    ]
    none = rounding.counts_of_rows([2], [0], torch.device("meta"))
    assert (
        none.shape == (0,) and none.dtype == torch.int64 and none.device.type == "meta"
    )
    short = rounding.counts_of_rows(
        [torch.tensor([1], dtype=torch.int32)], [2], torch.device("cpu")
    )
    assert short.tolist() == [1, 1] and short.dtype == torch.int64
