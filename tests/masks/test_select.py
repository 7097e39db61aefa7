"""Exact selection against an oracle that sorts with Python."""

import itertools
import math

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.patterns.units import from_rows, to_rows, units_of


def rows_of(pattern, x, *reduce):
    return to_rows(units_of(pattern, tuple(x.shape)), x, *reduce)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = [
    "continuous",
    "ties",
    "zeros",
    "equal",
    "nan",
    "inf",
    "subnormal",
    "sorted",
    "reversed",
    "signed zeros",
]


def make(kind, n, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    if kind == "ties":
        x = torch.randint(-2, 3, (n,), generator=g).double()
    elif kind == "zeros":
        x = torch.where(torch.rand(n, generator=g) < 0.9, 0.0, x)
    elif kind == "equal":
        x = torch.full((n,), 0.5, dtype=torch.float64)
    elif kind == "nan":
        x = torch.where(torch.rand(n, generator=g) < 0.4, math.nan, x)
    elif kind == "inf":
        x = torch.where(torch.rand(n, generator=g) < 0.3, math.inf, x)
        x = torch.where(torch.rand(n, generator=g) < 0.3, -math.inf, x)
    elif kind == "subnormal":
        x = (
            torch.randint(-3, 4, (n,), generator=g).double()
            * torch.finfo(dtype).smallest_normal
            / 4
        )
    elif kind in ("sorted", "reversed"):
        x = x.sort(descending=kind == "reversed").values
    elif kind == "signed zeros":
        x = torch.where(torch.rand(n, generator=g) < 0.5, -0.0, 0.0).double()
    return x.to(dtype)


def order(values, indices):
    """Indices from best to worst: score, NaN last, then lower index."""
    return sorted(
        indices,
        key=lambda i: (
            math.isnan(values[i]),
            -values[i] if not math.isnan(values[i]) else 0,
            i,
        ),
    )


def as_mask(winners, n):
    return torch.tensor([i in set(winners) for i in range(n)], dtype=torch.bool)


@pytest.mark.deep(but=["1-*", "7-*", "33-*-torch.float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_topk_is_the_oracle_for_every_count(n, kind, dtype):
    x = make(kind, n, dtype)
    best = order(x.tolist(), range(n))
    for k in range(n + 1):
        want = as_mask(best[:k], n)
        assert torch.equal(sf.masks.topk_mask(x, k), want)
        assert torch.equal(sf.masks.topk_mask(x, torch.tensor(k)), want)
        assert torch.equal(
            torch.func.vmap(lambda c: sf.masks.topk_mask(x, c))(torch.tensor([k]))[0],
            want,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5, 24])
def test_drop_and_grow_are_the_oracle_for_every_count(n, kind):
    x = make(kind, n, torch.float32, seed=1)
    mask = torch.rand(n, generator=torch.Generator().manual_seed(2)) < 0.5
    exclude = torch.rand(n, generator=torch.Generator().manual_seed(3)) < 0.3
    kept = [i for i in range(n) if mask[i]]
    gone = [i for i in range(n) if not mask[i]]
    free = [i for i in gone if not exclude[i]]
    for k in range(len(kept) + 1):
        best = order(x.tolist(), kept)
        assert torch.equal(
            sf.masks.drop_lowest(x, mask, k), as_mask(best[: len(kept) - k], n)
        )
        assert torch.equal(
            sf.masks.drop_lowest(x, mask, torch.tensor(k)),
            as_mask(best[: len(kept) - k], n),
        )
    for k in range(len(gone) + 1):
        assert torch.equal(
            sf.masks.grow_highest(x, mask, k),
            mask | as_mask(order(x.tolist(), gone)[:k], n),
        )
    for k in range(len(free) + 1):
        want = mask | as_mask(order(x.tolist(), free)[:k], n)
        assert torch.equal(sf.masks.grow_highest(x, mask, k, exclude=exclude), want)
        assert torch.equal(
            sf.masks.grow_highest(x, mask, torch.tensor(k), exclude=exclude), want
        )


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0)])
def test_empty_and_tiny_tensors(shape):
    x = torch.ones(shape)
    for k in range(x.numel() + 1):
        mask = sf.masks.topk_mask(x, k)
        assert mask.shape == x.shape and int(mask.sum()) == k
        assert torch.equal(sf.masks.drop_lowest(x, mask, k), torch.zeros_like(mask))
        assert int(sf.masks.grow_highest(x, torch.zeros_like(mask), k).sum()) == k


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float64, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("kind", ["continuous", "ties", "nan", "zeros"])
def test_global_topk_is_one_competition_in_leaf_order(kind, dtypes):
    tree = {
        "b": [make(kind, 9, dtypes[0]).reshape(3, 3), make(kind, 0, dtypes[0])],
        "a": make(kind, 7, dtypes[1], seed=5),
    }
    flat = [*tree["a"].double().tolist(), *tree["b"][0].double().flatten().tolist()]
    for k in range(17):
        masks = sf.masks.topk_masks(tree, k)
        got = torch.cat([masks["a"], masks["b"][0].flatten(), masks["b"][1]])
        assert torch.equal(got, as_mask(order(flat, range(16))[:k], 16))
        again = sf.masks.topk_masks(tree, torch.tensor(k))
        assert torch.equal(again["a"], masks["a"]) and torch.equal(
            again["b"][0], masks["b"][0]
        )


def test_global_topk_of_an_empty_tree():
    assert sf.masks.topk_masks({}, 0) == {}


def test_counts_of_each_group():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    mask = sf.masks.topk_mask(
        scores, torch.tensor([1, 3]), pattern=sf.patterns.row_balanced()
    )
    assert mask.tolist() == [[True, False, False, False], [False, True, True, True]]
    fewer = sf.masks.drop_lowest(
        scores, mask, torch.tensor([0, 2]), pattern=sf.patterns.row_balanced()
    )
    assert fewer.sum(1).tolist() == [1, 1]
    more = sf.masks.grow_highest(
        scores, fewer, torch.tensor([3, 0]), pattern=sf.patterns.row_balanced()
    )
    assert more.sum(1).tolist() == [4, 1]


def test_tensor_counts_are_clamped():
    x, mask = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, False, False])
    barred = torch.tensor([False, True, False])
    for big in (4, 10**9):
        assert sf.masks.topk_mask(x, torch.tensor(big)).all()
        assert not sf.masks.drop_lowest(x, mask, torch.tensor(big)).any()
        assert sf.masks.grow_highest(x, mask, torch.tensor(big)).all()
        assert sf.masks.grow_highest(
            x, mask, torch.tensor(big), exclude=barred
        ).tolist() == [
            True,
            False,
            True,
        ]
        hidden = torch.func.vmap(
            lambda k: sf.masks.grow_highest(x, mask, k, exclude=barred)
        )(torch.tensor([big]))
        assert hidden.tolist() == [[True, False, True]]
    assert not sf.masks.topk_mask(x, torch.tensor(-2)).any()
    assert torch.equal(
        torch.func.vmap(lambda k: sf.masks.topk_mask(x, k))(torch.tensor([-2, 9])).sum(
            1
        ),
        torch.tensor([0, 3]),
    )


UNITS = [
    sf.patterns.block((2, 2)),
    sf.patterns.block((2, 3), reduce="max"),
    sf.patterns.channel(0),
    sf.patterns.channel(1, norm=2),
]


@pytest.mark.parametrize("pattern", UNITS, ids=repr)
def test_units_are_dropped_and_grown_whole(pattern):
    scores = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    ids = from_rows(
        units_of(pattern, (5, 6)),
        torch.arange(rows_of(pattern, scores).numel()).reshape(1, -1),
    )
    units = int(ids.max()) + 1
    value = rows_of(pattern, scores)[0].tolist()
    for k in range(units + 1):
        mask = sf.masks.topk_mask(scores, k, pattern=pattern)
        won = order(value, range(units))[:k]
        assert torch.equal(mask, torch.isin(ids, torch.tensor(won, dtype=ids.dtype)))
        for j in range(k + 1):
            dropped = sf.masks.drop_lowest(scores, mask, j, pattern=pattern)
            assert torch.equal(
                dropped, torch.isin(ids, torch.tensor(won[: k - j], dtype=ids.dtype))
            )
    # A unit with one kept element is active; dropping clears it, growing passes it by.
    one = torch.zeros(5, 6, dtype=torch.bool)
    one[0, 0] = True
    assert not sf.masks.drop_lowest(scores, one, 1, pattern=pattern).any()
    grown = sf.masks.grow_highest(scores, one, units - 1, pattern=pattern)
    assert torch.equal(grown, one | (ids != ids[0, 0]))


def test_nm_fixes_its_count():
    scores = torch.tensor([[0.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    pattern = sf.patterns.nm(2, 4)
    want = [[False, True, True, False], [True, True, False, False]]
    assert sf.masks.topk_mask(scores, None, pattern=pattern).tolist() == want
    assert sf.masks.topk_mask(scores, 2, pattern=pattern).tolist() == want
    columns = sf.masks.topk_mask(scores, None, pattern=sf.patterns.nm(1, 2, axis=0))
    assert columns.tolist() == [[False, True, True, True], [True, False, False, False]]
    for n, m in itertools.product(range(3), [2]):
        assert (
            int(sf.masks.topk_mask(scores, None, pattern=sf.patterns.nm(n, m)).sum())
            == n * 4
        )


def test_threshold_mask():
    x = torch.tensor([1.0, math.nan, 3.0, 2.0])
    assert sf.masks.threshold_mask(x, 1.5).tolist() == [False, False, True, True]
    assert sf.masks.threshold_mask(x, torch.tensor(9.0)).tolist() == [False] * 4
    assert sf.masks.threshold_mask(x, 9.0, min_keep=2).tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert sf.masks.threshold_mask(x, 9.0, min_keep=4).all()


def test_bernoulli_mask_takes_probabilities():
    probs = torch.tensor([0.0, 1.0, 0.3]).expand(4096, 3)
    mask = sf.masks.bernoulli_mask(probs, sf.random.key(3))
    assert not mask[:, 0].any() and mask[:, 1].all()
    assert abs(mask[:, 2].double().mean() - 0.3) < 0.03


def test_straight_through_under_transforms():
    x = torch.tensor([0.2, 0.9, 0.5])

    def loss(s):
        return (
            sf.masks.straight_through(s > 0.4, s) * torch.tensor([1.0, 2.0, 3.0])
        ).sum()

    want = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(
        sf.masks.straight_through(x > 0.4, x), torch.tensor([0.0, 1.0, 1.0])
    )
    assert torch.equal(torch.func.grad(loss)(x), want)
    assert torch.equal(
        torch.func.vmap(torch.func.grad(loss))(x.expand(2, 3)), want.expand(2, 3)
    )
    assert torch.equal(
        torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(x),
        want,
    )
    assert torch.equal(torch.func.jvp(loss, (x,), (torch.ones(3),))[1], want.sum())


def test_selection_has_the_same_bits_under_every_transform():
    scores = make("nan", 48, torch.float32).reshape(3, 16)
    counts = torch.tensor([0, 5, 16])
    want = torch.stack(
        [sf.masks.topk_mask(s, int(k)) for s, k in zip(scores, counts, strict=True)]
    )
    assert torch.equal(torch.func.vmap(sf.masks.topk_mask)(scores, counts), want)
    compiled = torch.compile(
        torch.func.vmap(sf.masks.topk_mask), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(scores, counts), want)
    nested = torch.func.vmap(
        torch.func.vmap(sf.masks.topk_mask, in_dims=(None, 0)), in_dims=(0, None)
    )(scores, counts)
    assert torch.equal(nested.diagonal(dim1=0, dim2=1).T, want)


def test_int_counts_where_vmap_hides_the_masks():
    scores = make("ties", 24, torch.float32).reshape(3, 8)
    masks = make("continuous", 24, torch.float32).reshape(3, 8) > 0
    for call in (sf.masks.drop_lowest, sf.masks.grow_highest):
        want = torch.stack(
            [call(x, mask, 1) for x, mask in zip(scores, masks, strict=True)]
        )
        assert torch.equal(
            torch.func.vmap(lambda x, mask, call=call: call(x, mask, 1))(scores, masks),
            want,
        )


@pytest.mark.parametrize(
    "call", [sf.masks.topk_mask, lambda x, k: sf.masks.topk_masks([x], k)]
)
@pytest.mark.parametrize("k", [-1, 4])
def test_int_counts_out_of_range(call, k):
    with pytest.raises(ValueError, match=f"expected 0 <= n_keep <= 3, got {k}"):
        call(torch.ones(3), k)


def test_counts_are_checked():
    x, mask = torch.ones(3), torch.tensor([True, True, False])
    with pytest.raises(ValueError, match="expected 0 <= n_drop <= 2, got 3"):
        sf.masks.drop_lowest(x, mask, 3)
    with pytest.raises(ValueError, match="expected 0 <= n_grow <= 1, got 2"):
        sf.masks.grow_highest(x, mask, 2)
    with pytest.raises(ValueError, match="expected 0 <= n_grow <= 0, got 1"):
        sf.masks.grow_highest(x, mask, 1, exclude=~mask)
    for bad in (True, 1.0, "1", None):
        with pytest.raises(
            TypeError, match="expected n_keep to be an int or an integer tensor, got"
        ):
            sf.masks.topk_mask(x, bad)
    with pytest.raises(
        TypeError, match="expected n_keep of an integer dtype, got torch.float32"
    ):
        sf.masks.topk_mask(x, torch.tensor(1.0))
    with pytest.raises(
        ValueError, match=r"expected n_keep of shape \(\) or \(1,\), got \(2,\)"
    ):
        sf.masks.topk_mask(x, torch.tensor([1, 2]))
    with pytest.raises(
        ValueError, match=r"nm\(1, 3, axis=-1\) fixes n_keep at 1, got 2"
    ):
        sf.masks.topk_mask(x, 2, pattern=sf.patterns.nm(1, 3))
    with pytest.raises(
        TypeError, match="expected n_keep of an integer dtype, got torch.float32"
    ):
        sf.masks.topk_mask(x, torch.tensor(1.0), pattern=sf.patterns.nm(1, 3))
    with pytest.raises(
        ValueError, match=r"expected n_keep of shape \(\) or \(1,\), got \(2,\)"
    ):
        sf.masks.topk_mask(x, torch.tensor([1, 1]), pattern=sf.patterns.nm(1, 3))
    with pytest.raises(
        TypeError, match="expected floating-point scores, got torch.int64"
    ):
        sf.masks.topk_mask(torch.ones(3, dtype=torch.int64), 1)
    with pytest.raises(
        ValueError, match=r"expected a bool mask of shape \(3,\), got torch.bool \(2,\)"
    ):
        sf.masks.drop_lowest(x, mask[:2], 1)


@pytest.mark.deep(but=["ties-*"])
@pytest.mark.parametrize("m", [2, 4, 16, 64])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", ["continuous", "ties", "nan"])
def test_groups_along_any_axis(kind, axis, m):
    x = (
        make(kind, 64 * 128 * 3, torch.float32)
        .reshape(64, 128, 3)
        .movedim(2, 0 if axis == -1 else 2)
        .contiguous()
    )
    pattern = sf.patterns.nm(m // 2, m, axis=axis)
    rows = rows_of(pattern, x)
    want = torch.stack(
        [as_mask(order(row, range(m))[: m // 2], m) for row in rows.tolist()]
    )
    want = from_rows(units_of(pattern, tuple(x.shape)), want)
    assert torch.equal(sf.masks.topk_mask(x, None, pattern=pattern), want)
    tensor = sf.patterns.nm(torch.tensor(m // 2), m, axis=axis)
    assert torch.equal(sf.masks.topk_mask(x, None, pattern=tensor), want)
    state = sf.gmp(None, pattern=pattern, pruned="keep").init({"w": x})
    magnitude = torch.stack(
        [as_mask(order(row, range(m))[: m // 2], m) for row in rows.abs().tolist()]
    )
    assert torch.equal(
        state.masks["w"], from_rows(units_of(pattern, tuple(x.shape)), magnitude)
    )


@pytest.mark.parametrize(
    "pattern", [sf.patterns.out_groups(2), sf.patterns.in_groups(2)]
)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_one_count_a_group_of_an_empty_tensor(pattern, shape):
    for count in (torch.tensor([1, 1]), torch.tensor(1), 0):
        assert (
            sf.masks.topk_mask(torch.zeros(shape), count, pattern=pattern).shape
            == shape
        )


def test_what_a_pattern_fixes_is_taken_where_the_count_is_a_tensor():
    x = torch.randn(4, 8)
    for pattern in (sf.patterns.nm(2, 4), sf.patterns.nearly_diagonal(3)):
        want = sf.masks.topk_mask(x, None, pattern=pattern)
        for count in (2, 0, 99):
            assert torch.equal(
                sf.masks.topk_mask(x, torch.tensor(count), pattern=pattern), want
            )
    counts = torch.tensor([1, 2])
    many = torch.vmap(lambda n: sf.masks.topk_mask(x, n, pattern=sf.patterns.nm(2, 4)))(
        counts
    )
    assert torch.equal(many[0], many[1])


def test_selection_on_meta_knows_shapes_of_any_size():
    for shape in ((2**30,), (2**20, 2**22)):
        x = torch.empty(shape, device="meta")
        masks = [
            sf.masks.topk_mask(x, 5),
            sf.masks.topk_mask(x, torch.tensor(5)),
            sf.masks.topk_masks({"a": x, "b": x}, 5)["b"],
        ]
        masks += [sf.masks.drop_lowest(x, x > 0, 5), sf.masks.grow_highest(x, x > 0, 5)]
        if len(shape) == 2:
            patterns = (
                (sf.patterns.nm(2, 4), None),
                (sf.patterns.row_balanced(), 3),
                (sf.patterns.channel(0), 3),
            )
            masks += [
                sf.masks.topk_mask(x, count, pattern=pattern)
                for pattern, count in patterns
            ]
        wanted = {(torch.Size(shape), torch.bool, "meta")}
        full = {
            (mask.shape, mask.dtype, mask.device.type) for mask in masks if mask.ndim
        }
        assert full == wanted
