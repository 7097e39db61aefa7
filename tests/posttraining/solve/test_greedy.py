"""Exact OBS: `obs_exact`."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf

obs_exact, refit, nm = sf.solve.obs_exact, sf.solve.refit, sf.patterns.nm
ROWS = sf.patterns.row_balanced()


def layer(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * columns + 2, columns, generator=generator, dtype=torch.float64)
    x[:, 1:] += 0.7 * x[:, :-1]
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), x.T @ x


def error(new, weight, hessian):
    return ((new - weight) @ hessian * (new - weight)).sum(1)


def test_one_weight_costs_what_the_inverse_says():
    weight, hessian = layer(3, 6)
    inverse = torch.linalg.inv(hessian)
    costs = weight.square() / inverse.diagonal()
    new, mask = obs_exact(weight, hessian, 1, ROWS)
    at = costs.argmin(1)
    assert torch.equal((~mask).nonzero()[:, 1], at)
    torch.testing.assert_close(error(new, weight, hessian), costs.amin(1))
    for row, q in enumerate(at.tolist()):
        expected = weight[row] - weight[row, q] / inverse[q, q] * inverse[q]
        torch.testing.assert_close(new[row, mask[row]], expected[mask[row]])
    new, mask = obs_exact(weight, hessian, 1)  # over all rows
    assert int((~mask).sum()) == 1 and not mask.flatten()[costs.argmin()]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.data())
def test_over_all_rows_each_step_takes_the_cheapest_next_weight(seed, columns, data):
    weight, hessian = layer(3, columns, seed)
    n = data.draw(st.integers(0, 3 * columns))
    new, mask = obs_exact(weight, hessian, n)
    kept = torch.ones_like(mask)
    now = weight.clone()
    for _ in range(n):  # by trying: the best of the single removals that refit makes
        best = None
        for r in range(3):
            inside = kept[r].nonzero()[:, 0]
            if len(inside):
                inverse = torch.linalg.inv(hessian[inside][:, inside]).diagonal()
                costs = now[r, inside].square() / inverse
                at = int(costs.argmin())
                if best is None or float(costs[at]) < best[0]:
                    best = (float(costs[at]), r, int(inside[at]))
        kept[best[1], best[2]] = False
        now = refit(weight, hessian, kept)
    assert torch.equal(mask, kept)
    torch.testing.assert_close(new, now)


@pytest.mark.parametrize("m", [2, 4, 12])
def test_nm_keeps_n_of_every_m_and_refits(m):
    weight, hessian = layer(4, 12)
    new, mask = obs_exact(weight, hessian, pattern=nm(1, m))
    assert (mask.reshape(4, -1, m).sum(-1) == 1).all()
    assert torch.equal(new, refit(weight, hessian, mask))
    assert torch.equal(obs_exact(weight, hessian, m - 1, nm(1, m))[1], mask)


def test_counts_are_exact():
    weight, hessian = layer(4, 9)
    for n in (0, 1, 17, 36):
        assert int((~obs_exact(weight, hessian, n)[1]).sum()) == n
    assert (obs_exact(weight, hessian, 4, ROWS)[1].sum(1) == 5).all()
    assert obs_exact(weight, hessian, [0, 9, 3, 1])[1].sum(1).tolist() == [9, 0, 6, 8]
    assert torch.equal(obs_exact(weight, hessian, 0)[0], weight)
    assert obs_exact(weight[:0], hessian, 0)[0].shape == (0, 9)


def test_white_inputs_are_plain_masking_and_ties_go_to_the_lowest_index():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5]])
    new, mask = obs_exact(weight, 2 * torch.eye(4), 2)
    assert torch.equal(new, torch.tensor([[0.0, -3.0, 2.0, 0.0]])) and torch.equal(
        mask, new != 0
    )
    assert obs_exact(torch.ones(2, 3), torch.eye(3), 2)[1].tolist() == [
        [False, False, True],
        [True] * 3,
    ]


def test_rows_in_several_parts_are_the_same(monkeypatch):
    from sparsefn.posttraining.solve import greedy

    weight, hessian = layer(7, 8)
    new, mask = obs_exact(weight, hessian, 20)
    monkeypatch.setattr(greedy, "AT_ONCE", 150)
    again, same = obs_exact(weight, hessian, 20)
    assert torch.equal(mask, same)
    torch.testing.assert_close(again, new)


def test_inputs_that_were_always_zero_go_first():
    weight, hessian = layer(2, 6)
    hessian[3], hessian[:, 3] = 0.0, 0.0
    new, mask = obs_exact(weight, hessian, 1, ROWS)
    assert not mask[:, 3].any() and torch.equal(
        new[:, [0, 1, 2, 4, 5]], weight[:, [0, 1, 2, 4, 5]]
    )


@pytest.mark.parametrize(
    ("n_prune", "pattern", "kind", "text"),
    [
        (
            9,
            None,
            ValueError,
            "obs_exact: expected n_prune <= 8, the size of the weight, got 9",
        ),
        (
            5,
            ROWS,
            ValueError,
            "obs_exact: expected n_prune <= 4, the size of a group, got 5",
        ),
        (-1, None, ValueError, "obs_exact: expected n_prune >= 0, got -1"),
        (
            None,
            None,
            TypeError,
            "obs_exact: expected n_prune to be an int, got NoneType",
        ),
        (
            1,
            nm(2, 4),
            ValueError,
            "obs_exact: nm(2, 4, axis=-1) prunes 2 of a group, got n_prune=1",
        ),
        (
            None,
            nm(1, 2, axis=0),
            ValueError,
            "groups lie inside rows, such as row_balanced() or nm(2, 4), got nm(",
        ),
        (
            1,
            sf.patterns.block((1, 2)),
            ValueError,
            "expected a pattern of single weights whose groups lie inside rows",
        ),
        (
            [1],
            None,
            ValueError,
            "obs_exact: expected n_prune for each of 2 rows, got 1",
        ),
        ([1, 5], None, ValueError, "obs_exact: expected n_prune of row 1 <= 4, got 5"),
        (
            [1, 0.5],
            None,
            TypeError,
            "obs_exact: expected n_prune of row 1 to be an int, got float",
        ),
        (
            [1, 1],
            ROWS,
            ValueError,
            "expected one n_prune for the groups of row_balanced(), got a count for "
            "each row",
        ),
    ],
)
def test_bad_arguments(n_prune, pattern, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        obs_exact(torch.ones(2, 4), torch.eye(4), n_prune, pattern)
