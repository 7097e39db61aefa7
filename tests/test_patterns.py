"""Units and groups."""

import pytest
import torch

import sparsefn as sf
from sparsefn.boxes import to_rows

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
    assert to_rows(P.block((2, 2), reduce=reduce), x).tolist() == [[v for row in want for v in row]]


def test_norms():
    x = torch.tensor([[3.0, -4.0], [1.0, 1.0]])
    assert to_rows(P.channel(0, norm=2), x).tolist() == [[5.0, pytest.approx(2**0.5)]]
    assert to_rows(P.channel(0), x).tolist() == [[7.0, 2.0]]
    assert to_rows(P.channel(1, norm=float("inf")), x).tolist() == [[3.0, 4.0]]
    assert to_rows(P.block((1, 2), reduce="l2"), x).tolist() == [[5.0, pytest.approx(2**0.5)]]


def test_patterns_are_values():
    assert P.block([2, 2]) == P.block((2, 2)) and P.block((2, 2)) != P.block((2, 1))
    assert hash(P.nm(2, 4)) == hash(P.nm(2, 4)) and P.nm(2, 4) != P.nm(2, 4, axis=0)
    assert repr(P.channel(1, norm=2)) == "channel(axis=1, norm=2)"


@pytest.mark.parametrize(
    "make,error,text",
    [
        (lambda: P.nm(5, 4), ValueError, "nm: expected n <= m, got n=5, m=4"),
        (lambda: P.nm(-1, 4), ValueError, "expected n >= 0, got -1"),
        (lambda: P.nm(0, 0), ValueError, "expected m >= 1, got 0"),
        (lambda: P.nm(1.0, 4), TypeError, "expected n to be an int, got 1.0"),
        (lambda: P.block((0, 2)), ValueError, "expected block sizes >= 1, got 0"),
        (lambda: P.block((2, 2), reduce="median"), ValueError, "expected reduce to be one of 'mean', 'sum'"),
        (lambda: P.out_groups(0), ValueError, "expected groups >= 1, got 0"),
        (lambda: P.channel(True), TypeError, "expected axis to be an int, got True"),
    ],
)
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "pattern,shape,text",
    [
        (P.nm(2, 4), (3, 6), r"nm\(2, 4, axis=-1\): expected axis -1 divisible by 4, got shape \(3, 6\)"),
        (P.nm(2, 4, axis=2), (4, 4), r"nm\(2, 4, axis=2\): no axis 2 in shape \(4, 4\)"),
        (
            P.block((4, 4)),
            (3, 8),
            r"block\(\(4, 4\), reduce='mean'\): the block is larger than the tensor of shape \(3, 8\)",
        ),
        (P.block((2, 2)), (8,), "the block is larger than the tensor"),
        (P.out_groups(3), (4, 3), r"out_groups\(3\): expected axis 0 divisible by 3, got shape \(4, 3\)"),
        (P.in_groups(2), (4, 3), r"in_groups\(2\): expected axis 1 divisible by 2, got shape \(4, 3\)"),
        (P.in_groups(2), (4,), r"in_groups\(2\): no axis 1 in shape \(4,\)"),
        (P.channel(2), (4, 3), r"channel\(axis=2, norm=1\): no axis 2 in shape \(4, 3\)"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(pattern, shape, text):
    with pytest.raises(ValueError, match=text):
        sf.topk_mask(torch.ones(shape), None if pattern.fixed else 0, pattern=pattern)
    with pytest.raises(ValueError, match=text + ".* at 'body.w'"):
        sf.static(0.5, pattern=pattern, where="*").init({"body": {"w": torch.ones(shape)}})
