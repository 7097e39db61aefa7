"""The order of a competition as integers, and winners by operations of fixed shapes."""

import math

import pytest
import torch

from sparsefn._engine.selection import reference

ROW = [0.0, -0.0, math.nan, -math.inf, 1.0, math.inf, -1.0, 5e-324, -math.nan]
ORDER = [5, 4, 7, 0, 1, 6, 3, 2, 8]  # best to worst


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_keys_have_the_order_of_the_competition(dtype):
    x = torch.tensor(ROW, dtype=dtype)
    if dtype != torch.float64:  # 5e-324 became a zero
        x[7] = torch.finfo(dtype).smallest_normal / 4
    keys = reference.rank_keys(x)
    assert keys.dtype == (torch.int64 if dtype == torch.float64 else torch.int32)
    assert keys.sort(descending=True, stable=True).indices.tolist() == ORDER
    assert keys[0] == keys[1] and keys[2] == keys[8]


def test_what_may_not_win_is_below_all():
    keys = reference.rank_keys(
        torch.tensor([math.inf, math.nan]), torch.tensor([False, True])
    )
    assert keys[0] == torch.iinfo(torch.int32).min < keys[1]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_absolute_keys_are_those_of_absolute_values(dtype):
    x = torch.tensor(ROW, dtype=dtype)
    assert torch.equal(
        reference.rank_keys(x, absolute=True), reference.rank_keys(x.abs())
    )


def test_scores_are_floats():
    with pytest.raises(
        TypeError, match="expected floating-point scores, got torch.int64"
    ):
        reference.rank_keys(torch.tensor([1]))


@pytest.mark.parametrize("k", [-1, 0, 1, 2, 3, 9])
def test_top_clamps_ints_and_tensors_and_bars(k):
    keys = reference.rank_keys(
        torch.tensor([[3.0, 1.0, 3.0], [1.0, 1.0, 1.0]]),
        torch.tensor([[True] * 3, [False] * 3]),
    )
    want = [[i in [0, 2, 1][: max(k, 0)] for i in range(3)], [False] * 3]
    assert reference.top_of_rows(keys, k).tolist() == want
    assert reference.top_of_rows(keys, torch.tensor(k)).tolist() == want
    assert reference.top_of_rows(keys, torch.tensor([k, 1])).tolist() == want


@pytest.mark.parametrize("k", range(-1, 7))
def test_top_takes_the_earlier_of_equals_below_the_best(k):
    keys = torch.tensor([[4, 2, 2, 5, 2]], dtype=torch.int64)
    want = [[i in [3, 0, 1, 2, 4][: max(k, 0)] for i in range(5)]]
    for count in (k, torch.tensor(k), torch.tensor([k])):
        assert reference.top_of_rows(keys, count).tolist() == want


def test_no_unit_and_no_row():
    for shape in ((0, 3), (2, 0)):
        assert (
            reference.top_of_rows(
                torch.zeros(shape, dtype=torch.int32), torch.tensor(1)
            ).shape
            == shape
        )
