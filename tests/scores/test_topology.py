"""Scores of missing connections: held against plain loops; their recordings are in test_golden_dynamic."""

import pytest
import torch

import sparsefn as sf

MASK = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.4


def score_of(mask, rule="CH2", least=0.0):
    return sf.scores.topology(rule, least)(sf.State({"w": torch.zeros(mask.shape)}, {"w": mask}), (), 0)["w"]


def by_paths(mask, rule):
    """For each missing connection the paths u - v - u' - v', by its first and its last common neighbourhood."""
    rows, columns = mask.shape
    found = torch.zeros(rows, columns, dtype=torch.float64)

    def weight(a, b):
        common = int((a & b).sum())
        other = max(int(b.sum()) - common, 1)
        return 0.0 if not common else (1 + common if rule == "CH2" else 1) / other

    for i in range(rows):
        for j in range(columns):
            if not mask[i, j]:
                found[i, j] = sum(weight(mask[i], mask[k]) for k in range(rows) if mask[k, j])
                found[i, j] += sum(weight(mask[:, j], mask[:, k]) for k in range(columns) if mask[i, k])
    return found


@pytest.mark.parametrize("rule", ["CH2", "CH3"])
def test_paths_of_length_three_are_weighed(rule):
    found = score_of(MASK, rule)
    assert torch.allclose(found, by_paths(MASK, rule), rtol=1e-9)
    assert not found[MASK].any() and found[~MASK].any()


def test_permuted_units_have_permuted_scores_to_the_bit():
    rows, columns = torch.randperm(7), torch.randperm(9)
    for rule in ("CH2", "CH3"):
        assert torch.equal(score_of(MASK[rows][:, columns], rule), score_of(MASK, rule)[rows][:, columns])


def test_sums_are_the_same_in_any_order():
    mask = torch.rand(300, 200, generator=torch.Generator().manual_seed(1)) < 0.1
    order = torch.randperm(300)
    assert torch.equal(score_of(mask[order]), score_of(mask)[order])


def test_a_missing_connection_scores_at_least_so_much():
    mask = torch.tensor([[True, False], [False, False]])
    assert score_of(mask, least=0.5).tolist() == [[0.0, 0.5], [0.5, 0.5]]


def test_leaves_of_other_ranks_are_matrices():
    mask = MASK.reshape(7, 3, 3)
    assert torch.equal(score_of(mask), score_of(MASK).reshape(7, 3, 3))
    assert score_of(torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


def test_a_rule_is_one_of_two():
    with pytest.raises(ValueError, match="expected rule to be 'CH2' or 'CH3', got 'CH1'"):
        sf.scores.topology("CH1")
