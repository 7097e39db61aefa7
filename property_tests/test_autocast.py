"""Autocast around an update is no argument of it: states have the same bits."""

import pytest
import torch

from property_tests.digests import compiled, digest_of, trained
from property_tests.registry import ROWS
from property_tests.transforms import METHODS, case_of
from sparsefn.testing import Row


@pytest.mark.deep(but=["low_rank", "rigl", "methods: woodfisher"])
@pytest.mark.parametrize("row", [*ROWS, *METHODS], ids=lambda row: row.name)
def test_updates_have_the_same_bits_under_autocast(row: Row) -> None:
    case = case_of(row)
    plain = digest_of(trained(row, case))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert digest_of(trained(row, case)) == plain


@pytest.mark.deep
def test_compiled_updates_have_the_same_bits_under_autocast() -> None:
    row = next(row for row in ROWS if row.name == "low_rank")
    case = case_of(row)
    plain = digest_of(trained(row, case))
    assert digest_of(compiled(row, case)) == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert digest_of(compiled(row, case)) == plain
