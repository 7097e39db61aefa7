import pytest
import torch

from sparsefn._engine.leaves import donation, lists
from sparsefn.algorithms.combine.descent import live_leaves

BEFORE = torch.tensor([True, True, False, True])
AFTER = torch.tensor([True, False, True, True])
STEPPED = torch.tensor([1.0, 2.0, 0.0, torch.nan])


def live_entries(*row, **options):
    (live,) = live_leaves([row], **options)
    return live


def test_moments_end_where_the_support_ends_and_where_it_begins():
    assert live_entries(AFTER, BEFORE, STEPPED, STEPPED).tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert (
        live_entries(AFTER, BEFORE, STEPPED, STEPPED, reset_grown=False).tolist()
        == AFTER.tolist()
    )
    assert live_entries(
        AFTER, BEFORE, STEPPED, STEPPED, mask_moments=False
    ).tolist() == [True, True, False, True]


def test_they_end_where_the_update_itself_set_a_weight_and_nan_is_nan():
    new = torch.tensor([0.0, 0.0, 0.0, torch.nan])
    assert live_entries(BEFORE, BEFORE, new, STEPPED).tolist() == [
        False,
        False,
        False,
        True,
    ]


def test_none_is_all():
    assert live_entries(AFTER, AFTER, STEPPED, STEPPED, mask_moments=False) is None
    assert (
        live_entries(
            AFTER, BEFORE, STEPPED, STEPPED, mask_moments=False, reset_grown=False
        )
        is None
    )


@pytest.mark.parametrize(
    "options", [{}, {"mask_moments": False}, {"reset_grown": False}], ids=str
)
def test_leaves_at_once_have_the_entries_of_each(options, monkeypatch):
    monkeypatch.setattr(lists, "pays", lambda tensors: True)
    new = torch.tensor([0.0, 2.0, 5.0, torch.nan])
    rows = [
        (AFTER, BEFORE, STEPPED, STEPPED),
        (AFTER, AFTER, STEPPED, STEPPED),
        (AFTER, BEFORE, new, STEPPED),
        (BEFORE[:2], BEFORE[:2], new[:2], STEPPED[:2]),
        (BEFORE[:3], AFTER[:3], new[:3].clone(), STEPPED[:3]),
    ]
    for row, live in zip(rows, live_leaves(rows, **options), strict=True):
        want = live_entries(*row, **options)
        assert live is want is None or torch.equal(live, want)


def test_a_stepped_weight_that_was_written_over_is_the_new_one_on_the_support():
    stepped = STEPPED.clone()
    donation.empty([stepped])
    for rows in (
        [(AFTER, BEFORE, STEPPED, stepped)],
        [(AFTER, BEFORE, STEPPED, stepped)] * 2,
    ):
        assert all(torch.equal(live, AFTER & BEFORE) for live in live_leaves(rows))
