"""Compiled updates on a few rows of the registry: compiling is slow, and what can go wrong is the same in most."""

import pytest

from property_tests.registry import ROWS
from sparsefn.testing import Row
from sparsefn.testing.laws_transforms import compiling_changes_nothing
from sparsefn.testing.strategies import large

COMPILED = ("gmp erk", "adam rigl", "chain", "partition of everything")


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in COMPILED], ids=lambda row: row.name)
def test_compiled_updates_are_eager_ones(row: Row) -> None:
    compiling_changes_nothing(row, large(row.meta.layout.form))


def test_the_rows_exist() -> None:
    assert {row.name for row in ROWS} >= set(COMPILED)
