"""How far a layer turns vectors: worked examples."""

import math

import pytest
import torch

import sparsefn as sf

EAST, NORTH, WEST, NONE = ([1.0, 0], [0.0, 2], [-3.0, 0], [0.0, 0])


@pytest.mark.parametrize(
    ("before", "after", "influence", "angle"),
    [
        ([EAST], [EAST], 0, 0),
        ([EAST], [NORTH], 1, 1 / 2),
        ([EAST], [WEST], 2, 1),
        ([EAST, EAST], [NORTH, WEST], 3 / 2, 3 / 4),
        ([EAST], [[1.0, math.sqrt(3)]], 1 / 2, 1 / 3),
        ([NONE], [NONE], 0, 0),
        ([NONE], [EAST], 1, 1 / 2),
    ],
)
def test_worked_examples(before, after, influence, angle):
    before, after = torch.tensor(before), torch.tensor(after)
    got = sf.calibration.influence_of(before, after)
    assert got.dtype == torch.float64 and got.item() == pytest.approx(influence)
    assert sf.calibration.angle_of(before, after).item() == pytest.approx(angle)
    turned = sf.calibration.influence_of(before.T, after.T, dim=0)
    assert turned.item() == got.item()


def test_what_is_nearly_parallel_has_an_angle():
    x = torch.rand(40, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert sf.calibration.angle_of(x, 3 * x).isfinite()


@pytest.mark.parametrize("dim", [2, -3, 5])
def test_a_dimension_that_is_not_there_is_told(dim):
    told = (
        r"^influence_of: expected dim from -2 to 1, a dimension of hidden states of "
        rf"shape \(2, 3\), got {dim}$"
    )
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=told):
        sf.calibration.influence_of(x, x, dim=dim)


@pytest.mark.parametrize("dim", [None, 1.0, True])
def test_a_dimension_is_an_int(dim):
    told = "^influence_of: expected dim to be an int, got "
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match=told):
        sf.calibration.influence_of(x, x, dim=dim)


@pytest.mark.parametrize("name", ["influence_of", "angle_of"])
def test_other_shapes_are_told(name):
    told = (
        f"^{name}: expected before and after of one shape, got \\(2, 3\\) and \\(3,\\)"
    )
    with pytest.raises(ValueError, match=told):
        getattr(sf.calibration, name)(torch.ones(2, 3), torch.ones(3))
