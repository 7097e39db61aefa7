"""The laws of `sf.methods`: each method is held to all that bind it, on a few examples
a check.

The parts that methods are made of have rows in `registry.py`, where every check gets
its full number of examples.
"""

import pytest

from property_tests.method_rows import ROWS
from sparsefn.testing import LAWS, Row, check_laws
from sparsefn.testing.laws import COMPILE


@pytest.mark.deep(
    but=[
        "wanda",
        "movement",
        "snip",
        "powerprop",
        "set by sign",
        "ac_dc",
        "srigl",
        "top_kast",
        "sr_ste",
    ]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_laws_hold(row: Row) -> None:
    laws = [law for law in LAWS if law is not COMPILE]
    assert len(check_laws(row.make, meta=row.meta, max_examples=5, laws=laws).held) >= 6
