"""Bounds of leaves are exact products of the fractions that were written."""

import pytest

from sparsefn.budgets.limits import Global


def test_bounds_are_exact():
    found = Global(0.07, 0.29).bounds({"a": (100,), "b": (10, 10), "c": (0, 3)}, 20)
    assert found == {"a": (7, 29), "b": (7, 29), "c": (0, 0)}
    assert Global(1 / 3, 1.0).bounds({"a": (3,)}, 1) == {"a": (1, 3)}


def test_totals_that_bounds_cannot_meet_are_refused():
    for total in (6, 30):
        with pytest.raises(
            ValueError,
            match=r"keeps between 7 and 29 units, but the sparsity asks for \d+ over "
            r"'a'",
        ):
            Global(0.07, 0.29).bounds({"a": (100,)}, total)
