"""Sums over the inputs of a product: their dtypes, patches of convolutions, parts of
outputs put together.
"""

import pytest
import torch
from torch.nn import functional

from sparsefn.posttraining.calibration.sums import as_stats, patch_sums, row_sums


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_squares_are_float64_and_products_float32_at_least(dtype):
    x = torch.randn(50, 3).to(dtype)
    sums = row_sums(x, gram=True)
    assert sums["count"] == 50 and sums["square"].dtype == torch.float64
    assert sums["gram"].dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    assert torch.allclose(sums["square"], x.double().square().sum(0), rtol=1e-6)
    assert torch.allclose(
        sums["gram"].double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-5
    )


def test_half_precision_does_not_overflow():
    sums = row_sums(torch.full((4, 1), 60000.0, dtype=torch.float16), gram=True)
    expected = 4 * float(torch.tensor(60000.0, dtype=torch.float16)) ** 2
    assert sums["square"].item() == sums["gram"].item() == expected


def test_another_split_changes_squares_by_float64_rounding_alone():
    x = torch.randn(3000, 5) * torch.logspace(-3, 3, 5)
    whole = row_sums(x, gram=False)["square"]
    for size in (1, 7, 1000):
        parts = torch.zeros(5, dtype=torch.float64)
        for part in x.split(size):
            parts += row_sums(part, gram=False)["square"]
        assert (
            (parts - whole).abs() <= 3000 * torch.finfo(torch.float64).eps * whole
        ).all()
    # sums that need no rounding are equal
    powers = torch.tensor([[2.0**k] for k in range(-10, 11)])
    assert torch.equal(
        sum(row_sums(row[None], False)["square"] for row in powers),
        row_sums(powers, False)["square"],
    )


def test_few_inputs_are_in_memory_as_wide_copies():
    x = torch.ones(2**12, 2**8, dtype=torch.bfloat16)  # four pieces
    sums = row_sums(x, gram=True)
    assert (sums["square"] == 2**12).all() and (sums["gram"] == 2**12).all()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("ndim", "sizes"),
    [(1, (2, 1, 1)), (1, (1, 0, 3)), (2, (1, 1, 1)), (2, (2, 0, 2)), (3, (1, 1, 1))],
)
def test_patches_are_what_a_convolution_multiplies(ndim, sizes, groups):
    x, kernel = torch.randn(3, 4, *range(7, 7 + ndim)), (3, 2, 2)[:ndim]
    channels = 4 // groups
    width = channels * torch.Size(kernel).numel()
    # each output is one entry of the patch
    unit = torch.eye(width).reshape(width, channels, *kernel)
    convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[ndim - 1]
    found = patch_sums(x, kernel, [(size,) * ndim for size in sizes], groups, gram=True)
    for part, sums in zip(x.split(channels, 1), found, strict=True):
        patches = (
            convolution(part, unit, None, *sizes)
            .movedim(1, -1)
            .reshape(-1, width)
            .double()
        )
        assert sums["count"] == len(patches)
        assert torch.allclose(sums["square"], patches.square().sum(0), rtol=1e-6)
        assert torch.allclose(
            sums["gram"].double(), patches.T @ patches, rtol=1e-5, atol=1e-4
        )


def test_parts_of_outputs_become_equal_groups():
    one, two = row_sums(torch.ones(5, 3), True), row_sums(2 * torch.ones(6, 3), True)
    stats = as_stats({(0, 2): one, (2, 6): two}, 6, transposed=False)
    assert (
        stats["count"].tolist() == [5, 6, 6]
        and stats["square"].shape == (3, 3)
        and stats["gram"].shape == (3, 3, 3)
    )
    assert stats["square"][:, 0].tolist() == [5, 24, 24]
    both = as_stats({(0, 6): one, (3, 6): two}, 6, transposed=True)
    assert both["count"].tolist() == [5, 11] and both["square"].shape == (2, 3, 1)
    rest = as_stats({(2, 4): one}, 4, transposed=False)
    assert rest["count"].tolist() == [0, 5] and not rest["gram"][0].any()
    assert "gram" not in as_stats(
        {(0, 1): row_sums(torch.ones(1, 2), False)}, 1, transposed=False
    )
