"""Masks from zeros, from a dict, shuffled, in a checkerboard."""

import pytest
import torch

import sparsefn as sf
from sparsefn import masks as M

T = torch.tensor(True)


def bits(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def test_from_zeros():
    nan, inf = float("nan"), float("inf")
    params = {
        "weight": torch.tensor([[0.0, -0.0, nan], [inf, 1e-45, 2.0]]),
        "bias": torch.zeros(2),
    }
    masks = M.from_zeros(params)
    assert masks["weight"].tolist() == [[False, False, True], [True, True, True]]
    assert masks["bias"].shape == ()
    assert masks["bias"]
    chosen = M.from_zeros(params, where="bias")
    assert chosen["bias"].tolist() == [False, False]
    assert chosen["weight"].shape == ()
    with pytest.raises(
        TypeError, match=r"expected floating-point params, got torch.int64 at 'weight'"
    ):
        M.from_zeros({"weight": torch.ones(2, 2, dtype=torch.int64)})
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        M.from_zeros({"bias": torch.zeros(2)})


# Recorded from the original (cerebras.pytorch.sparse 2.10), rows as strings; its 1-D
# result is one row.
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
    assert [
        "".join(str(int(x)) for x in row) for row in mask.reshape(-1, shape[-1])
    ] == rows


def test_checkerboard_rows_shift_and_keep_their_share():
    mask = M.checkerboard((30, 50), 0.8)
    assert mask.sum(1).tolist() == [10] * 30
    assert mask.sum(0).tolist() == [6] * 50
    assert (M.checkerboard((50, 400), 0.9).sum(1) - 40).abs().max() <= 1


def test_checkerboard_leading_dimensions_count_as_rows():
    assert torch.equal(
        M.checkerboard((2, 3, 5, 7), 0.6),
        M.checkerboard((30, 7), 0.6).reshape(2, 3, 5, 7),
    )


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
    assert torch.equal(
        torch.vmap(lambda level: M.checkerboard((6, 9), level))(levels), loop
    )
    compiled = torch.compile(
        lambda level: M.checkerboard((6, 9), level), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(torch.stack([compiled(level) for level in levels]), loop)


def test_checkerboard_refuses():
    with pytest.raises(
        TypeError, match=r"expected sparsity to be a float in \[0, 1\], got the int 1"
    ):
        M.checkerboard((2, 2), 1)
    with pytest.raises(
        TypeError,
        match=r"expected sparsity to be a 0-d floating-point tensor, got torch.int64",
    ):
        M.checkerboard((2, 2), torch.tensor(1))
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"expected sparsity in \[0, 1\], got"):
            M.checkerboard((2, 2), bad)
    for shape in ((), (2, -1)):
        with pytest.raises(
            ValueError,
            match="expected a shape of one dimension or more, none negative, got",
        ):
            M.checkerboard(shape, 0.5)


def test_from_dict():
    params = {
        "a": {"weight": torch.randn(2, 3), "bias": torch.randn(2)},
        "b": torch.randn(3, 2),
    }
    given = {
        "a.weight": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.5, -1.0]]),
        "b": bits(3, 2),
    }
    masks = M.from_dict(params, given)
    assert masks["a"]["weight"].tolist() == [[True, False, True], [False, True, True]]
    assert torch.equal(masks["b"], given["b"])
    assert masks["a"]["bias"].shape == ()
    M.from_dict(params, {"a.bias": bits(2)}, where="a.bias")
    sf.from_masks(masks).init(params)


def test_from_dict_refuses():
    params = {"a": torch.randn(2, 3), "b": torch.randn(3, 2), "c": torch.randn(3)}
    with pytest.raises(
        ValueError,
        match=r"^from_dict: expected a mask for 'b', which where= selects; there are "
        r"'a'$",
    ):
        M.from_dict(params, {"a": bits(2, 3)})
    with pytest.raises(
        ValueError,
        match=r"^from_dict: expected a mask for 'a', which where= selects; there are "
        r"none$",
    ):
        M.from_dict(params, {})
    with pytest.raises(
        ValueError,
        match=r"^from_dict: params have no leaf at 'x'; they are at 'a', 'b', 'c'$",
    ):
        M.from_dict(params, {"x": bits(2, 3)})
    with pytest.raises(
        ValueError,
        match=r"^from_dict: expected a mask of shape \(2, 3\) at 'a', got \(3, 2\)$",
    ):
        M.from_dict(params, {"a": bits(3, 2)})


def test_shuffle_keeps_the_counts_of_every_leaf():
    masks = {
        "a": bits(7, 9),
        "b": bits(4, 3),
        "c": T,
        "d": torch.zeros(2, 2) > 0,
        "e": torch.ones(2, 2) > 0,
    }
    key = sf.random.key(0)
    mixed = M.shuffle(masks, key)
    for path, mask in masks.items():
        assert mixed[path].shape == mask.shape
        assert mixed[path].sum() == mask.sum()
    assert not torch.equal(mixed["a"], masks["a"])
    assert sf.checkpoint.tree_equal(
        mixed, M.shuffle(dict(reversed(masks.items())), key)
    )
    assert torch.equal(M.shuffle({"a": masks["a"]}, key)["a"], mixed["a"])
    assert not torch.equal(M.shuffle(masks, sf.random.key(1))["a"], mixed["a"])
    compiled = torch.compile(
        lambda m: M.shuffle(m, key), fullgraph=True, backend="eager"
    )
    assert sf.checkpoint.tree_equal(compiled(masks), mixed)
    keys = torch.stack([key, sf.random.key(1)])
    batch = torch.vmap(lambda k: M.shuffle({"a": masks["a"]}, k)["a"])(keys)
    assert torch.equal(batch[0], mixed["a"])
    with pytest.raises(
        TypeError, match=r"expected a bool mask at 'w', got torch.float32"
    ):
        M.shuffle({"w": torch.zeros(3)}, key)


@pytest.mark.deep
@pytest.mark.parametrize("within", [0, 1, -1])
def test_shuffle_within_a_dimension_keeps_the_count_of_each_of_its_indices(within):
    masks = {
        "a": bits(17, 9),
        "b": bits(4, 3),
        "c": T,
        "d": bits(6, 5, 2, 3),
        "e": bits(0, 3),
        "f": bits(3, 0),
    }
    key = sf.random.key(0)
    mixed = M.shuffle(masks, key, within=within)
    for path, mask in masks.items():
        assert mixed[path].shape == mask.shape and mixed[path].is_contiguous()
        if mask.ndim:
            others = [dim for dim in range(mask.ndim) if dim != within % mask.ndim]
            assert torch.equal(mixed[path].sum(others), mask.sum(others))
    assert not torch.equal(mixed["a"], masks["a"]) and mixed["c"] is T
    other = M.shuffle({"a": masks["a"]}, key, within=within)["a"]
    assert torch.equal(other, mixed["a"]) and torch.equal(
        other, M.shuffle(masks, key, within=within)["a"]
    )
    compiled = torch.compile(
        lambda m: M.shuffle(m, key, within=within), fullgraph=True, backend="eager"
    )
    assert sf.checkpoint.tree_equal(compiled(masks), mixed)
    keys = torch.stack([key, sf.random.key(1)])
    batch = torch.vmap(lambda k: M.shuffle({"a": masks["a"]}, k, within=within)["a"])(
        keys
    )
    assert torch.equal(batch[0], mixed["a"]) and not torch.equal(batch[1], mixed["a"])
    stacked = torch.vmap(lambda m: M.shuffle({"a": m}, key, within=within)["a"])(
        torch.stack([masks["a"], ~masks["a"]])
    )
    assert torch.equal(stacked[0], mixed["a"])


def test_arrangements_within_rows_are_equally_likely_and_rows_apart():
    keys = sf.random.split(sf.random.key(5), 900)
    rows = torch.tensor([[True, False, False], [True, False, False]])
    masks = torch.vmap(lambda key: M.shuffle([rows], key, within=0)[0])(keys)
    _, seen = masks.unique(dim=0, return_counts=True)
    assert len(seen) == 9
    assert (seen - 100).abs().max() < 45  # five deviations


def test_shuffle_within_refuses():
    with pytest.raises(
        ValueError,
        match=r"shuffle: expected masks with a dimension 1, got \(3,\) at 'b'",
    ):
        M.shuffle({"a": bits(2, 3), "b": bits(3)}, sf.random.key(0), within=1)
    with pytest.raises(
        TypeError, match="shuffle: expected within to be an int, got bool"
    ):
        M.shuffle({"a": bits(2, 3)}, sf.random.key(0), within=True)


def test_every_arrangement_is_equally_likely():
    keys = sf.random.split(sf.random.key(5), 600)
    masks = torch.vmap(
        lambda key: M.shuffle([torch.tensor([True, True, False, False])], key)[0]
    )(keys)
    _, seen = masks.unique(dim=0, return_counts=True)
    assert len(seen) == 6
    assert (seen - 100).abs().max() < 45  # five deviations
