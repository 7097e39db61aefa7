"""The most units that a limit allows: as many as are found one by one, in order, until
no count can rise.
"""

import numpy as np
import pytest
import torch

from sparsefn.masks.budgets.count_steps import Steps
from sparsefn.masks.budgets.filling import UnitCosts, check_prefer, fill_up, levels_of


def test_fill_ends_where_no_count_can_rise():
    assert fill_up(
        lambda kept: kept[0] + 10 * kept[1], lambda k: [1 + k, 1 + k], 4, 24
    ) == [4, 2]
    assert fill_up(lambda kept: sum(kept), lambda k: [1 + k, 1], 4, 100) == [5, 1]


@pytest.mark.parametrize(
    "prefer", ["uniform", "global", {"a": 2.0, "b": 0.3}, {"a": 0}]
)
def test_each_level_has_one_unit_more_of_a_leaf_at_most_and_the_last_has_all(prefer):
    sizes = {"a": 5, "b": 8, "c": 1, "d": 0, "e": 6}
    priced = UnitCosts(
        sizes, sum, lambda: {name: np.arange(n) for name, n in sizes.items()}
    )
    levels, last = levels_of(
        priced,
        prefer,
        [name != "e" for name in sizes],
        Steps.among(priced.sizes, 1, []),
    )
    way = np.array([levels(k) for k in range(last + 1)])
    assert way[-1].tolist() == list(sizes.values())
    assert way[0].tolist() == [5 if prefer == {"a": 0} else 1, 1, 1, 0, 6]
    assert np.isin(np.diff(way, axis=0), [0, 1]).all()


def test_scores_order_units_and_equal_ones_come_by_leaf():
    priced = UnitCosts({"a": 2, "b": 3}, sum, dict)
    levels, last = levels_of(
        priced,
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 3.0, 2.0])},
        [True, True],
        Steps.among(priced.sizes, 1, []),
    )
    assert [levels(k) for k in range(last + 1)] == [[1, 1], [1, 2], [2, 2], [2, 3]]


def test_preferences_that_do_not_fit_are_refused():
    priced = UnitCosts({"a": 2}, sum, dict)
    for good in ("uniform", "global", {"a": 1}, {"*": 0.5}, {"a": torch.ones(2)}):
        check_prefer(priced, good)
    with pytest.raises(
        ValueError,
        match="within: expected prefer to be 'uniform', 'global', .*, got 'erk'",
    ):
        check_prefer(priced, "erk")
    with pytest.raises(ValueError, match="b"):
        check_prefer(priced, {"b": 1.0})
