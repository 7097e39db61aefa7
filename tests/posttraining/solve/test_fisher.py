"""The inverse Fisher matrix of WoodFisher, and pruning by it."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf

fisher_inverse, obs_fisher = sf.solve.fisher_inverse, sf.solve.obs_fisher


def fisher(grads, damp):
    return damp * torch.eye(grads.shape[1], dtype=grads.dtype) + grads.T @ grads / len(
        grads
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1e-3, 0.5, 10.0]),
)
def test_it_is_the_inverse(seed, n, d, damp):
    grads = torch.randn(
        n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    expected = torch.linalg.inv(fisher(grads, damp))
    torch.testing.assert_close(
        fisher_inverse(grads, damp), expected, rtol=1e-8, atol=1e-8 / damp
    )


def test_it_is_what_the_updates_of_the_paper_add_up_to():
    grads, damp = torch.randn(7, 5, dtype=torch.float64), 1e-2
    inverse = torch.eye(5, dtype=torch.float64) / damp
    for g in grads:
        v = inverse @ g
        inverse = inverse - torch.outer(v, v) / (len(grads) + g @ v)
    torch.testing.assert_close(fisher_inverse(grads, damp), inverse)


def test_the_worked_example_its_scores_and_what_pruning_adds():
    inverse = fisher_inverse(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), 0.5)
    torch.testing.assert_close(
        inverse, torch.tensor([[12.0, -10.0], [-10.0, 22.0]]) / 41
    )
    weight = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(
        weight.square() / (2 * inverse.diagonal()), torch.tensor([41 / 24, 41 / 44])
    )
    torch.testing.assert_close(
        -weight[0] * inverse[0] / inverse[0, 0], torch.tensor([-1.0, 10 / 12])
    )


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", [2, 9])
def test_blocks_on_the_diagonal(n, block):
    grads = torch.randn(n, 1, 5, dtype=torch.float64)  # an example may have any shape
    found = fisher_inverse(grads, 0.1, block)
    assert found.shape == (-(-5 // block), block, block)
    for i, part in enumerate(grads.flatten(1).split(block, 1)):
        width = part.shape[1]
        torch.testing.assert_close(
            found[i, :width, :width], torch.linalg.inv(fisher(part, 0.1))
        )
    diagonal = found.diagonal(dim1=1, dim2=2).flatten()[:5]
    assert diagonal.shape == (5,) and (diagonal > 0).all()
    torch.testing.assert_close(
        found[-1, -1, -1] if 5 % block else torch.tensor(10.0).double(),
        torch.tensor(10.0).double(),
    )


def test_dtypes_and_purity():
    grads = torch.randn(3, 4).bfloat16().requires_grad_()
    found = fisher_inverse(grads, 1)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert fisher_inverse(torch.ones(3), 0.5).shape == (1, 1)


@pytest.mark.parametrize(
    ("grads", "damp", "block", "kind", "text"),
    [
        (
            torch.ones(2, 2),
            0.0,
            None,
            ValueError,
            "fisher_inverse: expected damp to be a number > 0, got 0.0",
        ),
        (torch.ones(2, 2), "1", None, TypeError, "expected damp to be a number"),
        (
            torch.ones(2, 2),
            0.1,
            0,
            ValueError,
            "fisher_inverse: expected block >= 1, got 0",
        ),
        (
            torch.ones(0, 2),
            0.1,
            None,
            ValueError,
            "expected grads of at least one example, got shape (0, 2)",
        ),
        (
            torch.ones(2, 2).long(),
            0.1,
            None,
            TypeError,
            "expected grads to be a floating-point tensor, got torch.int64",
        ),
        (
            [1.0],
            0.1,
            None,
            TypeError,
            "fisher_inverse: expected grads to be a floating-point tensor, got list",
        ),
        (
            torch.tensor([[float("nan")]]),
            0.1,
            None,
            ValueError,
            "expected a finite grads, got 1 of 1 entries NaN",
        ),
    ],
)
def test_bad_arguments(grads, damp, block, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        fisher_inverse(grads, damp, block)


def by_force(weight, grads, keep, damp, block):
    """Each block's matrix inverted, and one pruned weight after the other."""
    flat, parts = weight.flatten(), grads.flatten(1)
    inverses = [torch.linalg.inv(fisher(part, damp)) for part in parts.split(block, 1)]
    costs = flat.square() / (
        2 * torch.cat([inverse.diagonal() for inverse in inverses])
    )
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[costs.argsort(descending=True)[:keep]] = True
    new = flat.clone()
    for q in (~kept).nonzero()[:, 0].tolist():
        b, i = divmod(q, block)
        row = inverses[b][i]
        new[b * block : b * block + len(row)] -= flat[q] * row / row[i]
    return torch.where(kept, new, 0.0).reshape(weight.shape), kept.reshape(weight.shape)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(0, 15),
    st.sampled_from([1, 4, 7, 15, 100]),
)
def test_obs_fisher_is_brute_force(seed, examples, keep, block):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    grads = torch.randn(examples, 3, 5, generator=generator, dtype=torch.float64)
    found = obs_fisher(weight, grads, keep, damp=0.1, block=block)
    expected = by_force(weight, grads, keep, 0.1, block)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])


def test_obs_fisher_by_hand():
    # With damp 0.5 and these gradients the scores of (1, -1) are 41 / 24 and 41 / 44.
    grads = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    new, kept = obs_fisher(torch.tensor([1.0, -1.0]), grads, 1, damp=0.5)
    assert kept.tolist() == [True, False]
    torch.testing.assert_close(new, torch.tensor([1.0 - 10 / 22, 0.0]))


def test_one_weight_costs_what_its_score_says():
    # What the quadratic loses without weight q, at the best of the others.
    weight, grads = (
        torch.randn(6, dtype=torch.float64),
        torch.randn(9, 6, dtype=torch.float64),
    )
    matrix, inverse = fisher(grads, 0.3), fisher_inverse(grads, 0.3)
    costs = []
    for q in range(6):
        others = [i for i in range(6) if i != q]
        change = torch.zeros(6, dtype=torch.float64)
        change[q] = -weight[q]
        change[others] = torch.linalg.solve(
            matrix[others][:, others], matrix[others, q] * weight[q]
        )
        costs.append(change @ matrix @ change / 2)
    torch.testing.assert_close(
        torch.stack(costs), weight.square() / (2 * inverse.diagonal())
    )
    new, kept = obs_fisher(weight, grads, 5, damp=0.3)
    assert int((~kept).nonzero()) == int(torch.stack(costs).argmin())
    change = new - weight
    torch.testing.assert_close(change @ matrix @ change / 2, min(costs))


def test_of_what_a_mask_has_pruned_gradients_do_not_count():
    weight, grads = torch.randn(3, 4), torch.randn(5, 3, 4)
    mask = torch.rand(3, 4) < 0.6
    weight = torch.where(mask, weight, 0.0)
    once, again = (
        obs_fisher(weight, g, 3, mask=mask, damp=0.1)
        for g in (grads, torch.where(mask, grads, 7.0))
    )
    assert torch.equal(once[0], again[0]) and not (once[1] & ~mask).any()


def test_obs_fisher_in_16_bits_and_of_nothing():
    weight, grads = (
        torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(5, 3, 4),
    )
    new, kept = obs_fisher(weight, grads, 6)
    assert (
        new.dtype == torch.bfloat16 and not new.requires_grad and int(kept.sum()) == 6
    )
    empty, none = obs_fisher(torch.ones(0, 3), torch.ones(2, 0, 3), 0)
    assert empty.shape == none.shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            (torch.ones(2, dtype=torch.int64), torch.ones(3, 2), 1),
            TypeError,
            "weight to be a floating-point tensor, got",
        ),
        (
            (torch.ones(2, 2), torch.ones(3, 4), 1),
            ValueError,
            "expected grads of shape (examples, 2, 2), got (3, 4)",
        ),
        (
            (torch.ones(2), None, 1),
            TypeError,
            "expected grads to be a floating-point tensor, got NoneType",
        ),
        (
            (torch.ones(2), torch.ones(0, 2), 1),
            ValueError,
            "expected grads of at least one example, got shape (0, 2)",
        ),
        (
            (torch.ones(2), torch.full((3, 2), torch.nan), 1),
            ValueError,
            "expected a finite grads, got 6 of 6 entries",
        ),
        ((torch.ones(2), torch.ones(3, 2), 3), ValueError, "got 3"),
    ],
)
def test_bad_arguments_of_obs_fisher(arguments, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        obs_fisher(*arguments)
    for options, said in (
        ({"damp": 0.0}, "damp to be a number > 0"),
        ({"block": 0}, "obs_fisher: expected block >= 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            obs_fisher(torch.ones(2), torch.ones(3, 2), 1, **options)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "obs_fisher: expected a bool mask of shape (2,), got torch.float32"
        ),
    ):
        obs_fisher(torch.ones(2), torch.ones(3, 2), 1, mask=torch.ones(2))
