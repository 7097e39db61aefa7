"""Elementwise work on many leaves at once."""

import pytest
import torch

from sparsefn.engine import donation, together
from sparsefn.testing.launches import counted

LEAVES = [torch.arange(float(n)).reshape(shape) for n, shape in ((6, (2, 3)), (0, (0,)), (4, (4,)), (1, ()))]


def both(a, b):
    return a + b, (a > b)


def test_packs_keep_kinds_apart_and_are_not_too_large(monkeypatch):
    monkeypatch.setattr(together, "MOST", 10)
    assert together.packs("abaab", [4, 11, 6, 1, 2]) == [[0, 2], [1], [3], [4]]
    assert together.packs([], []) == []


@pytest.mark.parametrize("most", [2, 6, 1000])
def test_results_are_those_of_each_leaf(most, monkeypatch):
    monkeypatch.setattr(together, "MOST", most)
    others = [x.flip(0) if x.ndim else x for x in LEAVES]
    mixed = [x.double() if i % 2 else x for i, x in enumerate(others)]
    for second in (others, mixed):
        rows = list(zip(LEAVES, second, strict=True))
        for (a, b), (total, more) in zip(rows, together.laid(both, rows), strict=True):
            assert torch.equal(total, a + b) and torch.equal(more, a > b) and total.dtype == b.dtype
        made = together.laid(lambda a, b: (a + b, b), rows, formula=True)
        assert all(torch.equal(x, a + b) and torch.equal(y, b) for (a, b), (x, y) in zip(rows, made, strict=True))
    assert all(map(torch.equal, together.laid(torch.neg, [(x,) for x in LEAVES]), [-x for x in LEAVES]))


def test_results_have_memory_of_their_own():
    leaves = [torch.ones(3), torch.ones(2, 2)]
    made = together.laid(torch.neg, [(x,) for x in leaves])
    assert [x.untyped_storage().nbytes() for x in made] == [12, 16]
    assert all(x.is_contiguous() and x.shape == leaf.shape for x, leaf in zip(made, leaves, strict=True))


def test_a_leaf_by_itself_is_not_copied():
    (made,) = together.apart(row := torch.ones(4), [torch.ones(2, 2)])
    assert made.data_ptr() == row.data_ptr() == together.end_to_end([row.reshape(2, 2)]).data_ptr()


def test_leaves_that_are_not_contiguous_are_read_row_by_row():
    assert together.end_to_end([torch.arange(6).reshape(2, 3).T, torch.zeros(1)]).tolist() == [0, 3, 1, 4, 2, 5, 0]


def test_devices_pay_and_nothing_else():
    meta = torch.ones(2, device="meta")
    assert together.pays([meta]) and not together.pays([meta, torch.ones(2)]) and not together.pays([])
    assert not together.pays([meta.clone().requires_grad_()])
    seen = []
    torch.vmap(lambda x: seen.append(together.pays([x])) or x)(meta[None])
    assert seen == [False]


def test_launches_do_not_grow_with_leaves():
    def launches(n, of=lambda x: x):
        leaves = [of(torch.ones(3, 5, device="meta")) for _ in range(n)]
        by_lists = counted(lambda: together.each(lambda a, b: (a + b, a * b), leaves, leaves)).launches
        return by_lists, counted(lambda: together.laid(both, list(zip(leaves, leaves, strict=True)))).launches

    assert launches(2) == launches(90) == (2, 6)  # two rows laid end to end, two operations, two results cut apart
    assert launches(2, torch.Tensor.double) == launches(90, torch.Tensor.double) == (6, 6)  # no lists


def test_a_gradient_flows_where_one_is_wanted():
    a, b = torch.ones(2, requires_grad=True), torch.ones(3)
    sums = together.each(torch.mul, [a, b], [a * 3, b])
    (slope,) = torch.autograd.grad(sums[0].sum(), a)
    assert slope.tolist() == [6.0, 6.0]


def test_parts_are_small_only_where_memory_is_saved(monkeypatch):
    monkeypatch.setattr(together, "_MOST_ON_CPU", 10)
    monkeypatch.setattr(together, "MOST", 20)
    tensors, meta = [torch.ones(1)] * 4, [torch.ones(1, device="meta")] * 4
    assert together.parts(tensors, [6, 4, 7, 12]) == [[0, 1, 2, 3]]
    with donation.giving([]):
        assert together.parts(tensors, [6, 4, 7, 12]) == [[0, 1], [2], [3]]
        assert together.parts(meta, [6, 4, 7, 12]) == [[0, 1, 2], [3]]
        assert together.parts([], []) == []
