"""Members of groups, as `sf.patterns.tied` takes them and as they are printed."""

import numpy as np
import pytest

from sparsefn.shrinking.members import Member


@pytest.mark.parametrize(
    ("units", "tied", "text"),
    [
        ([0, 1, 2], [], "w[0]"),
        ([0, 0, 1, 1], [2], "w[0] (blocks of 2)"),
        ([0, 1, 0, 1], [1, 2], "w[0] (blocks of 1 in 2 parts)"),
        ([0, 0, 1, 1, 0, 0, 1, 1], [2, 2], "w[0] (blocks of 2 in 2 parts)"),
        ([1, 0, 2], [[1, 0, 2]], "w[0] (3 of 3)"),
        ([0, -1, 1], [[0, -1, 1]], "w[0] (2 of 3)"),
    ],
)
def test_forms(units, tied, text):
    member = Member("w", 0, np.array(units))
    assert member.tied() == ["w", 0, *tied]
    assert str(member) == text
