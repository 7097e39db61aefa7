"""Every law over every row of the registry that it binds."""

import pytest

from property_tests.harness import hold
from property_tests.laws import LAWS, Law
from property_tests.registry import ROWS, Row

BOUND = [pytest.param(law, row, id=f"{law.name}-{row.name}") for law in LAWS for row in ROWS if law.binds(row.meta)]


@pytest.mark.parametrize(("law", "row"), BOUND)
def test_laws_hold(law: Law, row: Row) -> None:
    hold(f"{law.name} {row.name}", lambda case: law.check(row, case), law.examples(row.meta), law.share)


def test_every_law_binds_a_row_and_every_row_is_bound_by_many() -> None:
    assert all(any(law.binds(row.meta) for row in ROWS) for law in LAWS)
    assert all(sum(law.binds(row.meta) for law in LAWS) >= 10 for row in ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)
