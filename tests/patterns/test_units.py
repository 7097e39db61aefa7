"""Rows of units and back."""

import itertools

import pytest
import torch

import sparsefn as sf
from sparsefn.patterns import units
from sparsefn.patterns.units import active_rows, from_rows, over_boxes, row_shape, to_columns, to_rows, unit_grid

P = sf.patterns
FITTING = [
    (P.unstructured(), (3, 4)),
    (P.nm(2, 4), (3, 8)),
    (P.nm(1, 2, axis=0), (4, 3, 2)),
    (P.block((2, 2)), (5, 3)),
    (P.block((3,)), (2, 7)),
    (P.block((2, 2, 2)), (3, 4, 5)),
    (P.channel(0), (4, 3)),
    (P.channel(-1, norm=2), (4, 3, 2)),
    (P.kernel(), (2, 3, 3, 3)),
    (P.kernel(reduce="max"), (4, 2)),
    (P.out_groups(2), (4, 3, 2)),
    (P.in_groups(3), (4, 6)),
    (P.row_balanced(), (5, 2)),
]


@pytest.mark.parametrize("pattern,shape", FITTING, ids=lambda x: str(x))
def test_rows_partition_the_elements(pattern, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = to_rows(pattern, x)
    ids = from_rows(pattern, torch.arange(rows.numel()).reshape(rows.shape), shape)
    assert ids.shape == shape and ids.unique().numel() == rows.numel()
    # Spreading a unit's elements count back gives each element the size of its own unit.
    sizes = to_rows(pattern, torch.ones_like(x), lambda unit: unit.sum(-1))
    assert int(sizes.sum()) == x.numel()
    assert torch.equal(from_rows(pattern, sizes, shape), torch.bincount(ids.flatten())[ids].double())


def test_groups_are_where_they_should_be():
    x = torch.arange(12.0).reshape(2, 6)
    assert to_rows(P.nm(1, 3), x).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert to_rows(P.nm(1, 2, axis=0), x)[0].tolist() == [0, 6]
    assert to_rows(P.out_groups(2), x).tolist() == x.tolist()
    assert to_rows(P.in_groups(2), x).tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert to_rows(P.row_balanced(), x).tolist() == x.tolist()
    conv = torch.arange(16.0).reshape(2, 4, 1, 2)
    assert to_rows(P.nm(2, 4, axis=1), conv)[0].tolist() == [0, 2, 4, 6]


def test_16_bit_scores_are_reduced_in_32_bits():
    x = torch.tensor([[1.0, 1.0078125, 1.0], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    rows = to_rows(P.block((1, 3)), x)
    assert rows.dtype == torch.float32 and rows[0, 0] > rows[0, 1]


def test_grids_leave_out_what_a_unit_spans():
    assert unit_grid(P.unstructured(), (3, 4)) == (3, 4)
    assert unit_grid(P.kernel(), (8, 4, 3, 3)) == (8, 4)
    assert unit_grid(P.channel(1), (8, 4, 3, 3)) == (4,)
    assert unit_grid(P.block((4, 4)), (9, 8)) == (3, 2)
    assert unit_grid(P.kernel(), (8, 4, 1, 1)) == (8, 4, 1, 1)


def test_over_boxes_of_an_empty_tensor():
    assert over_boxes(torch.ones(0, 3), (2, 2), lambda unit: unit.sum(-1)).shape == (0, 2)


@pytest.mark.parametrize(("shape", "box"), [((4, 6), (2, 3)), ((5, 7), (2, 3)), ((3,), (2,)), ((2, 3, 5), (2, 2, 2))])
def test_a_number_for_each_element_of_partial_boxes_too(shape, box):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(over_boxes(x, box, lambda boxes: boxes), x)
    sizes = over_boxes(x, box, lambda boxes: torch.full_like(boxes, boxes.shape[-1]))
    grid = over_boxes(x, box, lambda boxes: torch.full(boxes.shape[:1], float(boxes.shape[-1])))
    assert sizes.shape == shape
    for place in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        unit = tuple(i // b for i, b in zip(place, box, strict=True))
        assert sizes[tuple(place)] == grid[unit]


def test_a_unit_is_kept_while_it_has_more_than_pruning_leaves():
    mask = torch.tensor([[True, True, True, True, True], [True, True, True, False, False]])
    for zeros, want in ((0, [0, 0, 0, 0]), (1, [1, 1, 0, 0]), (2, [1, 1, 1, 0]), (4, [1, 1, 1, 0])):
        assert active_rows(P.block((1, 4), zeros=zeros), mask).int().tolist() == [want]


# ---- some boxes at a time ------------------------------------------------------------------------

REDUCTIONS = {
    "mean": lambda rows: rows.mean(-1),
    "sum": lambda rows: rows.sum(-1),
    "max": lambda rows: rows.amax(-1),
    "l1": lambda rows: torch.linalg.vector_norm(rows, 1, dim=-1),
    "squares": lambda rows: (rows * rows).sum(-1),
    "one": lambda rows: rows[:, :1],
    "ranks": lambda rows: rows.cumsum(-1),
}
GRIDS = [
    ((64, 48), (4, 6)),
    ((67, 50), (4, 6)),
    ((40, 90), (40, 1)),
    ((40, 90), (1, 90)),
    ((90, 64), (1, 16)),
    ((3, 4, 300), (3, 2, 7)),
    ((7, 6, 5, 5), (7, 1, 5, 5)),
    ((31, 30, 3, 3), (1, 1, 3, 3)),
    ((1, 3000), (1, 3)),
    ((3, 1111), (2, 1111)),
]
LAYOUTS = {
    "plain": lambda x: x,
    "last dimension first": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every other": lambda x: torch.stack([x, -x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture(params=[1, 2], ids=lambda n: f"threads={n}")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "box"), GRIDS, ids=str)
def test_some_boxes_at_a_time_give_the_bits_of_all_at_once(shape, box, layout, threads, monkeypatch):
    x = LAYOUTS[layout](torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    for name, fn in REDUCTIONS.items():
        for size in (1, 37, 400):
            monkeypatch.setattr(units, "_SLAB", size)
            got = over_boxes(x, box, fn)
            monkeypatch.setattr(units, "_SLAB", x.numel())
            assert torch.equal(got, over_boxes(x, box, fn)), (name, size)


def plainly(x, box, fn):
    """A function of each box, one by one."""
    cells = [range(0, size, b) for size, b in zip(x.shape, box, strict=True)]
    found = []
    for corner in itertools.product(*cells):
        part = x[tuple(slice(i, i + b) for i, b in zip(corner, box, strict=True))]
        found.append(fn(part.reshape(1, -1).repeat(2, 1))[0])
    return torch.stack(found).reshape([len(r) for r in cells])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min", "l2"])
def test_large_tensors_are_pooled_like_each_box_by_itself(dtype, reduce, threads, monkeypatch):
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[5, 5], x[9, 9], x[20] = float("nan"), float("inf"), -0.0, 1e-42
    pattern = P.block((4, 8), reduce)
    monkeypatch.setattr(units, "_SLAB", 20)
    rows = to_rows(pattern, x)
    wide = x.float() if dtype.itemsize == 2 else x
    want = plainly(wide, (4, 8), pattern.reduce).reshape(1, -1)
    assert rows.dtype == want.dtype and torch.equal(rows.nan_to_num(nan=123.0), want.nan_to_num(nan=123.0))
    batched = torch.func.vmap(lambda x: to_rows(pattern, x))(torch.stack([x, -x]))[0]
    assert torch.equal(batched.nan_to_num(nan=123.0), rows.nan_to_num(nan=123.0))


@pytest.mark.parametrize("pattern", [P.block((4, 8), zeros=3), P.block((4, 8)), P.channel(1), P.kernel()], ids=str)
def test_large_masks_are_the_same_in_parts(pattern, threads, monkeypatch):
    shape = (9, 20, 3, 3) if pattern.name.startswith("kernel") else (37, 50)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.02
    mask[: shape[0] // 2, :9] = True
    whole = active_rows(pattern, mask)
    assert 0 < whole.sum() < whole.numel()
    monkeypatch.setattr(units, "_SLAB", 20)
    assert torch.equal(active_rows(pattern, mask), whole)


def test_pooling_copies_a_little_at_a_time(threads):
    seen = []
    x = torch.ones(4095, 2048, dtype=torch.bfloat16)
    over_boxes(x, (15, 16), lambda rows: seen.append(rows.numel()) or rows.float().mean(-1))
    assert sum(seen) == x.numel() and max(seen) <= (1 << 18 if threads == 1 else 1 << 22)


def test_parameters_are_pooled_some_boxes_at_a_time_too(threads, monkeypatch):
    w = torch.nn.Parameter(torch.rand(20, 30, generator=torch.Generator().manual_seed(0)))
    want, seen = to_rows(P.block((4, 5)), w), []
    monkeypatch.setattr(units, "_SLAB", 20)
    mean = P.block((4, 5)).reduce
    rows = to_rows(P.block((4, 5)), w, lambda boxes: seen.append(len(boxes)) or mean(boxes))
    assert torch.equal(rows, want) and not rows.requires_grad and len(seen) > 1


def test_gradients_flow_through_large_tensors():
    x = torch.ones(1024, 512, requires_grad=True)
    over_boxes(x, (16, 16), lambda rows: rows.sum(-1)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# ---- shapes alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern,shape", [*FITTING, (P.unstructured(), ()), (P.unstructured(), (0, 3))], ids=str)
def test_the_shape_of_rows_is_known_without_them(pattern, shape):
    assert row_shape(pattern, shape) == to_rows(pattern, torch.ones(shape)).shape


@pytest.mark.parametrize("pattern,shape", [*FITTING, (P.nm(2, 4, axis=1), (3, 8, 5))], ids=str)
def test_groups_along_one_dimension_are_columns(pattern, shape):
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    columns = to_columns(pattern, x)
    if "nm" not in pattern.name and pattern.name not in ("row_balanced()",):
        assert columns is None or pattern.reduce is None
    if columns is not None:
        rows = to_rows(pattern, x)
        assert torch.equal(columns.transpose(1, 2).reshape(rows.shape), rows)
        assert columns.data_ptr() == x.data_ptr()


def test_which_groups_are_columns():
    assert to_columns(P.nm(2, 4), torch.ones(3, 8)).shape == (6, 4, 1)
    assert to_columns(P.nm(2, 4, axis=0), torch.ones(8, 3, 2)).shape == (2, 4, 6)
    assert to_columns(P.row_balanced(), torch.ones(8, 3)).shape == (8, 3, 1)
    assert to_columns(P.unstructured(), torch.ones(8)) is None
    for pattern in (P.unstructured(), P.channel(0), P.block((2, 2)), P.row_balanced()):
        assert to_columns(pattern, torch.ones(4, 4, 2)) is None
    assert to_columns(P.nm(1, 1), torch.ones(4)) is None and to_columns(P.row_balanced(), torch.ones(3, 0)) is None


def test_masks_do_not_keep_more_memory_than_they_need():
    for pattern, shape in ((P.block((16, 16)), (3, 40)), (P.channel(0), (5, 4)), (P.block((4,)), (2, 7))):
        units = torch.ones(row_shape(pattern, shape), dtype=torch.bool)
        mask = from_rows(pattern, units, shape)
        assert mask.is_contiguous() and mask.untyped_storage().nbytes() == mask.numel()
