"""Units and groups."""

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.patterns.units import to_rows, units_of


def rows_of(pattern, x, *reduce):
    return to_rows(units_of(pattern, tuple(x.shape)), x, *reduce)


P = sf.patterns


@pytest.mark.parametrize(
    "reduce,want",
    [
        ("mean", [[2.5, 3.5], [6.5, 7.0]]),
        ("sum", [[10.0, 7.0], [13.0, 7.0]]),
        ("max", [[5.0, 5.0], [7.0, 7.0]]),
        ("min", [[0.0, 2.0], [6.0, 7.0]]),
        (lambda unit: unit.amax(-1) - unit.amin(-1), [[5.0, 3.0], [1.0, 0.0]]),
    ],
)
def test_partial_borders_are_reduced_over_what_exists(reduce, want):
    x = torch.tensor([[0.0, 1.0, 2.0], [4.0, 5.0, 5.0], [6.0, 7.0, 7.0]])
    assert rows_of(P.block((2, 2), reduce=reduce), x).tolist() == [
        [v for row in want for v in row]
    ]


def test_norms():
    x = torch.tensor([[3.0, -4.0], [1.0, 1.0]])
    assert rows_of(P.channel(0, norm=2), x).tolist() == [[5.0, pytest.approx(2**0.5)]]
    assert rows_of(P.channel(0), x).tolist() == [[7.0, 2.0]]
    assert rows_of(P.channel(1, norm=float("inf")), x).tolist() == [[3.0, 4.0]]
    assert rows_of(P.block((1, 2), reduce="l2"), x).tolist() == [
        [5.0, pytest.approx(2**0.5)]
    ]


def test_patterns_are_values():
    assert P.block([2, 2]) == P.block((2, 2)) and P.block((2, 2)) != P.block((2, 1))
    assert hash(P.nm(2, 4)) == hash(P.nm(2, 4)) and P.nm(2, 4) != P.nm(2, 4, axis=0)
    assert (
        repr(P.channel(1, norm=2))
        == "channel(axis=1, norm=2)"
        == repr(P.channel(1, norm=2, groups=1))
    )
    assert repr(P.channel(0, groups=4)) == "channel(axis=0, norm=1, groups=4)"
    assert P.channel(0, groups=4) != P.channel(0)
    assert repr(P.block((1, 4), zeros=2)) == "block((1, 4), reduce='mean', zeros=2)"
    assert P.block((1, 4), zeros=2) != P.block((1, 4)) == P.block((1, 4), zeros=4)
    assert repr(P.nearly_diagonal(3)) == "nearly_diagonal(3)"
    assert P.nm(torch.tensor(2), 4) == P.nm(2, 4) != P.nm(torch.tensor(3), 4)


@pytest.mark.parametrize(
    "make,error,text",
    [
        (lambda: P.nm(5, 4), ValueError, "nm: expected n <= m, got n=5, m=4"),
        (lambda: P.nm(-1, 4), ValueError, "expected n >= 0, got -1"),
        (lambda: P.nm(0, 0), ValueError, "expected m >= 1, got 0"),
        (lambda: P.nm(1.0, 4), TypeError, "expected n to be an int, got float"),
        (
            lambda: P.nm(torch.tensor(1.0), 4),
            TypeError,
            r"nm: expected n to be a 0-d int64 tensor, got torch.float32 o",
        ),
        (
            lambda: P.nm(torch.tensor([1]), 4),
            TypeError,
            r"0-d int64 tensor, got torch.int64 of shape \(1,\)",
        ),
        (
            lambda: sf.masks.topk_mask(
                torch.ones(4), 1, pattern=P.nm(torch.tensor(1), 4)
            ),
            ValueError,
            "fixes n_keep at 1, got",
        ),
        (lambda: P.block((0, 2)), ValueError, "expected block sizes >= 1, got 0"),
        (
            lambda: P.block((2, 2), reduce="median"),
            ValueError,
            "expected reduce to be one of 'mean', 'sum'",
        ),
        (
            lambda: P.block((2, 2), zeros=5),
            ValueError,
            "expected zeros <= 4, the elements of a block, got 5",
        ),
        (lambda: P.block((2, 2), zeros=-1), ValueError, "expected zeros >= 0, got -1"),
        (
            lambda: P.block((2, 2), zeros=0.5),
            TypeError,
            "expected zeros to be an int, got float",
        ),
        (lambda: P.channel(0, groups=0), ValueError, "expected groups >= 1, got 0"),
        (
            lambda: P.nearly_diagonal(2),
            ValueError,
            "nearly_diagonal: expected an odd nearliness, got 2",
        ),
        (
            lambda: P.nearly_diagonal(3.0),
            TypeError,
            "expected nearliness to be an int, got float",
        ),
        (lambda: P.out_groups(0), ValueError, "expected groups >= 1, got 0"),
        (lambda: P.channel(True), TypeError, "expected axis to be an int, got bool"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "pattern,shape,text",
    [
        (
            P.nm(2, 4),
            (3, 6),
            r"nm\(2, 4, axis=-1\): expected axis -1 divisible by 4, got shape \(3, 6\)",
        ),
        (
            P.nm(2, 4, axis=2),
            (4, 4),
            r"nm\(2, 4, axis=2\): no axis 2 in shape \(4, 4\)",
        ),
        (
            P.block((2, 2)),
            (8,),
            r"block\(\(2, 2\), reduce='mean'\): expected 2 dimensions or more, got "
            r"shape \(8,\)",
        ),
        (
            P.out_groups(3),
            (4, 3),
            r"out_groups\(3\): expected axis 0 divisible by 3, got shape \(4, 3\)",
        ),
        (
            P.in_groups(2),
            (4, 3),
            r"in_groups\(2\): expected axis 1 divisible by 2, got shape \(4, 3\)",
        ),
        (P.in_groups(2), (4,), r"in_groups\(2\): no axis 1 in shape \(4,\)"),
        (
            P.channel(0, groups=4),
            (6, 3),
            r"groups=4\): expected axis 0 divisible by 4, got shape \(6, 1\)",
        ),
        (
            P.nearly_diagonal(3),
            (4, 4, 4),
            r"nearly_diagonal\(3\): expected 2 dimensions, got shape \(4, 4, 4\)",
        ),
        (
            P.nearly_diagonal(-1),
            (4,),
            r"nearly_diagonal\(-1\): expected 2 dimensions, got shape \(4,\)",
        ),
        (
            P.nearly_diagonal(7),
            (5, 3),
            r"nearly_diagonal\(7\): expected nearliness // 2 < 3, the smaller side of "
            r"shape \(5, 3\)",
        ),
        (
            P.channel(2),
            (4, 3),
            r"channel\(axis=2, norm=1\): no axis 2 in shape \(4, 3\)",
        ),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(pattern, shape, text):
    with pytest.raises(ValueError, match=text):
        sf.masks.topk_mask(
            torch.ones(shape), None if pattern.fixed else 0, pattern=pattern
        )
    with pytest.raises(ValueError, match=text + ".* at 'body.w'"):
        sf.static(0.5, pattern=pattern, where="*").init(
            {"body": {"w": torch.ones(shape)}}
        )


def inside(scores, box, zeros):
    """Blocks of a matrix, and of each the flat indices of what it loses: told by plain
    loops.
    """
    rows, columns = scores.shape
    blocks = []
    for i in range(0, rows, box[0]):
        for j in range(0, columns, box[1]):
            cells = [
                (r, c)
                for r in range(i, min(i + box[0], rows))
                for c in range(j, min(j + box[1], columns))
            ]
            ranked = sorted(
                cells,
                key=lambda cell: (
                    scores[cell].isnan().item(),
                    -scores[cell].item(),
                    cell,
                ),
            )
            blocks.append((cells, ranked[max(len(cells) - zeros, 0) :]))
    return blocks


@pytest.mark.parametrize("kind", ["distinct", "ties", "nan"])
@pytest.mark.parametrize("zeros", [0, 1, 3, 5])
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((4, 6), (2, 3)),
        ((5, 7), (2, 3)),
        ((3, 8), (1, 5)),
        ((7, 2), (6, 1)),
        ((7, 9), (5, 8)),
    ],
)
def test_a_pruned_block_loses_its_worst_elements(shape, box, zeros, kind):
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    if kind == "ties":
        scores = (scores * 3).floor()
    elif kind == "nan":
        scores = torch.where(scores < 0.3, torch.nan, scores)
    pattern = P.block(box, reduce="sum", zeros=min(zeros, box[0] * box[1]))
    blocks = inside(scores, box, zeros)
    whole = P.block(box, reduce="sum")
    for n_keep in range(len(blocks) + 1):
        mask = sf.masks.topk_mask(scores, n_keep, pattern=pattern)
        kept = sf.masks.topk_mask(scores, n_keep, pattern=whole)
        want = torch.ones(shape, dtype=torch.bool)
        for cells, lost in blocks:
            if not kept[cells[0]]:
                for cell in lost:
                    want[cell] = False
        assert torch.equal(mask, want), n_keep
        assert torch.equal(
            sf.masks.topk_mask(scores, torch.tensor(n_keep), pattern=pattern), want
        )


def test_pruned_blocks_stay_pruned_and_grow_back_whole():
    scores = torch.tensor(
        [[4.0, 1.0, 2.0, 3.0], [9.0, 8.0, 7.0, 6.0], [1.0, 5.0, 5.0, 1.0]]
    )
    pattern = P.block((1, 4), zeros=2)
    mask = sf.masks.topk_mask(scores, 2, pattern=pattern)
    assert mask.int().tolist() == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    # Only whole blocks are there to be dropped, and what is left of a pruned one is not
    # touched.
    less = sf.masks.drop_lowest(-scores, mask, 1, pattern=pattern)
    assert less.int().tolist() == [[1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]
    with pytest.raises(ValueError, match="expected 0 <= n_drop <= 1, got 2"):
        sf.masks.drop_lowest(scores, less, 2, pattern=pattern)
    more = sf.masks.grow_highest(scores, less, 1, pattern=pattern)
    assert more.int().tolist() == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    with pytest.raises(ValueError, match="expected 0 <= n_grow <= 1, got 2"):
        sf.masks.grow_highest(scores, more, 2, pattern=pattern)


def test_channels_compete_inside_their_groups():
    w = torch.tensor([[1.0], [2.0], [9.0], [8.0], [0.5], [0.1]])
    assert sf.masks.topk_mask(
        w, 1, pattern=P.channel(0, groups=3)
    ).flatten().tolist() == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    assert sf.masks.topk_mask(
        w.T, torch.tensor([2, 1]), pattern=P.channel(1, groups=2)
    ).tolist() == [[False, True, True, True, False, False]]
    state = sf.one_shot(0.5, pattern=P.channel(0, groups=2)).init({"w": w})
    mask = (
        sf.one_shot(0.5, pattern=P.channel(0, groups=2))
        .update(state, {"w": w}, 0)
        .masks["w"]
    )
    # 2 and 1 of 3
    assert mask.flatten().tolist() == [False, True, True, True, False, False]


TRANSFORMED = [
    (P.nearly_diagonal(3), None),
    (P.block((2, 3), zeros=2), 3),
    (P.block((1, 4), zeros=2), torch.tensor(4)),
    (P.channel(0, groups=2), 1),
]


@pytest.mark.deep
@pytest.mark.parametrize(("pattern", "count"), TRANSFORMED, ids=str)
def test_masks_are_the_same_under_vmap_and_compiled(pattern, count):
    scores = (
        torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)).mul(4).floor()
    )

    def masks(x):
        mask = sf.masks.topk_mask(x, count, pattern=pattern)
        less = sf.masks.drop_lowest(x, mask, 1, pattern=pattern)
        return mask, less, sf.masks.grow_highest(-x, less, 1, pattern=pattern)

    want = [torch.stack(group) for group in zip(*map(masks, scores), strict=True)]
    for got in (
        torch.func.vmap(masks)(scores),
        torch.func.vmap(masks, in_dims=2)(scores.permute(1, 2, 0)),
    ):
        assert all(map(torch.equal, got, want))
    compiled = torch.compile(masks, fullgraph=True, backend="eager")(scores[0])
    assert all(map(torch.equal, compiled, [group[0] for group in want]))


def test_a_block_larger_than_the_tensor_is_a_partial_one():
    scores = torch.tensor([[1.0, 2.0, 3.0], [9.0, 0.0, 0.0]])
    assert sf.masks.topk_mask(scores, 1, pattern=P.block((1, 16))).tolist() == [
        [False] * 3,
        [True] * 3,
    ]
    assert (
        sf.masks.topk_mask(scores, 1, pattern=P.block((8, 2))).tolist()
        == [[True, True, False]] * 2
    )
    spared = sf.masks.topk_mask(scores, 0, pattern=P.block((1, 16), zeros=2))
    assert spared.tolist() == [[False, False, True], [True, False, False]]
    state = sf.static(0.5, pattern=P.block((1, 16)), init="magnitude").init(
        {"w": scores}
    )
    assert state.masks["w"].sum(1).tolist() == [0, 3]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0, 2, 2, 2), (2, 0, 2, 2)])
@pytest.mark.parametrize(
    "pattern",
    [
        *(P.block((2, 2), reduce) for reduce in ("mean", "max", "min", "l2")),
        P.channel(0, norm=float("inf")),
        P.channel(1),
        P.kernel("max"),
        P.row_balanced(),
        P.unstructured(),
    ],
    ids=str,
)
def test_leaves_of_no_element_have_masks_of_none(pattern, shape):
    for algorithm in (sf.gmp(0.5, pattern=pattern), sf.rigl(0.5, pattern=pattern)):
        state = algorithm.init({"w": torch.ones(shape)})
        assert algorithm.update(state, state.params, 0).masks["w"].shape == shape


def test_rows_of_outputs_may_lie_along_another_axis():
    scores = torch.randn(4, 6)
    turned = sf.masks.topk_mask(
        scores.T.contiguous(), 2, pattern=sf.patterns.row_balanced(axis=1)
    )
    assert torch.equal(
        turned.T, sf.masks.topk_mask(scores, 2, pattern=sf.patterns.row_balanced())
    )
    experts = torch.stack([scores, -scores])
    each = torch.stack(
        [
            sf.masks.topk_mask(one, 2, pattern=sf.patterns.row_balanced())
            for one in experts
        ]
    )
    assert torch.equal(
        sf.masks.topk_mask(experts, 2, pattern=sf.patterns.row_balanced(axis=(0, 1))),
        each,
    )
    turned = sf.masks.topk_mask(
        experts.mT.contiguous(), 2, pattern=sf.patterns.row_balanced(axis=[0, -1])
    )
    assert (
        torch.equal(turned.mT, each)
        and str(sf.patterns.row_balanced((0, 2))) == "row_balanced(axis=(0, 2))"
    )
    state = sf.rigl(
        0.5, pattern=sf.patterns.row_balanced(axis=-1), key=sf.random.key(0)
    ).init({"w": scores})
    assert state.masks["w"].sum(0).tolist() == [2] * 6
    with pytest.raises(
        ValueError, match=r"row_balanced\(axis=2\): no axis 2 in shape \(4, 6\)"
    ):
        sf.masks.topk_mask(scores, 2, pattern=sf.patterns.row_balanced(axis=2))


# ---- bands along the diagonal --------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3), (1, 5), (7, 1)])
@pytest.mark.parametrize("nearliness", [-3, 0, 1, 3, 5])
def test_a_band_is_what_lies_near_the_diagonal(nearliness, shape):
    pattern = P.nearly_diagonal(nearliness)
    if nearliness > 0 and nearliness // 2 >= min(shape):
        return  # refused, as tested above
    want = torch.tensor(
        [
            [nearliness > 0 and abs(r - c) <= nearliness // 2 for c in range(shape[1])]
            for r in range(shape[0])
        ]
    )
    scores = torch.full(shape, float("nan"))
    n = int(want.sum())
    for mask in (
        sf.masks.topk_mask(scores, None, pattern=pattern),
        sf.masks.topk_mask(-scores, n, pattern=pattern),
    ):
        assert torch.equal(mask, want)
    with pytest.raises(
        ValueError,
        match=rf"nearly_diagonal\({nearliness}\) fixes n_keep at {n}, got {n + 1}",
    ):
        sf.masks.topk_mask(scores, n + 1, pattern=pattern)
    assert sf.masks.grow_highest(
        scores, torch.zeros_like(want), n, pattern=pattern
    ).equal(want)
    with pytest.raises(ValueError, match=rf"expected 0 <= n_grow <= {n}, got {n + 1}"):
        sf.masks.grow_highest(scores, torch.zeros_like(want), n + 1, pattern=pattern)
    assert sf.masks.drop_lowest(
        scores, torch.ones_like(want), want.numel() - n, pattern=pattern
    ).equal(want)


def test_a_band_loses_its_worst_and_grows_it_back():
    scores = torch.arange(16.0).reshape(4, 4)
    band = sf.masks.topk_mask(scores, None, pattern=P.nearly_diagonal(1))
    less = sf.masks.drop_lowest(scores, band, 2, pattern=P.nearly_diagonal(1))
    assert less.diagonal().tolist() == [False, False, True, True]
    assert less.sum() == 2
    more = sf.masks.grow_highest(scores, less, 1, pattern=P.nearly_diagonal(1))
    assert more.diagonal().tolist() == [False, True, True, True]
