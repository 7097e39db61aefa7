"""What every solver says to bad weights and hessians, and the factor that they
share.
"""

import re

import pytest
import torch

import sparsefn as sf
from sparsefn.posttraining.solve import arguments

SOLVERS = {
    "obs": lambda w, h, **options: sf.solve.obs(
        w, h, keep=0.5, **{"damp": 0.0, **options}
    ),
    "obs_exact": lambda w, h, **options: sf.solve.obs_exact(w, h, 2, **options),
    "refit": lambda w, h, **options: sf.solve.refit(w, h, w > 0, **options),
}
each = pytest.mark.parametrize("name", SOLVERS)
W, H = torch.randn(3, 4), torch.eye(4) + 0.1


@each
@pytest.mark.parametrize(
    ("weight", "hessian", "kind", "text"),
    [
        (
            W,
            H[:3],
            ValueError,
            "expected a hessian of shape (4, 4) for a weight of shape (3, 4), got (3, "
            "4)",
        ),
        (
            W,
            torch.ones(4),
            ValueError,
            "expected a hessian of shape (4, 4) for a weight of shape (3, 4), got (4,)",
        ),
        (W[0], H, ValueError, "expected a weight of shape (out, in), got (4,)"),
        (
            W[..., None, None],
            H,
            ValueError,
            "expected a weight of shape (out, in), got (3, 4, 1, 1); give the "
            "weight of a convolution as weight.flatten(1)",
        ),
        (
            W.long(),
            H,
            TypeError,
            "expected weight to be a floating-point tensor, got torch.int64",
        ),
        (
            W,
            H.bool(),
            TypeError,
            "expected hessian to be a floating-point tensor, got torch.bool",
        ),
        (
            W,
            [1.0],
            TypeError,
            "expected hessian to be a floating-point tensor, got list",
        ),
        (
            W,
            H.to("meta"),
            ValueError,
            "expected weight and hessian on one device, got cpu and meta",
        ),
        (
            W / 0 * 0,
            H,
            ValueError,
            "expected a finite weight, got 12 of 12 entries NaN or infinite",
        ),
        (
            W,
            H.index_fill(0, torch.tensor([0]), float("inf")),
            ValueError,
            "expected a finite hessian, got 4 of 16",
        ),
    ],
)
def test_bad_tensors(name, weight, hessian, kind, text):
    with pytest.raises(
        kind,
        match=re.escape(f"{name}: {text}") if "device" not in text else re.escape(text),
    ):
        SOLVERS[name](weight, hessian)


@each
def test_one_broken_entry_of_either_triangle_is_seen(name):
    for at in ((0, 3), (3, 0)):
        hessian = H.clone()
        hessian[at] = float("nan")
        with pytest.raises(
            ValueError, match=f"{name}: expected a finite hessian, got 1 of 16 entries"
        ):
            SOLVERS[name](W, hessian)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["few samples", "copies", "indefinite"])
def test_a_singular_hessian_says_which_damping_is_enough(name, dtype, kind):
    x = (
        torch.randn(5, 12, dtype=dtype)
        if kind == "few samples"
        else torch.ones(20, 12, dtype=dtype)
    )
    hessian = x.T @ x - (2 * torch.eye(12, dtype=dtype) if kind == "indefinite" else 0)
    weight = torch.randn(12, 12, dtype=dtype)
    said = (
        "expected a positive definite hessian, got one with eigenvalues from .* as of "
        "inputs that are linearly"
    )
    with pytest.raises(ValueError, match=said) as error:
        SOLVERS[name](weight, hessian, damp=0.0)
    found = re.search(r"damp=0 is too small, damp=(\S+) is enough", str(error.value))
    new = SOLVERS[name](weight, hessian, damp=float(found[1]))
    assert (new if name == "refit" else new[0]).isfinite().all()


@each
@pytest.mark.parametrize("damp", [0.0, 0.01])
def test_a_hessian_of_zeros_says_nothing(name, damp):
    with pytest.raises(
        ValueError,
        match=f"{name}: expected a hessian with an input that is not 0, got zeros "
        f"alone",
    ):
        SOLVERS[name](W, torch.zeros(4, 4), damp=damp)


@each
def test_damping_is_checked(name):
    for damp, kind in (
        (-1.0, ValueError),
        (float("nan"), ValueError),
        ("1", TypeError),
    ):
        with pytest.raises(kind, match="expected damp to be"):
            SOLVERS[name](W, H, damp=damp)


def test_large_numbers_whose_sum_overflows_are_finite():
    arguments.check_finite("obs", weight=torch.full((4,), 3e38))


@pytest.mark.parametrize("n", [1, 7, 8, 20])
def test_the_factor_is_that_of_torch(n, monkeypatch):
    monkeypatch.setattr(arguments, "BLOCK", 8)
    x = torch.randn(2 * n, n, dtype=torch.float64)
    hessian = x.T @ x
    expected = torch.linalg.cholesky(hessian)
    torch.testing.assert_close(
        arguments.factor_in_place("obs", hessian, 0.0).tril(), expected
    )


def test_a_late_block_that_is_singular_is_described_by_the_whole(monkeypatch):
    monkeypatch.setattr(arguments, "BLOCK", 2)
    hessian = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0, -1.0])).double()
    with pytest.raises(
        ValueError, match=re.escape("eigenvalues from -1 to 4, as of inputs")
    ):
        arguments.factor_in_place("obs", hessian, 0.0)


def test_a_large_factor_that_does_not_exist_tells_the_eigenvalues():
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)).double()
    hessian = x.T @ x
    hessian[299, 299] -= 500.0  # in the second panel
    values = torch.linalg.eigvalsh(hessian)
    text = f"eigenvalues from {float(values[0]):.3g} to {float(values[-1]):.3g}"
    with pytest.raises(ValueError, match=re.escape(text)):
        arguments.factor_in_place("obs", hessian.clone() + 1e-6 * torch.eye(300), 0.0)
