"""Every algorithm has the same bits, whether small leaves lie end to end or not."""

import pytest

from property_tests.digests import digests
from property_tests.registry import ROWS
from property_tests.transforms import METHODS
from sparsefn._engine.leaves import lists
from sparsefn.masks.patterns import packs
from sparsefn.testing import Row

EVERY = [*ROWS, *METHODS]
SOME = ["rigl", "set", "gmp", "snfs", "supermask"]


def by_fewest(row: Row, fewest: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(lists, "FEWEST", fewest)
    return digests([row], ["eager", "trained"])


@pytest.mark.deep(but=SOME)
@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_small_leaves_end_to_end_have_the_bits_of_leaves_one_by_one(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = by_fewest(row, 2, monkeypatch)
    assert together == by_fewest(row, 1 << 20, monkeypatch)


def test_the_law_notices_leaves_that_come_back_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = [row for row in ROWS if row.name == "rigl"]
    alone = by_fewest(row, 1 << 20, monkeypatch)
    split = packs.split_like
    monkeypatch.setattr(packs, "split_like", lambda x, like: split(x.flip(-1), like))
    assert by_fewest(row, 2, monkeypatch) != alone
