"""RMS norms in a module's own code."""

import pytest
import torch
from torch import nn

from tests.shrinking.classes import drawn, same, small_of


class Norm(nn.Module):
    def __init__(self, width=8, shift=0.0, eps=1e-2):
        super().__init__()
        self.weight, self.shift, self.eps = nn.Parameter(torch.ones(width)), shift, eps

    def forward(self, x):
        dtype, x = x.dtype, x.to(torch.float32)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.shift + self.weight if self.shift else self.weight) * y.to(dtype)


class Square(nn.Module):
    """With a bias, and without a cast."""

    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-3
        self.gain, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
            * self.gain
            + self.bias
        )


class Mean(Norm):
    def forward(self, x):
        return x / (x.mean(-1, keepdim=True).square() + self.eps) * self.weight


class Literal(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * self.weight


def around(norm):
    return drawn(nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [Norm, lambda: Norm(shift=1.0), Square],
    ids=["plain", "shifted", "with a bias"],
)
def test_weight_and_eps_are_scaled(make, dtype):
    model, x = around(make()).to(dtype), torch.randn(4, 3, dtype=dtype) * 0.1
    made, whole, _ = same(model, x, counted=True, share=0.375)
    small = made.model
    assert type(small[1]) is type(model[1]) and small[0].out_features == 5
    torch.testing.assert_close(small(x), whole(x), rtol=1e-5, atol=1e-5)
    (name, fold), *more = made.scaled.items()
    assert not more and fold.factor == pytest.approx((8 / 5) ** 0.5)
    old, new = (m.get_parameter(name) for m in (model, small))
    kept = [
        i
        for i in range(8)
        if torch.isclose(old[i] * fold.factor + fold.shift, new).any()
    ]
    assert len(kept) >= 5 and new.dtype == dtype


@pytest.mark.parametrize(
    ("make", "kind"),
    [(Mean, "Mean"), (Literal, "Literal")],
    ids=["of another mean", "of a literal eps"],
)
def test_other_norms_have_no_smaller_model_of_their_class(make, kind):
    made, _, _ = same(around(make()), torch.randn(4, 3), counted=True)
    assert made.model is None and made.why.startswith(f"the {kind} at '1' ")


def test_half_precision_is_left_alone():
    made, _, _ = same(
        around(Norm()).bfloat16(), torch.randn(4, 3).bfloat16(), counted=True
    )
    assert (
        made.why == "the Norm at '1' takes a mean of entries that go in code of its own"
    )


def test_means_that_lose_nothing_are_left_alone():
    small, _ = small_of(
        nn.Sequential(around(Norm()), nn.Linear(2, 4), nn.Linear(4, 2)),
        torch.randn(4, 3),
    )
    assert small[0][1].eps == 1e-2 and small[1].out_features == 2
