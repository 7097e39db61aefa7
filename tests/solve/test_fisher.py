"""The inverse Fisher matrix of WoodFisher."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf

fisher_inverse = sf.solve.fisher_inverse


def fisher(grads, damp):
    return damp * torch.eye(grads.shape[1], dtype=grads.dtype) + grads.T @ grads / len(grads)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1e-3, 0.5, 10.0]))
def test_it_is_the_inverse(seed, n, d, damp):
    grads = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.linalg.inv(fisher(grads, damp))
    torch.testing.assert_close(fisher_inverse(grads, damp), expected, rtol=1e-8, atol=1e-8 / damp)


def test_it_is_what_the_updates_of_the_paper_add_up_to():
    grads, damp = torch.randn(7, 5, dtype=torch.float64), 1e-2
    inverse = torch.eye(5, dtype=torch.float64) / damp
    for g in grads:
        v = inverse @ g
        inverse = inverse - torch.outer(v, v) / (len(grads) + g @ v)
    torch.testing.assert_close(fisher_inverse(grads, damp), inverse)


def test_the_worked_example_its_scores_and_what_pruning_adds():
    inverse = fisher_inverse(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), 0.5)
    torch.testing.assert_close(inverse, torch.tensor([[12.0, -10.0], [-10.0, 22.0]]) / 41)
    weight = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weight.square() / (2 * inverse.diagonal()), torch.tensor([41 / 24, 41 / 44]))
    torch.testing.assert_close(-weight[0] * inverse[0] / inverse[0, 0], torch.tensor([-1.0, 10 / 12]))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", [2, 9])
def test_blocks_on_the_diagonal(n, block):
    grads = torch.randn(n, 1, 5, dtype=torch.float64)  # an example may have any shape
    found = fisher_inverse(grads, 0.1, block)
    assert found.shape == (-(-5 // block), block, block)
    for i, part in enumerate(grads.flatten(1).split(block, 1)):
        width = part.shape[1]
        torch.testing.assert_close(found[i, :width, :width], torch.linalg.inv(fisher(part, 0.1)))
    diagonal = found.diagonal(dim1=1, dim2=2).flatten()[:5]
    assert diagonal.shape == (5,) and (diagonal > 0).all()
    torch.testing.assert_close(
        found[-1, -1, -1] if 5 % block else torch.tensor(10.0).double(), torch.tensor(10.0).double()
    )


def test_dtypes_and_purity():
    grads = torch.randn(3, 4).bfloat16().requires_grad_()
    found = fisher_inverse(grads, 1)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert fisher_inverse(torch.ones(3), 0.5).shape == (1, 1)


@pytest.mark.parametrize(
    ("grads", "damp", "block", "kind", "text"),
    [
        (torch.ones(2, 2), 0.0, None, ValueError, "fisher_inverse: expected damp to be a number > 0, got 0.0"),
        (torch.ones(2, 2), "1", None, TypeError, "expected damp to be a number"),
        (torch.ones(2, 2), 0.1, 0, ValueError, "fisher_inverse: expected block >= 1, got 0"),
        (torch.ones(0, 2), 0.1, None, ValueError, "expected grads of at least one example, got shape (0, 2)"),
        (
            torch.ones(2, 2).long(),
            0.1,
            None,
            TypeError,
            "expected grads to be a floating-point tensor, got torch.int64",
        ),
        ([1.0], 0.1, None, TypeError, "fisher_inverse: expected grads to be a floating-point tensor, got list"),
        (torch.tensor([[float("nan")]]), 0.1, None, ValueError, "expected a finite grads, got 1 of 1 entries that are"),
    ],
)
def test_bad_arguments(grads, damp, block, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        fisher_inverse(grads, damp, block)
