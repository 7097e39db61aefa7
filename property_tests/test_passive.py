"""`passive` around every algorithm and method: the same bits, and no promise is taken
for broken that is kept.
"""

from collections.abc import Callable

import pytest

import sparsefn as sf
from property_tests import test_methods
from property_tests.effort import seed, tries
from property_tests.registry import ROWS
from sparsefn.testing import Case, Row, passive
from sparsefn.testing.harness import (
    algorithm_of,
    assert_same,
    hold,
    trained_of,
    updates,
)
from sparsefn.testing.laws import drawn


@pytest.mark.deep(
    but=[
        "gmp-trained",
        "rigl-trained",
        "ste-trained",
        "supermask-trained",
        "gmp nm-trained",
        "one_shot-trained",
        "partition-trained",
        "set-trained",
    ]
)
@pytest.mark.parametrize("make", [algorithm_of, trained_of], ids=["alone", "trained"])
@pytest.mark.parametrize("row", [*ROWS, *test_methods.ROWS], ids=lambda row: row.name)
def test_passive_watches_every_row(
    row: Row, make: Callable[[Row, Case], sf.Algorithm]
) -> None:
    def watched(case: Case) -> None:
        plain = list(updates(make(row, case), case))
        for state, other in zip(
            plain, updates(passive(make(row, case)), case), strict=True
        ):
            assert_same("a state", state, other)
        if make is algorithm_of:
            list(
                updates(
                    passive(make(row, case), meta=row.meta, sparsity=case.sparsity),
                    case,
                )
            )

    hold(f"passive {row.name}", watched, drawn(row.meta), tries() / 4, seed())
