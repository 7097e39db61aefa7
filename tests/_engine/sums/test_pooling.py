"""Scores of units: one order of additions, whatever carries it out."""

import itertools
import math

import numpy as np
import pytest
import torch

import sparsefn as sf
from sparsefn._engine.numbers import elementary
from sparsefn._engine.sums import folds
from sparsefn._engine.sums.pooling import Pooling, _operator, pool, reference
from sparsefn.masks.patterns.units import active_rows, to_rows, units_of
from sparsefn.masks.scores import distance
from sparsefn.masks.scores import per_leaf as leaf_scores
from sparsefn.testing.laws_dependence import order_of_sums_is_fixed
from sparsefn.testing.meta import Meta, Row
from sparsefn.testing.strategies import large


def rows_of(pattern, x, *reduce):
    return to_rows(units_of(pattern, tuple(x.shape)), x, *reduce)


def active_of(pattern, mask):
    return active_rows(units_of(pattern, tuple(mask.shape)), mask)


P = sf.patterns
KINDS = [Pooling(name) for name in ("sum", "mean", "max", "min")] + [
    Pooling("norm", order)
    for order in (1, 2, 3, 4, 7.0, 0.5, 1.5, 0, -1, -2, math.inf, -math.inf)
]
BOXES = [
    ((8, 6), (2, 3)),
    ((6, 8), (6, 1)),
    ((5, 33), (1, 33)),
    ((4, 6, 3, 3), (1, 1, 3, 3)),
    ((4, 6, 3, 3), (4, 1, 3, 3)),
    ((4, 8, 5), (1, 4, 5)),
    ((4, 8, 5), (4, 8, 5)),
    ((6, 5), (1, 1)),
    ((300,), (150,)),
    ((1,), (1,)),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LAYOUTS = {
    "plain": lambda x: x,
    "backwards": lambda x: (
        x.permute(*reversed(range(x.ndim)))
        .contiguous()
        .permute(*reversed(range(x.ndim)))
    ),
    "last first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels last": lambda x: (
        x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    ),
}


def numbers(shape, dtype=torch.float32, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def special(shape, dtype):
    values = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        math.nan,
        math.inf,
        -math.inf,
        3.0,
        1e30,
        -1e30,
        1e-30,
        1e-42,
        6e4,
    ]
    picked = torch.randint(
        len(values), shape, generator=torch.Generator().manual_seed(1)
    )
    return torch.tensor(values, dtype=torch.float64)[picked].to(dtype)


def same(a, b):
    """The same bits, whichever NaN it is."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.contiguous().view(word).masked_fill(nan, 0),
        b.contiguous().view(word).masked_fill(nan, 0),
    )


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch):
    for name, value in (("_BLOCK", 40), ("_TALL", 8), ("_SHORT", 3)):
        monkeypatch.setattr(folds, name, value)


# ---- what it is ----------------------------------------------------------------------


def by_hand(values, join):
    """The definition, number by number."""
    values = list(values)
    while len(values) > 1:
        half = max(2**i for i in range(30) if 2**i < len(values))
        for i in range(half, len(values)):
            values[i - half] = join(values[i - half], values[i])
        values = values[:half]
    return values[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 25, 33, 49, 100])
def test_the_order_of_additions_is_the_one_that_is_told(size):
    x = numbers((5, size))
    rows = x.numpy()
    total = [by_hand(row, lambda a, b: a + b) for row in rows]
    assert Pooling("sum")(x).tolist() == total
    assert Pooling("mean")(x).tolist() == [t / np.float32(size) for t in total]
    assert Pooling("norm", 1)(x).tolist() == [
        by_hand(np.abs(row), lambda a, b: a + b) for row in rows
    ]
    squares = [by_hand(row * row, lambda a, b: a + b) for row in rows]
    assert Pooling("norm", 2)(x).tolist() == [np.sqrt(s) for s in squares]
    cubes = [
        by_hand(np.abs(row) * np.abs(row) * np.abs(row), lambda a, b: a + b)
        for row in rows
    ]
    roots = [np.float32(elementary.real_power(float(c), 1 / 3)) for c in cubes]
    assert Pooling("norm", 3)(x).tolist() == roots
    assert torch.equal(Pooling("max")(x), x.amax(-1)) and torch.equal(
        Pooling("min")(x), x.amin(-1)
    )


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_values_are_those_of_torch(how):
    x = numbers((7, 30), torch.float64)
    want = {
        "sum": lambda: x.sum(-1),
        "mean": lambda: x.mean(-1),
        "max": lambda: x.amax(-1),
        "min": lambda: x.amin(-1),
        "norm": lambda: torch.linalg.vector_norm(x, how.order, dim=-1),
    }[how.name]()
    torch.testing.assert_close(how(x), want)


def test_ends_are_those_of_torch():
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [
            [0.0, 0.0],
            [inf, 1.0],
            [-inf, 0.0],
            [nan, inf],
            [1e30, 1e30],
            [0.0, 2.0],
            [inf, -inf],
        ]
    )
    for order in (1, 2, 3, 0.5, 2.5, 0, -1, -2, -0.5, inf, -inf):
        got, want = (
            Pooling("norm", order)(x),
            torch.linalg.vector_norm(x, order, dim=-1),
        )
        torch.testing.assert_close(
            got, want, equal_nan=True, msg=f"{order}: {got}, {want}"
        )
    for name, fn in (
        ("sum", torch.sum),
        ("mean", torch.mean),
        ("max", torch.amax),
        ("min", torch.amin),
    ):
        torch.testing.assert_close(Pooling(name)(x), fn(x, -1), equal_nan=True)


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_zero_has_no_sign(how):
    for shape in ((3, 1), (3, 4), (3, 5)):
        for zero in (-0.0, 0.0):
            got = how(torch.full(shape, zero))
            assert torch.equal(torch.signbit(got), torch.zeros(3, dtype=torch.bool))


def test_scores_of_16_bits_are_pooled_in_32():
    for dtype in (torch.float16, torch.bfloat16):
        x = numbers((4, 9), dtype)
        for how in KINDS:
            assert same(how(x), how(x.float()))


def test_bools_are_counted():
    x = numbers((40, 300)) > 0
    assert Pooling("sum")(x).dtype == torch.int32 and torch.equal(
        Pooling("sum")(x), x.sum(-1, dtype=torch.int32)
    )
    assert torch.equal(Pooling("max")(x), x.any(-1)) and torch.equal(
        Pooling("min")(x), x.all(-1)
    )
    assert torch.equal(
        pool(x, (1, 100), Pooling("sum")),
        x.reshape(40, 3, 100).sum(-1, dtype=torch.int32),
    )
    for box in ((1, 300), (40, 1), (8, 10)):
        for name in ("sum", "max", "min"):
            assert same(pool(x, box, Pooling(name)), reference(x, box, name, 1.0))


def test_what_is_no_score_is_refused():
    for x in (
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.complex64),
    ):
        with pytest.raises(
            TypeError, match=f"expected floating-point scores, got {x.dtype}"
        ):
            Pooling("sum")(x)
    with pytest.raises(
        TypeError, match=r"expected floating-point scores, got torch\.bool"
    ):
        Pooling("mean")(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(
        TypeError, match=r"expected floating-point scores, got torch\.int64"
    ):
        sf.masks.topk_mask(
            torch.ones(4, 4, dtype=torch.int64), 1, pattern=P.block((2, 2))
        )


def test_of_nothing_there_are_zeros():
    for shape in ((0, 3), (3, 0)):
        assert Pooling("mean")(torch.ones(shape)).tolist() == [0.0] * shape[0]
    assert Pooling("max")(torch.ones(2, 0, dtype=torch.bfloat16)).dtype == torch.float32
    assert Pooling("sum")(torch.ones(5)).tolist() == 5.0


def test_the_reduction_of_a_pattern_takes_rows():
    x = numbers((6, 9))
    assert torch.equal(P.kernel("l2").reduce(x), Pooling("norm", 2)(x))
    assert torch.equal(
        P.channel(0, norm=3).reduce(x.reshape(2, 3, 9)),
        Pooling("norm", 3)(x).reshape(2, 3),
    )
    w = x.clone().requires_grad_()
    assert not P.kernel().reduce(w).requires_grad


# ---- it is the same everywhere -------------------------------------------------------


@pytest.mark.deep(but=["(8,*-torch.float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "box"), BOXES, ids=str)
def test_memory_operator_and_reference_have_the_same_bits(
    shape, box, dtype, small_blocks
):
    for x, layout in itertools.product(
        (numbers(shape, dtype), special(shape, dtype)), LAYOUTS.values()
    ):
        laid = layout(x)
        assert torch.equal(laid.nan_to_num(), x.nan_to_num())
        for how in KINDS:
            want = reference(x, box, how.name, float(how.order))
            assert same(pool(laid, box, how), want), how
            assert same(reference(laid, box, how.name, float(how.order)), want), how
            assert same(_operator(laid, list(box), how.name, float(how.order)), want), (
                how
            )


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_batches_are_loops(how):
    x = torch.stack([numbers((4, 6, 3, 3), seed=i) for i in range(6)]).reshape(
        2, 3, 4, 6, 3, 3
    )

    def units(x):
        return pool(x, (1, 2, 3, 3), how)

    want = torch.stack([units(y) for y in x.flatten(0, 1)])
    assert same(torch.vmap(torch.vmap(units))(x).flatten(0, 1), want)
    last = torch.vmap(units, -1)(x.flatten(0, 1).movedim(0, -1))
    assert same(last, want)


@pytest.mark.parametrize(("size", "width"), [(37, 39600), (3000, 495)])
def test_threads_do_not_matter(size, width, threads):
    # The work is worth a second thread from a million elements on.
    x = numbers((size, width))
    found = []
    for n in (1, 2, 3, 4):
        threads(n)
        found.append(
            [
                pool(x, box, Pooling("norm", 2))
                for box in ((1, x.shape[1]), (size, 1), (1, 11), (size, x.shape[1]))
            ]
        )
    for others in found[1:]:
        assert all(same(a, b) for a, b in zip(found[0], others, strict=True))


def test_the_operator_keeps_to_the_rules_of_custom_operators():
    for name, order in (("mean", 1.0), ("norm", 3.0)):
        torch.library.opcheck(
            torch.ops.sparsefn.pool.default, (numbers((4, 6)), [2, 3], name, order)
        )
        torch.library.opcheck(
            torch.ops.sparsefn.pool.default, (numbers((4, 6)), [1, 1], name, order)
        )


def permuted(n, size, seed=0):
    """n units that hold the same numbers in other orders."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(size, generator=generator) ** 4 * 100
    return torch.stack([a[torch.randperm(size, generator=generator)] for _ in range(n)])


def blocks_of(units, rows, columns, height, width):
    return (
        units.reshape(rows, columns, height, width)
        .permute(0, 2, 1, 3)
        .reshape(rows * height, columns * width)
    )


NEAR_TIES = [
    (P.kernel("mean"), permuted(64, 9).reshape(8, 8, 3, 3)),
    (P.kernel("l2"), permuted(64, 49).reshape(8, 8, 7, 7)),
    (P.block((1, 16), "sum"), permuted(64, 16).reshape(64, 16)),
    (P.block((4, 4)), blocks_of(permuted(64, 16), 8, 8, 4, 4)),
    (
        P.block((3, 5)),
        torch.nn.functional.pad(
            blocks_of(permuted(64, 15), 8, 8, 3, 5), (0, 2, 0, 1), value=0.5
        ),
    ),
    (P.channel(0), permuted(16, 500)),
    (P.channel(1, norm=2), permuted(16, 500).t().contiguous()),
    (P.channel(0, norm=3), permuted(16, 300).reshape(16, 20, 15)),
    (P.channel(0, norm=0.5), permuted(16, 30)),
]


@pytest.mark.parametrize(
    ("pattern", "x"),
    NEAR_TIES,
    ids=lambda v: "" if isinstance(v, torch.Tensor) else str(v),
)
def test_near_ties_end_alike_in_batches_and_in_every_layout(pattern, x):
    # a root rounds to one number again
    if "mean" in str(pattern) or "sum" in str(pattern):
        # sums that rounding alone tells apart
        assert len(rows_of(pattern, x).unique()) > 1

    def masks(x):
        return sf.masks.topk_mask(x, rows_of(pattern, x).numel() // 2, pattern=pattern)

    want = masks(x)
    for layout in LAYOUTS.values():
        laid = layout(x)
        assert torch.equal(masks(laid), want)
        assert torch.equal(
            torch.vmap(masks)(torch.stack([laid, laid.flip(0)]))[0], want
        )
        assert torch.equal(
            torch.vmap(torch.vmap(masks))(torch.stack([laid, laid])[None])[0, 1], want
        )


@pytest.mark.deep
# torch's own, when inductor is imported
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_near_ties_end_alike_in_compiled_and_exported_code():
    def all_masks(*leaves):
        pairs = zip(some, leaves, strict=True)
        return [
            sf.masks.topk_mask(x, rows_of(p, x).numel() // 2, pattern=p)
            for (p, _), x in pairs
        ]

    some = [
        *NEAR_TIES[::2],
        (P.block((256, 1024), "sum"), permuted(2, 256 * 1000).reshape(256, 2000)),
    ]
    leaves = [x for _, x in some]
    want = all_masks(*leaves)
    compiled = torch.compile(all_masks, fullgraph=True)(*leaves)
    assert all(torch.equal(a, b) for a, b in zip(want, compiled, strict=True))

    class Masks(torch.nn.Module):
        def forward(self, *leaves):
            return all_masks(*leaves)

    exported = torch.export.export(Masks(), tuple(leaves)).module()(*leaves)
    assert all(torch.equal(a, b) for a, b in zip(want, exported, strict=True))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_norm_is_the_same_bits_in_compiled_code():
    def norms(x):
        return [Pooling("norm", order)(x) for order in (1, 2, 3)]

    x = numbers((400, 49))
    for eager, compiled in zip(
        norms(x), torch.compile(norms, fullgraph=True)(x), strict=True
    ):
        assert same(eager, compiled)


@pytest.mark.parametrize("reduce", ["mean", "sum", "l2"])
def test_a_block_beside_a_border_is_pooled_as_one_among_many(reduce, threads):
    a = numbers((256, 500)).abs()
    pattern = P.block((256, 256), reduce)
    found = []
    for n in (1, 2, 4):
        threads(n)
        found.append(rows_of(pattern, a))
    assert same(found[0], found[1]) and same(found[0], found[2])
    alone = rows_of(pattern, a[:, :256])
    assert same(found[0][:, :1], alone)
    assert same(rows_of(pattern, torch.cat([a[:, :256]] * 3, 1)), alone.expand(1, 3))


def test_the_scores_of_a_channels_last_model_choose_the_same_kernels():
    x = permuted(64, 49).reshape(8, 8, 7, 7)
    gmp = sf.gmp(0.5, pattern=P.kernel("mean"))
    first, last = (
        gmp.init({"w": w}).masks["w"]
        for w in (x, x.to(memory_format=torch.channels_last))
    )
    assert torch.equal(first, last)


@pytest.mark.parametrize(
    "norm", [1, 2, 3, lambda rows: (rows[:, None] - rows).abs().amax(-1)]
)
def test_distances_do_not_depend_on_threads_layout_or_batch(norm, threads, monkeypatch):
    monkeypatch.setattr(leaf_scores, "_PIECE", 700)
    x = permuted(20, 30)

    def found(w):
        return distance(norm)(
            sf.State({"w": w}, {"w": torch.ones(w.shape) > 0}), (), 0
        )["w"]

    want = found(x)
    for n in (1, 2, 3):
        threads(n)
        assert same(found(x.t().contiguous().t()), want)
        monkeypatch.setattr(leaf_scores, "_PIECE", 700 * 4**n)
    assert same(torch.vmap(found)(torch.stack([x, -x]))[0], want)


def test_kept_units_are_found_in_every_layout():
    mask = numbers((12, 20)) > 1
    for pattern in (
        P.block((4, 5)),
        P.block((5, 3), zeros=4),
        P.channel(0),
        P.channel(1),
    ):
        want = active_of(pattern, mask)
        for layout in LAYOUTS.values():
            assert torch.equal(active_of(pattern, layout(mask)), want)
        assert torch.equal(
            torch.vmap(lambda m, p=pattern: active_of(p, m))(mask[None])[0], want
        )


def test_the_law_of_near_ties_finds_sums_that_depend_on_threads():
    def order(rows):
        return rows.sum(-1) if torch.get_num_threads() == 1 else rows.flip(-1)[:, 0]

    for reduce, holds in (("sum", True), (order, False)):
        pattern = P.block((4, 5), reduce)
        row = Row(
            "gmp",
            lambda sparsity, key, params, p=pattern: sf.gmp(sparsity, pattern=p),
            Meta(pattern=pattern),
        )
        if holds:
            order_of_sums_is_fixed(row, large(row.meta.layout.form, 300))
        else:
            with pytest.raises(AssertionError, match="threads: differs at"):
                order_of_sums_is_fixed(row, large(row.meta.layout.form, 300))
