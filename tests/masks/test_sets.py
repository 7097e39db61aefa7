"""Counts and set operations of masks trees."""

import pytest
import torch

from sparsefn import masks as M
from sparsefn.core.state import State, apply_masks

T = torch.tensor(True)

X = torch.tensor([[True, True, False], [False, True, False]])

Y = torch.tensor([[True, False, False], [True, True, False]])

PARAMS = {"w": torch.ones(2, 3), "b": torch.ones(5)}


def bits(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def test_counts_are_over_sparsified_leaves():
    masks = {"w": X, "b": T}
    assert (M.n_total(masks), M.n_kept(masks), M.sparsity(masks)) == (6, 3, 0.5)
    assert (
        M.n_total(masks, PARAMS),
        M.n_kept(masks, PARAMS),
        M.sparsity(masks, PARAMS),
    ) == (11, 8, 3 / 11)
    assert [type(f(masks)) for f in (M.n_total, M.n_kept, M.sparsity)] == [
        int,
        int,
        float,
    ]


@pytest.mark.parametrize(
    "masks", [{}, {"b": T}, [T, (T, {})], {"w": torch.zeros(0, 3, dtype=torch.bool)}]
)
def test_counts_without_a_sparsified_weight(masks):
    assert (M.n_total(masks), M.n_kept(masks), M.sparsity(masks)) == (0, 0, 0.0)
    assert type(M.n_kept(masks)) is int
    assert type(M.sparsity(masks)) is float


def test_counts_under_vmap_and_compile_are_tensors_of_the_same_bits():
    stacked = {
        "w": torch.stack([X, Y, torch.ones_like(X)]),
        "b": torch.ones(3, dtype=torch.bool),
    }
    for one in (stacked, {"b": stacked["b"]}):
        loop = [{path: leaf[i] for path, leaf in one.items()} for i in range(3)]
        kept, sparse = torch.vmap(M.n_kept)(one), torch.vmap(M.sparsity)(one)
        assert kept.dtype == torch.int64
        assert sparse.dtype == torch.float64
        assert kept.tolist() == [M.n_kept(masks) for masks in loop]
        assert sparse.tolist() == [M.sparsity(masks) for masks in loop]
    compiled = torch.compile(
        lambda masks: (M.n_kept(masks), M.sparsity(masks), M.n_total(masks)),
        fullgraph=True,
        backend="eager",
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
        assert (
            torch.vmap(lambda m: M.sparsity([m]))(mask[None]).item() == (n - kept) / n
        )


def test_counts_refuse_what_is_no_masks_tree():
    for count in (M.n_total, M.n_kept, M.sparsity):
        with pytest.raises(
            TypeError, match=r"expected a bool mask at 'a.0', got torch.float32"
        ):
            count({"a": [torch.ones(2)]})
        with pytest.raises(TypeError, match=r"expected a bool mask at 'a', got bool"):
            count({"a": True})
        with pytest.raises(
            ValueError,
            match=r"expected a mask of shape \(2, 3\) or \(\) at 'w', got \(2,\)",
        ):
            count({"w": X[:, 0], "b": T}, PARAMS)
        with pytest.raises(
            ValueError,
            match=r"expected masks with the structure of params, but there is no leaf "
            r"at 'b'",
        ):
            count({"w": X}, PARAMS)


def test_counts_go_by_the_shape_of_a_0d_mask():
    # Its leaf is whole for `apply_masks` whatever it holds, so it is for the counts.
    masks = {"w": X, "b": ~T}
    assert (
        M.n_kept(masks, PARAMS)
        == M.n_kept({"w": X, "b": T}, PARAMS)
        == int(X.sum()) + 5
    )
    assert sum(
        int(x.count_nonzero())
        for x in apply_masks({"w": 1 + 0 * X, "b": torch.ones(5)}, masks).values()
    ) == (M.n_kept(masks, PARAMS))
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
    assert torch.equal(
        M.difference(leaf, full)["w"], torch.zeros(2, 3, dtype=torch.bool)
    )
    assert M.hamming(full, leaf) == M.hamming(leaf, full) == 3
    assert M.hamming(full, full) == 0


def test_difference_of_two_0d_masks_needs_params():
    a, b = {"w": X, "b": T}, {"w": Y, "b": T}
    with pytest.raises(
        ValueError,
        match=r"expected params: two 0-d masks at 'b' leave nothing, and of no known "
        r"shape",
    ):
        M.difference(a, b)
    grown = M.difference(a, b, PARAMS)
    assert torch.equal(grown["b"], torch.zeros(5, dtype=torch.bool))
    assert torch.equal(grown["w"], X & ~Y)
    assert apply_masks(PARAMS, grown)["b"].count_nonzero() == 0
    with pytest.raises(
        ValueError,
        match=r"with the structure of params, but there is an unknown leaf at 'b'",
    ):
        M.difference(a, b, {"w": PARAMS["w"]})


@pytest.mark.parametrize("operation", [M.intersect, M.union, M.difference, M.hamming])
def test_set_operations_refuse_trees_that_differ(operation):
    with pytest.raises(
        ValueError,
        match=r"expected tree with the structure of the other, but there is no leaf at "
        r"'a.w'",
    ):
        operation({"a": {"w": X}}, {"a": {}})
    with pytest.raises(ValueError, match=r"but the containers differ"):
        operation([X], (X,))
    with pytest.raises(
        ValueError,
        match=r"expected two masks of one shape at 'a.w', got \(2, 3\) and \(3,\)",
    ):
        operation({"a": {"w": X}}, {"a": {"w": X[0]}})
    with pytest.raises(
        TypeError, match=r"expected a bool mask at '0', got torch.float32"
    ):
        operation([X], [X.float()])
    with pytest.raises(
        TypeError, match=r"expected a bool mask at '0', got torch.float32"
    ):
        operation([X.float()], [X])


@pytest.mark.deep
@pytest.mark.parametrize("operation", [M.intersect, M.union, M.difference, M.hamming])
def test_set_operations_under_vmap_compile_and_without_mutation(operation):
    a = {"w": bits(4, 2, 3), "d": torch.ones(4, dtype=torch.bool)}
    b = {"w": bits(4, 2, 3, seed=1), "d": bits(4, 5, seed=2)}
    before = {path: leaf.clone() for path, leaf in a.items()}
    rows = [
        operation({p: x[i] for p, x in a.items()}, {p: x[i] for p, x in b.items()})
        for i in range(4)
    ]
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


def test_explored_is_the_union_of_all_masks_so_far_in_new_tensors():
    first, second = State(PARAMS, {"w": X, "b": T}), State(PARAMS, {"w": Y, "b": T})
    seen = M.explored(None, first)
    both = M.explored(seen, second)
    assert torch.equal(seen["w"], X)
    assert torch.equal(both["w"], X | Y)
    assert both["b"].ndim == 0
    places = [
        {leaf.data_ptr() for leaf in tree.values()}
        for tree in (seen, both, first.masks)
    ]
    assert len(set.union(*places)) == 6


def test_explored_takes_masks_as_well_as_a_state():
    for seen in (None, {"w": Y, "b": T}, {"w": T, "b": T}):
        of_state, of_masks = (
            M.explored(seen, State(PARAMS, {"w": X, "b": T})),
            M.explored(seen, {"w": X, "b": T}),
        )
        assert all(torch.equal(of_state[path], of_masks[path]) for path in of_state)
        assert all(
            leaf.data_ptr() not in {X.data_ptr(), Y.data_ptr(), T.data_ptr()}
            for leaf in of_masks.values()
        )


def test_explored_of_a_leaf_that_was_once_dense_is_dense():
    full = M.explored({"w": T}, State({"w": torch.ones(2, 3)}, {"w": X}))
    assert full["w"].ndim == 0
    assert full["w"].data_ptr() != T.data_ptr()


def test_explored_under_vmap_and_compile():
    seen = torch.stack([X, Y])
    found = torch.vmap(
        lambda m: M.explored({"w": m}, State({"w": torch.ones(2, 3)}, {"w": Y}))["w"]
    )(seen)
    assert torch.equal(found, seen | Y)
    state = State(PARAMS, {"w": X, "b": T})
    compiled = torch.compile(M.explored, backend="eager", fullgraph=True)
    assert torch.equal(
        compiled(compiled(None, state), state._replace(masks={"w": Y, "b": T}))["w"],
        X | Y,
    )


def test_explored_refuses():
    with pytest.raises(
        TypeError, match="expected a bool mask at 'w', got torch.float32"
    ):
        M.explored(None, {"w": torch.ones(2)})
    with pytest.raises(
        ValueError,
        match=r"expected two masks of one shape at 'w', got \(1, 2\) and \(2, 3\)",
    ):
        M.explored({"w": X[:1, :2]}, State({"w": torch.ones(2, 3)}, {"w": X}))
    with pytest.raises(
        TypeError, match="expected a bool mask at 'w', got torch.float32"
    ):
        M.explored(None, State({"w": torch.ones(2)}, {"w": torch.ones(2)}))
