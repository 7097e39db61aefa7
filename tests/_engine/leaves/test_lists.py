"""Elementwise work on many leaves at once; formulas have the bits of one tensor after
the other.
"""

import pytest
import torch

from sparsefn._engine.leaves import donation, lists
from sparsefn._engine.leaves.lists import TensorList
from sparsefn._engine.numbers.elementary import sqrt
from sparsefn.testing.launches import counted

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ODD = [
    float("nan"),
    -float("nan"),
    -0.0,
    0.0,
    float("inf"),
    -float("inf"),
    1e-45,
    -1e-40,
    3e38,
    1.0,
]
SHAPES = [(40, 9), (), (0, 3), (700,)]
NUMBER = torch.tensor(0.3)


def tensors(seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    odd = torch.tensor(ODD)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    some = [odd[torch.randint(0, len(ODD), shape, generator=draw)] for shape in SHAPES]
    return [
        torch.where(x > 0.5, y, x).to(dtype) for x, y in zip(made, some, strict=True)
    ]


def flags(seed):
    return [
        torch.rand(s, generator=torch.Generator().manual_seed(seed)) < 0.5
        for s in SHAPES
    ]


def identical(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(
            a.nan_to_num(7.0), b.nan_to_num(7.0)
        )
        assert torch.equal(a.isnan() | a.signbit(), b.isnan() | b.signbit())


FORMULAS = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "with numbers": lambda a, b: 0.7 * a + b * (1 - 0.9),
    "with 0-d tensors": lambda a, b: -NUMBER * (a / NUMBER) + b * NUMBER,
    "plus a 0-d tensor": lambda a, b: a * b + NUMBER,
    "root": lambda a, b: sqrt(a * a + b * b) * b,
    "wide": lambda a, b: (a.to(torch.float32) * b.to(torch.float32)).to(a.dtype),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_has_the_bits_of_each_tensor(name):
    formula, a, b = FORMULAS[name], tensors(0), tensors(1)
    identical(
        formula(TensorList(a), TensorList(b)).tensors,
        [formula(x, y) for x, y in zip(a, b, strict=True)],
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_other_dtypes_go_by_float32(dtype):
    formula, a, b = FORMULAS["wide"], tensors(0, dtype), tensors(1, dtype)
    identical(
        formula(TensorList(a), TensorList(b)).tensors,
        [formula(x, y) for x, y in zip(a, b, strict=True)],
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_where_chooses_the_very_bits(dtype):
    mask, a, b = flags(2), tensors(0, dtype), tensors(1, dtype)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def same(got, want):
        assert all(
            torch.equal(x.view(word), y.view(word))
            for x, y in zip(got, want, strict=True)
        )

    same(
        lists.where(TensorList(mask), TensorList(a), TensorList(b)).tensors,
        list(map(torch.where, mask, a, b)),
    )
    zero = torch.zeros((), dtype=dtype)
    same(
        lists.where(TensorList(mask), TensorList(a)).tensors,
        [torch.where(m, x, zero) for m, x in zip(mask, a, strict=True)],
    )
    wider = lists.where(
        TensorList(mask), TensorList(a), TensorList([x.double() for x in b])
    ).tensors
    identical(
        wider,
        [torch.where(m, x, y.double()) for m, x, y in zip(mask, a, b, strict=True)],
    )


def test_flags():
    a, b = flags(0), flags(1)
    assert all(
        map(
            torch.equal,
            (TensorList(a) | TensorList(b)).tensors,
            map(torch.logical_or, a, b),
        )
    )
    assert all(
        map(
            torch.equal,
            (TensorList(a) & TensorList(b)).tensors,
            map(torch.logical_and, a, b),
        )
    )


def test_an_operation_is_a_launch_and_reads_no_number_of_a_device():
    there = [[x.to("meta") for x in some] for some in (tensors(0), tensors(1))]
    number = NUMBER.to("meta")

    def run():
        a, b = map(TensorList, there)
        return (a * number - b / number) + number

    found = counted(run)
    # the sum with a number: it is written out once
    assert found.launches == 3 + 2 and not found.waits


def test_nothing_is_written_to():
    a, kept = tensors(0), tensors(0)
    x = TensorList(a)
    sqrt(x), x.to(torch.float32), lists.where(TensorList(flags(0)), x, x), x + NUMBER
    identical(a, kept)


def test_tensors_that_lie_alike():
    x, turned = torch.ones(4, 6), torch.ones(6, 4).T
    last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert lists.alike([x, x > 0]) and lists.alike([last, last.half()])
    assert not lists.alike([x, turned]) and not lists.alike([turned, turned])
    assert not lists.alike([last, torch.ones(2, 3, 4, 5)]) and not lists.alike(
        [x[::2], x[::2]]
    )
    wide = TensorList([last, torch.ones(7)]) + NUMBER
    assert (
        torch.equal(wide.tensors[0], last + NUMBER)
        and wide.tensors[0].stride() == last.stride()
    )


# ---- leaves at once ------------------------------------------------------------------

LEAVES = [
    torch.arange(float(n)).reshape(shape)
    for n, shape in ((6, (2, 3)), (0, (0,)), (4, (4,)), (1, ()))
]


def two(a, b):
    return a + b, (a > b)


def test_packs_keep_kinds_apart_and_are_not_too_large(monkeypatch):
    monkeypatch.setattr(lists, "MOST", 10)
    assert lists.packs("abaab", [4, 11, 6, 1, 2]) == [[0, 2], [1], [3], [4]]
    assert lists.packs([], []) == []


@pytest.mark.parametrize("most", [2, 6, 1000])
def test_results_are_those_of_each_leaf(most, monkeypatch):
    monkeypatch.setattr(lists, "MOST", most)
    others = [x.flip(0) if x.ndim else x for x in LEAVES]
    mixed = [x.double() if i % 2 else x for i, x in enumerate(others)]
    for second in (others, mixed):
        rows = list(zip(LEAVES, second, strict=True))
        for (a, b), (total, more) in zip(
            rows, lists.foreach_at_once(two, rows), strict=True
        ):
            assert (
                torch.equal(total, a + b)
                and torch.equal(more, a > b)
                and total.dtype == b.dtype
            )
        made = lists.foreach_at_once(lambda a, b: (a + b, b), rows, formula=True)
        assert all(
            torch.equal(x, a + b) and torch.equal(y, b)
            for (a, b), (x, y) in zip(rows, made, strict=True)
        )
    assert all(
        map(
            torch.equal,
            lists.foreach_at_once(torch.neg, [(x,) for x in LEAVES]),
            [-x for x in LEAVES],
        )
    )


def test_results_have_memory_of_their_own():
    leaves = [torch.ones(3), torch.ones(2, 2)]
    made = lists.foreach_at_once(torch.neg, [(x,) for x in leaves])
    assert [x.untyped_storage().nbytes() for x in made] == [12, 16]
    assert all(
        x.is_contiguous() and x.shape == leaf.shape
        for x, leaf in zip(made, leaves, strict=True)
    )


def test_a_leaf_by_itself_is_not_copied():
    (made,) = lists.split_like(row := torch.ones(4), [torch.ones(2, 2)])
    assert (
        made.data_ptr()
        == row.data_ptr()
        == lists.end_to_end([row.reshape(2, 2)]).data_ptr()
    )


def test_leaves_that_are_not_contiguous_are_read_row_by_row():
    assert lists.end_to_end(
        [torch.arange(6).reshape(2, 3).T, torch.zeros(1)]
    ).tolist() == [0, 3, 1, 4, 2, 5, 0]


def test_devices_pay_and_nothing_else():
    meta = torch.ones(2, device="meta")
    assert (
        lists.pays([meta])
        and not lists.pays([meta, torch.ones(2)])
        and not lists.pays([])
    )
    assert not lists.pays([meta.clone().requires_grad_()])
    seen = []
    torch.vmap(lambda x: seen.append(lists.pays([x])) or x)(meta[None])
    assert seen == [False]


def test_launches_do_not_grow_with_leaves():
    def launches(n, of=lambda x: x):
        leaves = [of(torch.ones(3, 5, device="meta")) for _ in range(n)]
        by_lists = counted(
            lambda: lists.foreach(lambda a, b: (a + b, a * b), leaves, leaves)
        ).launches
        return by_lists, counted(
            lambda: lists.foreach_at_once(two, list(zip(leaves, leaves, strict=True)))
        ).launches

    # two rows laid end to end, two operations, two results cut apart
    assert launches(2) == launches(90) == (2, 6)
    assert (
        launches(2, torch.Tensor.double) == launches(90, torch.Tensor.double) == (6, 6)
    )  # no lists


def test_a_gradient_flows_where_one_is_wanted():
    a, b = torch.ones(2, requires_grad=True), torch.ones(3)
    sums = lists.foreach(torch.mul, [a, b], [a * 3, b])
    (slope,) = torch.autograd.grad(sums[0].sum(), a)
    assert slope.tolist() == [6.0, 6.0]


def test_parts_are_small_only_where_memory_is_saved(monkeypatch):
    monkeypatch.setattr(lists, "PART_ON_CPU", 10)
    monkeypatch.setattr(lists, "MOST", 20)
    tensors, meta = [torch.ones(1)] * 4, [torch.ones(1, device="meta")] * 4
    assert lists.places_in_parts(tensors, [6, 4, 7, 12]) == [[0, 1, 2, 3]]
    with donation.donating([]):
        assert lists.places_in_parts(tensors, [6, 4, 7, 12]) == [[0, 1], [2], [3]]
        assert lists.places_in_parts(meta, [6, 4, 7, 12]) == [[0, 1, 2], [3]]
        assert lists.places_in_parts([], []) == []


def test_derivatives_flow_through_small_leaves_that_are_joined(monkeypatch):
    monkeypatch.setattr(lists, "FEWEST", 2)
    leaves = [torch.ones(2), torch.full((3,), 2.0)]
    rate = torch.tensor(3.0, requires_grad=True)
    made = lists.foreach(lambda x: x * rate, leaves)
    (slope,) = torch.autograd.grad(sum(x.sum() for x in made), rate)
    assert slope == 8.0
    with torch.autograd.forward_ad.dual_level():
        rate = torch.autograd.forward_ad.make_dual(torch.tensor(3.0), torch.tensor(1.0))
        for x, leaf in zip(
            lists.foreach(lambda x: x * rate, leaves), leaves, strict=True
        ):
            assert torch.equal(torch.autograd.forward_ad.unpack_dual(x).tangent, leaf)
