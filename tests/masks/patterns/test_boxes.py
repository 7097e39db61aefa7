"""Boxes of a tensor, whole and partial, at once and slab by slab."""

import itertools

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.patterns import boxes
from sparsefn.masks.patterns.boxes import over_boxes
from sparsefn.masks.patterns.units import active_rows, to_rows, units_of

P = sf.patterns
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
REDUCTIONS = {
    "mean": lambda rows: rows.mean(-1),
    "sum": lambda rows: rows.sum(-1),
    "max": lambda rows: rows.amax(-1),
    "l1": lambda rows: torch.linalg.vector_norm(rows, 1, dim=-1),
    "squares": lambda rows: (rows * rows).sum(-1),
    "one": lambda rows: rows[:, :1],
    "ranks": lambda rows: rows.cumsum(-1),
}


def plainly(x, box, fn):
    """A function of each box, one by one."""
    cells = [range(0, size, b) for size, b in zip(x.shape, box, strict=True)]
    found = []
    for corner in itertools.product(*cells):
        part = x[tuple(slice(i, i + b) for i, b in zip(corner, box, strict=True))]
        found.append(fn(part.reshape(1, -1).repeat(2, 1))[0])
    return torch.stack(found).reshape([len(r) for r in cells])


def rows_of(pattern, x, *reduce):
    return to_rows(units_of(pattern, tuple(x.shape)), x, *reduce)


def active_of(pattern, mask):
    return active_rows(units_of(pattern, tuple(mask.shape)), mask)


def test_over_boxes_of_an_empty_tensor():
    assert over_boxes(torch.ones(0, 3), (2, 2), lambda unit: unit.sum(-1)).shape == (
        0,
        2,
    )


@pytest.fixture(params=[1, 2], ids=lambda n: f"threads={n}")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shape", "box"),
    [((4, 6), (2, 3)), ((5, 7), (2, 3)), ((3,), (2,)), ((2, 3, 5), (2, 2, 2))],
)
def test_a_number_for_each_element_of_partial_boxes_too(shape, box):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(over_boxes(x, box, lambda boxes: boxes), x)
    sizes = over_boxes(x, box, lambda boxes: torch.full_like(boxes, boxes.shape[-1]))
    grid = over_boxes(
        x, box, lambda boxes: torch.full(boxes.shape[:1], float(boxes.shape[-1]))
    )
    assert sizes.shape == shape
    for place in (
        torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    ):
        unit = tuple(i // b for i, b in zip(place, box, strict=True))
        assert sizes[tuple(place)] == grid[unit]


@pytest.mark.deep(but=["threads=1-*0*-plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "box"), GRIDS, ids=str)
def test_some_boxes_at_a_time_give_the_bits_of_all_at_once(
    shape, box, layout, threads, monkeypatch
):
    x = LAYOUTS[layout](torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    for name, fn in REDUCTIONS.items():
        for size in (1, 37, 400):
            monkeypatch.setattr(boxes, "_SLAB", size)
            got = over_boxes(x, box, fn)
            monkeypatch.setattr(boxes, "_SLAB", x.numel())
            assert torch.equal(got, over_boxes(x, box, fn)), (name, size)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min", "l2"])
def test_large_tensors_are_pooled_like_each_box_by_itself(
    dtype, reduce, threads, monkeypatch
):
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0], x[5, 5], x[9, 9], x[20] = float("nan"), float("inf"), -0.0, 1e-42
    pattern = P.block((4, 8), reduce)
    monkeypatch.setattr(boxes, "_SLAB", 20)
    rows = rows_of(pattern, x)
    wide = x.float() if dtype.itemsize == 2 else x
    want = plainly(wide, (4, 8), pattern.reduce).reshape(1, -1)
    assert rows.dtype == want.dtype and torch.equal(
        rows.nan_to_num(nan=123.0), want.nan_to_num(nan=123.0)
    )
    batched = torch.func.vmap(lambda x: rows_of(pattern, x))(torch.stack([x, -x]))[0]
    assert torch.equal(batched.nan_to_num(nan=123.0), rows.nan_to_num(nan=123.0))


@pytest.mark.parametrize(
    "pattern",
    [P.block((4, 8), zeros=3), P.block((4, 8)), P.channel(1), P.kernel()],
    ids=str,
)
def test_large_masks_are_the_same_in_parts(pattern, threads, monkeypatch):
    shape = (9, 20, 3, 3) if pattern.name.startswith("kernel") else (37, 50)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.02
    mask[: shape[0] // 2, :9] = True
    whole = active_of(pattern, mask)
    assert 0 < whole.sum() < whole.numel()
    monkeypatch.setattr(boxes, "_SLAB", 20)
    assert torch.equal(active_of(pattern, mask), whole)


def test_pooling_copies_a_little_at_a_time(threads):
    seen = []
    x = torch.ones(4095, 2048, dtype=torch.bfloat16)
    over_boxes(
        x, (15, 16), lambda rows: seen.append(rows.numel()) or rows.float().mean(-1)
    )
    assert sum(seen) == x.numel() and max(seen) <= (
        1 << 18 if threads == 1 else 1 << 22
    )


def test_parameters_are_pooled_some_boxes_at_a_time_too(threads, monkeypatch):
    w = torch.nn.Parameter(
        torch.rand(20, 30, generator=torch.Generator().manual_seed(0))
    )
    want, seen = rows_of(P.block((4, 5)), w), []
    monkeypatch.setattr(boxes, "_SLAB", 20)
    mean = P.block((4, 5)).reduce
    rows = rows_of(
        P.block((4, 5)), w, lambda boxes: seen.append(len(boxes)) or mean(boxes)
    )
    assert torch.equal(rows, want) and not rows.requires_grad and len(seen) > 1


def test_gradients_flow_through_large_tensors():
    x = torch.ones(1024, 512, requires_grad=True)
    over_boxes(x, (16, 16), lambda rows: rows.sum(-1)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# ---- shapes alone --------------------------------------------------------------------
