"""Aligned columns."""

import pytest

from sparsefn.core.checks.table import aligned, natural


def test_text_is_left_and_numbers_right():
    table = aligned(
        [("a", "shape", "n"), ("long", "(2,)", "1,000"), ("", "", "5")], left=2
    )
    assert table.splitlines() == [
        "a     shape      n",
        "long  (2,)   1,000",
        "                 5",
    ]
    assert aligned([("a", "b")], left=2) == "a  b"


def test_no_line_ends_in_blanks():
    assert aligned([("x", "name"), ("1", "")], left=2).splitlines() == ["x  name", "1"]


def test_rows_have_equally_many_cells():
    with pytest.raises(ValueError, match="zip"):
        aligned([("a", "b"), ("c",)], left=1)


def test_natural_order_reads_numbers():
    paths = ["10.w", "b", "a10b2", "2.w", "", "a2b10", "1", "a", "2.b"]
    assert sorted(paths, key=natural) == [
        "",
        "1",
        "2.b",
        "2.w",
        "10.w",
        "a",
        "a2b10",
        "a10b2",
        "b",
    ]
