"""`gate` and `sparsify`: the value of a selection, and exactly the gradients of each
mode.
"""

import itertools

import pytest
import torch

import sparsefn as sf

MAKE = torch.Generator().manual_seed(3)
X, S, DY = (torch.randn(4, 8, generator=MAKE) for _ in range(3))
MASK = sf.masks.topk_mask(S, 12)
ALL = list(itertools.product(("ste", "supermask", "joint"), (False, True)))


def pulled(mode, gated, x=X, s=S, dy=DY):
    y, pull = torch.func.vjp(
        lambda x, s: sf.masks.sparsify(x, s, 12, mode=mode, mask_gradient=gated), x, s
    )
    return y, *pull(dy)


@pytest.mark.parametrize(("mode", "gated"), ALL)
def test_the_table_of_gradients(mode, gated):
    y, dx, ds = pulled(mode, gated)
    zero = torch.zeros_like(X)
    score = DY * X * MASK if gated else DY * X
    assert torch.equal(y, torch.where(MASK, X, 0.0))
    assert torch.equal(dx, zero if mode == "supermask" else DY * MASK)
    assert torch.equal(ds, zero if mode == "ste" else score)


@pytest.mark.parametrize(("mode", "gated"), ALL)
def test_autograd_agrees_with_func(mode, gated):
    x, s = X.clone().requires_grad_(), S.clone().requires_grad_()
    got = torch.autograd.grad(
        sf.masks.sparsify(x, s, 12, mode=mode, mask_gradient=gated),
        (x, s),
        DY,
        materialize_grads=True,
        allow_unused=True,
    )
    for a, b in zip(got, pulled(mode, gated)[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("mode", "gated"), ALL)
def test_vmap_equals_the_loop(mode, gated):
    # Scores, and a count for each member.
    scores, counts = torch.stack([S, S.flip(0), -S]), torch.tensor([12, 0, 32])

    def slopes(s, count):
        def loss(x, s):
            return (
                sf.masks.sparsify(x, s, count, mode=mode, mask_gradient=gated) * DY
            ).sum()

        return torch.func.grad(loss, argnums=(0, 1))(X, s)

    together = torch.vmap(slopes)(scores, counts)
    for i, s in enumerate(scores):
        for a, b in zip(together, slopes(s, int(counts[i])), strict=True):
            assert torch.equal(a[i], b)


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["supermask", "joint"])
def test_a_compiled_gradient_is_the_eager_one(mode):
    # A custom autograd Function would be ignored here, without an error.
    def slopes(x, s):
        return torch.func.grad(
            lambda s: (sf.masks.sparsify(x, s, 12, mode=mode) * DY).sum()
        )(s)

    assert torch.equal(
        torch.compile(slopes, backend="eager", fullgraph=True)(X, S), DY * X
    )


def test_forward_mode_agrees_with_reverse_mode():
    _, tangent = torch.func.jvp(
        lambda s: sf.masks.sparsify(X, s, 12, mode="supermask"), (S,), (DY,)
    )
    assert torch.equal(tangent, DY * X)


def test_an_activation_inside_a_loss():
    # Magnitude scores of the activation itself: the score's gradient reaches it in mode
    # "joint".
    def loss(x, mode):
        return (
            sf.masks.sparsify(x, x.abs(), None, pattern=sf.patterns.nm(2, 4), mode=mode)
            * DY
        ).sum()

    mask = sf.masks.topk_mask(X.abs(), None, pattern=sf.patterns.nm(2, 4))
    assert torch.equal(torch.func.grad(loss)(X, "ste"), DY * mask)
    torch.testing.assert_close(
        torch.func.grad(loss)(X, "joint"), DY * mask + DY * X.abs()
    )
    rows = torch.vmap(lambda row: sf.masks.sparsify(row, row, 3))(X)
    assert torch.equal(
        rows, sf.masks.sparsify(X, X, 3, pattern=sf.patterns.row_balanced())
    )


@pytest.mark.parametrize("mode", ["ste", "supermask", "joint"])
def test_what_is_not_finite_stays_where_it_is(mode):
    inf, nan = float("inf"), float("nan")
    x, s = (
        torch.tensor([nan, inf, -0.0, 2.0, -3.0]),
        torch.tensor([0.0, 0.1, 0.2, inf, -inf]),
    )
    y = sf.masks.sparsify(x, s, 2, mode=mode)
    assert y.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]
    assert not torch.signbit(y[[0, 1, 4]]).any()
    ds = torch.func.grad(lambda s: sf.masks.sparsify(x, s, 2, mode=mode).sum())(s)
    assert torch.isfinite(ds).all()
    kept = sf.masks.sparsify(x, torch.tensor([5.0, 4.0, 3.0, 0.0, 0.0]), 3, mode=mode)
    assert kept[0].isnan() and kept[1] == inf and torch.signbit(kept[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_result_has_the_dtype_of_x_and_each_gradient_its_own(dtype):
    y, dx, ds = pulled("joint", False, x=X.to(dtype), dy=DY.to(dtype))
    assert (y.dtype, dx.dtype, ds.dtype) == (dtype, dtype, torch.float32)
    assert torch.equal(ds, (DY.to(dtype) * X.to(dtype)).float())


def test_a_drawn_mask_goes_through_a_gate():
    mask = sf.masks.bernoulli_mask(torch.sigmoid(S), sf.random.key(0))
    ds = torch.func.grad(
        lambda s: (
            sf.masks.gate(X, torch.sigmoid(s), mask, mode="supermask") * DY
        ).sum()
    )(S)
    torch.testing.assert_close(ds, DY * X * torch.sigmoid(S) * (1 - torch.sigmoid(S)))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: sf.masks.sparsify(X, S, 12, mode="STE"),
            ValueError,
            "expected mode to be 'supermask', 'joint' or 'ste', got 'STE'",
        ),
        (
            lambda: sf.masks.sparsify(X, S[0], 2),
            ValueError,
            "expected scores of shape (4, 8), got (8,)",
        ),
        (
            lambda: sf.masks.gate(X, S, MASK[0]),
            ValueError,
            "expected mask of shape (4, 8), got (8,)",
        ),
        (
            lambda: sf.masks.gate(X, S, MASK.float()),
            TypeError,
            "expected a bool mask, got torch.float32",
        ),
        (
            lambda: sf.masks.sparsify(X, S, 33),
            ValueError,
            "expected 0 <= n_keep <= 32, got 33",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text
