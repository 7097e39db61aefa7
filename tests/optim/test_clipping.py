"""Clipping by the global norm: torch's factor, over what masks keep, in bits that
depend on nothing else.
"""

import math

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.nn.checkpoint import tree_equal

DRAW = torch.Generator().manual_seed(0)
GRADS = {
    "b": torch.randn(7, generator=DRAW),
    "n": torch.randn((), generator=DRAW),
    "w": torch.randn(300, 70, generator=DRAW),
    "z": torch.zeros(0, 3),
}
MASKS = {
    path: torch.rand(g.shape, generator=DRAW) < 0.3 if g.ndim else torch.tensor(True)
    for path, g in GRADS.items()
}


def clipped_by_torch(grads, max_norm, norm_of):
    """torch's clip_grad_norm_, the norm of one tree applied to another."""
    params = [
        torch.nn.Parameter(torch.zeros_like(g)) for g in optree.tree_leaves(grads)
    ]
    for param, g in zip(params, optree.tree_leaves(grads), strict=True):
        param.grad = g.clone()
    norm = torch.nn.utils.get_total_norm(
        [g for g in optree.tree_leaves(norm_of) if g.numel()]
    )
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return [param.grad for param in params]


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.booleans())
def test_the_factor_is_torchs(max_norm, scale, masked):
    grads = optree.tree_map(lambda g: g * scale, GRADS)
    masks = MASKS if masked else None
    got = sf.optimizers.clip_norm(grads, max_norm, masks)
    want = clipped_by_torch(
        grads, max_norm, sf.apply_masks(grads, MASKS) if masked else grads
    )
    for g, w in zip(optree.tree_leaves(got), want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-6, atol=0)


def test_pruned_entries_do_not_count_and_are_scaled_alike():
    grads = {"w": torch.tensor([3.0, 1e6, -2e6, 4.0])}
    masks = {"w": torch.tensor([True, False, False, True])}
    got = sf.optimizers.clip_norm(grads, 1.0, masks)["w"]
    torch.testing.assert_close(got, grads["w"] / 5, rtol=1e-6, atol=0)
    grads["w"][1] = math.nan
    assert sf.optimizers.clip_norm(grads, 1.0, masks)["w"][[0, 3]].isfinite().all()
    # A leaf that is not sparsified counts whole.
    torch.testing.assert_close(
        sf.optimizers.clip_norm(
            {"b": torch.tensor([3.0, 4.0])}, 1.0, {"b": torch.tensor(True)}
        )["b"],
        torch.tensor([0.6, 0.8]),
    )


def test_growth_is_the_same_with_and_without_clipping():
    algorithm = sf.rigl(0.5, when=sf.always(), key=sf.random.key(1))
    params = {"w": torch.arange(64.0).reshape(8, 8)}
    state = algorithm.init(params)
    grads = {"w": torch.linspace(-9, 9, 64).reshape(8, 8)}
    clipped = sf.optimizers.clip_norm(grads, 0.5, state.masks)
    assert tree_equal(
        algorithm.update(state, clipped, 0).masks,
        algorithm.update(state, grads, 0).masks,
    )


def test_short_gradients_keep_their_bits_and_are_copies():
    got = sf.optimizers.clip_norm(GRADS, 1e6)
    assert tree_equal(got, GRADS)
    memory = {leaf.data_ptr() for leaf in optree.tree_leaves(GRADS) if leaf.numel()}
    assert memory.isdisjoint(
        leaf.data_ptr() for leaf in optree.tree_leaves(got) if leaf.numel()
    )
    assert sf.optimizers.clip_norm({}, 1.0) == {}


@pytest.mark.deep
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_vmap_compile_threads_and_layout_give_the_bits_of_eager(dtype):
    torch._dynamo.reset()
    members = [
        optree.tree_map(lambda g, i=i: (g * (i + 1.1)).to(dtype), GRADS)
        for i in range(3)
    ]
    loop = [sf.optimizers.clip_norm(member, 0.7, MASKS) for member in members]
    assert all(leaf.dtype == dtype for leaf in optree.tree_leaves(loop))
    want = optree.tree_map(lambda *leaves: torch.stack(leaves), *loop)
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *members)
    assert tree_equal(
        torch.vmap(lambda grads: sf.optimizers.clip_norm(grads, 0.7, MASKS))(stacked),
        want,
    )
    compiled = torch.compile(sf.optimizers.clip_norm, fullgraph=True, backend="eager")
    assert tree_equal(compiled(members[0], 0.7, MASKS), loop[0])
    turned = {**members[0], "w": members[0]["w"].T.contiguous().T}
    assert tree_equal(sf.optimizers.clip_norm(turned, 0.7, MASKS), loop[0])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert tree_equal(sf.optimizers.clip_norm(members[0], 0.7, MASKS), loop[0])
    finally:
        torch.set_num_threads(before)


def test_a_tensor_for_max_norm_may_be_batched():
    limits = torch.tensor([0.1, 1.0, 1e3])
    loop = [sf.optimizers.clip_norm(GRADS, limit.item()) for limit in limits]
    want = optree.tree_map(lambda *leaves: torch.stack(leaves), *loop)
    assert tree_equal(
        torch.vmap(lambda limit: sf.optimizers.clip_norm(GRADS, limit))(limits), want
    )


def test_norms_that_are_not_finite():
    assert (
        sf.optimizers.clip_norm({"w": torch.tensor([math.nan, 1.0])}, 1.0)["w"]
        .isnan()
        .all()
    )
    got = sf.optimizers.clip_norm({"w": torch.tensor([math.inf, 1.0])}, 1.0)["w"]
    assert got[0].isnan() and got[1] == 0


def test_the_norm_is_a_constant_in_derivatives():
    slope = torch.func.grad(
        lambda g: sf.optimizers.clip_norm({"w": g}, 1.0)["w"].sum()
    )(torch.tensor([30.0, 40.0]))
    torch.testing.assert_close(slope, torch.tensor([0.02, 0.02]))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: sf.optimizers.clip_norm(GRADS, 0.0),
            ValueError,
            "expected max_norm > 0, got 0.0",
        ),
        (
            lambda: sf.optimizers.clip_norm(GRADS, math.inf),
            ValueError,
            "expected max_norm to be finite, got inf",
        ),
        (
            lambda: sf.optimizers.clip_norm(GRADS, "1"),
            TypeError,
            "expected max_norm to be a number or a 0-d float tensor, got str",
        ),
        (
            lambda: sf.optimizers.clip_norm({"a": {"w": torch.ones(2).long()}}, 1.0),
            TypeError,
            "expected floating-point grads, got torch.int64 at 'a.w'",
        ),
        (
            lambda: sf.optimizers.clip_norm({"w": 3.0}, 1.0),
            TypeError,
            "expected floating-point grads, got float at 'w'",
        ),
        (
            lambda: sf.optimizers.clip_norm(
                GRADS, 1.0, {**MASKS, "b": torch.tensor([True])}
            ),
            ValueError,
            "expected a mask of shape (7,) or () at 'b', got (1,)",
        ),
        (
            lambda: sf.optimizers.clip_norm(GRADS, 1.0, {"b": MASKS["b"]}),
            ValueError,
            "expected masks with the structure of params, but there is no leaf at 'n'",
        ),
    ],
)
def test_bad_input(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
