"""Masks trees: counts, set operations, from_zeros, checkerboard, packing."""

import random

import pytest
import torch

import sparsefn as sf
from sparsefn import masks as M
from sparsefn.state import apply_masks

T = torch.tensor(True)
X = torch.tensor([[True, True, False], [False, True, False]])
Y = torch.tensor([[True, False, False], [True, True, False]])
PARAMS = {"w": torch.ones(2, 3), "b": torch.ones(5)}


def bits(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def test_counts_are_over_sparsified_leaves():
    masks = {"w": X, "b": T}
    assert (M.n_total(masks), M.n_kept(masks), M.sparsity(masks)) == (6, 3, 0.5)
    assert (M.n_total(masks, PARAMS), M.n_kept(masks, PARAMS), M.sparsity(masks, PARAMS)) == (11, 8, 3 / 11)
    assert [type(f(masks)) for f in (M.n_total, M.n_kept, M.sparsity)] == [int, int, float]


@pytest.mark.parametrize("masks", [{}, {"b": T}, [T, (T, {})], {"w": torch.zeros(0, 3, dtype=torch.bool)}])
def test_counts_without_a_sparsified_weight(masks):
    assert (M.n_total(masks), M.n_kept(masks), M.sparsity(masks)) == (0, 0, 0.0)
    assert type(M.n_kept(masks)) is int
    assert type(M.sparsity(masks)) is float


def test_counts_under_vmap_and_compile_are_tensors_of_the_same_bits():
    stacked = {"w": torch.stack([X, Y, torch.ones_like(X)]), "b": torch.ones(3, dtype=torch.bool)}
    for one in (stacked, {"b": stacked["b"]}):
        loop = [{path: leaf[i] for path, leaf in one.items()} for i in range(3)]
        kept, sparse = torch.vmap(M.n_kept)(one), torch.vmap(M.sparsity)(one)
        assert kept.dtype == torch.int64
        assert sparse.dtype == torch.float64
        assert kept.tolist() == [M.n_kept(masks) for masks in loop]
        assert sparse.tolist() == [M.sparsity(masks) for masks in loop]
    compiled = torch.compile(
        lambda masks: (M.n_kept(masks), M.sparsity(masks), M.n_total(masks)), fullgraph=True, backend="eager"
    )
    kept, sparse, total = compiled({"w": X, "b": T})
    assert kept.dtype == torch.int64
    assert kept.ndim == 0
    assert sparse.dtype == torch.float64
    assert (kept.item(), sparse.item(), total) == (3, 0.5, 6)


def test_sparsity_is_the_float64_quotient():
    for n, kept in ((3, 1), (7, 2), (1000, 399), (49, 48)):
        mask = torch.arange(n) < kept
        assert M.sparsity([mask]) == (n - kept) / n
        assert torch.vmap(lambda m: M.sparsity([m]))(mask[None]).item() == (n - kept) / n


def test_counts_refuse_what_is_no_masks_tree():
    for count in (M.n_total, M.n_kept, M.sparsity):
        with pytest.raises(TypeError, match=r"expected a bool mask at 'a.0', got torch.float32"):
            count({"a": [torch.ones(2)]})
        with pytest.raises(TypeError, match=r"expected a bool mask at 'a', got bool"):
            count({"a": True})
        with pytest.raises(ValueError, match=r"expected a mask of shape \(2, 3\) or \(\) at 'w', got \(2,\)"):
            count({"w": X[:, 0], "b": T}, PARAMS)
        with pytest.raises(
            ValueError, match=r"expected masks with the structure of params, but there is no leaf at 'b'"
        ):
            count({"w": X}, PARAMS)


def test_counts_go_by_the_shape_of_a_0d_mask():
    # Its leaf is whole for `apply_masks` whatever it holds, so it is for the counts.
    masks = {"w": X, "b": ~T}
    assert M.n_kept(masks, PARAMS) == M.n_kept({"w": X, "b": T}, PARAMS) == int(X.sum()) + 5
    assert sum(int(x.count_nonzero()) for x in apply_masks({"w": 1 + 0 * X, "b": torch.ones(5)}, masks).values()) == (
        M.n_kept(masks, PARAMS)
    )
    assert M.sparsity({"b": ~T}, {"b": PARAMS["b"]}) == 0.0


def test_set_operations():
    a, b = {"w": X}, {"w": Y}
    assert torch.equal(M.intersect(a, b)["w"], X & Y)
    assert torch.equal(M.union(a, b)["w"], X | Y)
    assert torch.equal(M.difference(a, b)["w"], X & ~Y)
    assert M.hamming(a, b) == 2
    assert type(M.hamming(a, b)) is int
    assert M.hamming({}, {}) == 0


def test_the_0d_true_is_the_full_mask():
    full, leaf = {"w": T}, {"w": X}
    assert torch.equal(M.intersect(full, leaf)["w"], X)
    assert torch.equal(M.intersect(leaf, full)["w"], X)
    assert M.intersect(full, full)["w"].shape == ()
    for a, b in ((full, leaf), (leaf, full), (full, full)):
        assert M.union(a, b)["w"].shape == ()
        assert M.union(a, b)["w"]
    assert torch.equal(M.difference(full, leaf)["w"], ~X)
    assert torch.equal(M.difference(leaf, full)["w"], torch.zeros(2, 3, dtype=torch.bool))
    assert M.hamming(full, leaf) == M.hamming(leaf, full) == 3
    assert M.hamming(full, full) == 0


def test_difference_of_two_0d_masks_needs_params():
    a, b = {"w": X, "b": T}, {"w": Y, "b": T}
    with pytest.raises(ValueError, match=r"expected params: two 0-d masks at 'b' leave nothing, and of no known shape"):
        M.difference(a, b)
    grown = M.difference(a, b, PARAMS)
    assert torch.equal(grown["b"], torch.zeros(5, dtype=torch.bool))
    assert torch.equal(grown["w"], X & ~Y)
    assert apply_masks(PARAMS, grown)["b"].count_nonzero() == 0
    with pytest.raises(ValueError, match=r"with the structure of params, but there is an unknown leaf at 'b'"):
        M.difference(a, b, {"w": PARAMS["w"]})


@pytest.mark.parametrize("operation", [M.intersect, M.union, M.difference, M.hamming])
def test_set_operations_refuse_trees_that_differ(operation):
    with pytest.raises(
        ValueError, match=r"expected tree with the structure of the other, but there is no leaf at 'a.w'"
    ):
        operation({"a": {"w": X}}, {"a": {}})
    with pytest.raises(ValueError, match=r"but the containers differ"):
        operation([X], (X,))
    with pytest.raises(ValueError, match=r"expected two masks of one shape at 'a.w', got \(2, 3\) and \(3,\)"):
        operation({"a": {"w": X}}, {"a": {"w": X[0]}})
    with pytest.raises(TypeError, match=r"expected a bool mask at '0', got torch.float32"):
        operation([X], [X.float()])
    with pytest.raises(TypeError, match=r"expected a bool mask at '0', got torch.float32"):
        operation([X.float()], [X])


@pytest.mark.parametrize("operation", [M.intersect, M.union, M.difference, M.hamming])
def test_set_operations_under_vmap_compile_and_without_mutation(operation):
    a = {"w": bits(4, 2, 3), "d": torch.ones(4, dtype=torch.bool)}
    b = {"w": bits(4, 2, 3, seed=1), "d": bits(4, 5, seed=2)}
    before = {path: leaf.clone() for path, leaf in a.items()}
    rows = [operation({p: x[i] for p, x in a.items()}, {p: x[i] for p, x in b.items()}) for i in range(4)]
    batched = torch.vmap(operation)(a, b)
    compiled = torch.compile(operation, fullgraph=True, backend="eager")(
        {p: x[0] for p, x in a.items()}, {p: x[0] for p, x in b.items()}
    )
    if operation is M.hamming:
        assert batched.tolist() == rows
        assert compiled.item() == rows[0]
    else:
        for path in a:
            assert torch.equal(batched[path], torch.stack([row[path] for row in rows]))
            assert torch.equal(compiled[path], rows[0][path])
    assert all(torch.equal(a[path], before[path]) for path in a)


def test_from_zeros():
    nan, inf = float("nan"), float("inf")
    params = {"weight": torch.tensor([[0.0, -0.0, nan], [inf, 1e-45, 2.0]]), "bias": torch.zeros(2)}
    masks = M.from_zeros(params)
    assert masks["weight"].tolist() == [[False, False, True], [True, True, True]]
    assert masks["bias"].shape == ()
    assert masks["bias"]
    chosen = M.from_zeros(params, where="bias")
    assert chosen["bias"].tolist() == [False, False]
    assert chosen["weight"].shape == ()
    with pytest.raises(TypeError, match=r"expected floating-point params, got torch.int64 at 'weight'"):
        M.from_zeros({"weight": torch.ones(2, 2, dtype=torch.int64)})
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        M.from_zeros({"bias": torch.zeros(2)})


# Recorded from the original (cerebras.pytorch.sparse 2.10), rows as strings; its 1-D result is one row.
RECORDED = [
    ((8,), 0.75, ["00010001"]),
    ((7, 13), 0.5, ["0101010101010", "1010101010101"] * 3 + ["0101010101010"]),
    ((6, 9), 1 / 3, ["011011011", "110110110", "101101101"] * 2),
    ((4, 4), 0.0, ["1111"] * 4),
]


@pytest.mark.parametrize(("shape", "sparsity", "rows"), RECORDED)
def test_checkerboard_as_recorded(shape, sparsity, rows):
    mask = M.checkerboard(shape, sparsity)
    assert mask.dtype == torch.bool
    assert mask.shape == shape
    assert ["".join(str(int(x)) for x in row) for row in mask.reshape(-1, shape[-1])] == rows


def test_checkerboard_rows_shift_and_keep_their_share():
    mask = M.checkerboard((30, 50), 0.8)
    assert mask.sum(1).tolist() == [10] * 30
    assert mask.sum(0).tolist() == [6] * 50
    assert (M.checkerboard((50, 400), 0.9).sum(1) - 40).abs().max() <= 1


def test_checkerboard_leading_dimensions_count_as_rows():
    assert torch.equal(M.checkerboard((2, 3, 5, 7), 0.6), M.checkerboard((30, 7), 0.6).reshape(2, 3, 5, 7))


@pytest.mark.parametrize("sparsity", [1.0, 1 - 1e-16, torch.tensor(1.0)])
def test_checkerboard_without_density(sparsity):
    assert not M.checkerboard((3, 4), sparsity).any()


def test_checkerboard_of_empty_shapes():
    assert M.checkerboard((3, 0), 0.5).shape == (3, 0)
    assert M.checkerboard((0, 3), 0.5).shape == (0, 3)
    assert M.checkerboard((2, 3), 0.5, device="meta").device.type == "meta"


def test_checkerboard_of_a_tensor_sparsity_vmap_and_compile():
    levels = torch.tensor([0.0, 0.25, 1 / 3, 0.9, 0.99, 1.0], dtype=torch.float64)
    loop = torch.stack([M.checkerboard((6, 9), level) for level in levels.tolist()])
    assert torch.equal(torch.vmap(lambda level: M.checkerboard((6, 9), level))(levels), loop)
    compiled = torch.compile(lambda level: M.checkerboard((6, 9), level), fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.stack([compiled(level) for level in levels]), loop)


def test_checkerboard_refuses():
    with pytest.raises(TypeError, match=r"expected sparsity to be a float in \[0, 1\], got the int 1"):
        M.checkerboard((2, 2), 1)
    with pytest.raises(TypeError, match=r"expected sparsity to be a 0-d floating-point tensor, got torch.int64"):
        M.checkerboard((2, 2), torch.tensor(1))
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"expected sparsity in \[0, 1\], got"):
            M.checkerboard((2, 2), bad)
    for shape in ((), (2, -1)):
        with pytest.raises(ValueError, match="expected a shape of one dimension or more, none negative, got"):
            M.checkerboard(shape, 0.5)


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (3, 5), (2, 3, 4), (0, 3), (1, 1, 1)])
def test_pack_round_trips(shape):
    masks = {"w": bits(*shape), "b": T}
    packed = M.pack(masks)
    assert packed["w"].dtype == torch.uint8
    assert packed["w"].shape == (-(-masks["w"].numel() // 8),)
    assert packed["b"].dtype == torch.bool
    assert packed["b"].shape == ()
    for like in (masks, {"w": torch.zeros(shape), "b": torch.zeros(4)}):
        back = M.unpack(packed, like)
        assert torch.equal(back["w"], masks["w"])
        assert back["b"].shape == ()


def test_pack_bit_order_and_zero_padding():
    flat = [random.Random(0).random() < 0.5 for _ in range(19)]
    packed = M.pack([torch.tensor(flat)])[0].tolist()
    assert packed == [sum(1 << j for j in range(8) if 8 * i + j < 19 and flat[8 * i + j]) for i in range(3)]
    assert M.pack([torch.ones(9, dtype=torch.bool)])[0].tolist() == [255, 1]


def test_pack_a_view_that_is_not_contiguous():
    mask = bits(5, 3).T
    assert torch.equal(M.unpack(M.pack([mask]), [mask])[0], mask)


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (0,), (0, 3), (31, 33), (1003,)])
def test_packing_in_memory_and_by_tensor_operations_agree(shape):
    for mask in (bits(*shape), bits(*shape, 2)[..., 0], torch.ones(shape, dtype=torch.bool)):
        packed = M.pack([mask])[0]
        assert torch.equal(torch.vmap(M.pack)([mask[None]])[0][0], packed)  # vmap hides the memory
        again = torch.vmap(lambda p: M.unpack(p, [torch.zeros(shape)]))([packed[None]])[0][0]
        assert torch.equal(again, M.unpack([packed], [mask])[0]) and torch.equal(again, mask)
        assert again.dtype == torch.bool and again.shape == mask.shape


def test_unpacked_masks_are_memory_of_their_own():
    mask = bits(16)
    packed = M.pack([mask])
    back, again = M.unpack(packed, [mask])[0], M.unpack(packed, [mask])[0]
    back.logical_not_()
    assert torch.equal(again, mask) and torch.equal(M.pack([mask])[0], packed[0])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # from inductor's own imports
def test_pack_under_vmap_and_compile():
    stacked = [bits(4, 3, 5), torch.ones(4, dtype=torch.bool)]
    packed = torch.vmap(M.pack)(stacked)
    assert torch.equal(packed[0], torch.stack([M.pack([mask])[0] for mask in stacked[0]]))
    like = [torch.zeros(3, 5), torch.zeros(2)]
    back = torch.vmap(lambda p: M.unpack(p, like))(packed)
    assert torch.equal(back[0], stacked[0])
    one = [stacked[0][0], T]
    trip = torch.compile(lambda m: M.unpack(M.pack(m), like), fullgraph=True, backend="aot_eager")
    assert torch.equal(trip(one)[0], one[0])
    assert torch.equal(torch.compile(M.pack, fullgraph=True)(one)[0], M.pack(one)[0])


def test_unpack_refuses():
    with pytest.raises(ValueError, match=r"but there is an unknown leaf at 'b'"):
        M.unpack({"w": torch.zeros(1, dtype=torch.uint8)}, {"w": X, "b": T})
    with pytest.raises(ValueError, match=r"expected a packed mask of shape \(1,\) at 'w', got \(2,\)"):
        M.unpack({"w": torch.zeros(2, dtype=torch.uint8)}, {"w": X})
    with pytest.raises(ValueError, match=r"expected a packed mask that is a 0-d bool at 'w', got \(1,\)"):
        M.unpack({"w": torch.zeros(1, dtype=torch.uint8)}, {"w": T})
    with pytest.raises(TypeError, match=r"expected packed masks to be uint8 or a 0-d bool at 'w', got torch.int64"):
        M.unpack({"w": torch.zeros(1, dtype=torch.int64)}, {"w": X})
    with pytest.raises(TypeError, match=r"expected a bool mask at 'w', got torch.float32"):
        M.pack({"w": torch.zeros(3)})


def test_from_dict():
    params = {"a": {"weight": torch.randn(2, 3), "bias": torch.randn(2)}, "b": torch.randn(3, 2)}
    given = {"a.weight": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.5, -1.0]]), "b": bits(3, 2)}
    masks = M.from_dict(params, given)
    assert masks["a"]["weight"].tolist() == [[True, False, True], [False, True, True]]
    assert torch.equal(masks["b"], given["b"])
    assert masks["a"]["bias"].shape == ()
    M.from_dict(params, {"a.bias": bits(2)}, where="a.bias")
    sf.from_masks(masks).init(params)


def test_from_dict_refuses():
    params = {"a": torch.randn(2, 3), "b": torch.randn(3, 2), "c": torch.randn(3)}
    with pytest.raises(ValueError, match=r"^from_dict: expected a mask for 'b', which is to be sparse; there are 'a'$"):
        M.from_dict(params, {"a": bits(2, 3)})
    with pytest.raises(
        ValueError, match=r"^from_dict: expected a mask for 'a', which is to be sparse; there are none$"
    ):
        M.from_dict(params, {})
    with pytest.raises(ValueError, match=r"^from_dict: params have no leaf at 'x'; they are at 'a', 'b', 'c'$"):
        M.from_dict(params, {"x": bits(2, 3)})
    with pytest.raises(ValueError, match=r"^from_dict: expected a mask of shape \(2, 3\) at 'a', got \(3, 2\)$"):
        M.from_dict(params, {"a": bits(3, 2)})


def test_shuffle_keeps_the_counts_of_every_leaf():
    masks = {"a": bits(7, 9), "b": bits(4, 3), "c": T, "d": torch.zeros(2, 2) > 0, "e": torch.ones(2, 2) > 0}
    key = sf.random.key(0)
    mixed = M.shuffle(masks, key)
    for path, mask in masks.items():
        assert mixed[path].shape == mask.shape
        assert mixed[path].sum() == mask.sum()
    assert not torch.equal(mixed["a"], masks["a"])
    assert sf.checkpoint.tree_equal(mixed, M.shuffle(dict(reversed(masks.items())), key))
    assert torch.equal(M.shuffle({"a": masks["a"]}, key)["a"], mixed["a"])
    assert not torch.equal(M.shuffle(masks, sf.random.key(1))["a"], mixed["a"])
    compiled = torch.compile(lambda m: M.shuffle(m, key), fullgraph=True, backend="eager")
    assert sf.checkpoint.tree_equal(compiled(masks), mixed)
    keys = torch.stack([key, sf.random.key(1)])
    batch = torch.vmap(lambda k: M.shuffle({"a": masks["a"]}, k)["a"])(keys)
    assert torch.equal(batch[0], mixed["a"])
    with pytest.raises(TypeError, match=r"expected a bool mask at 'w', got torch.float32"):
        M.shuffle({"w": torch.zeros(3)}, key)


def test_every_arrangement_is_equally_likely():
    keys = sf.random.split(sf.random.key(5), 600)
    masks = torch.vmap(lambda key: M.shuffle([torch.tensor([True, True, False, False])], key)[0])(keys)
    _, seen = masks.unique(dim=0, return_counts=True)
    assert len(seen) == 6
    assert (seen - 100).abs().max() < 45  # five deviations
