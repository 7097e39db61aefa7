import torch

from sparsefn.compose.moments import live_entries

BEFORE = torch.tensor([True, True, False, True])
AFTER = torch.tensor([True, False, True, True])
STEPPED = torch.tensor([1.0, 2.0, 0.0, torch.nan])


def test_moments_end_where_the_support_ends_and_where_it_begins():
    assert live_entries(AFTER, BEFORE, STEPPED, STEPPED).tolist() == [True, False, False, True]
    assert live_entries(AFTER, BEFORE, STEPPED, STEPPED, reset_grown=False).tolist() == AFTER.tolist()
    assert live_entries(AFTER, BEFORE, STEPPED, STEPPED, mask_moments=False).tolist() == [True, True, False, True]


def test_they_end_where_the_update_itself_set_a_weight_and_nan_is_nan():
    new = torch.tensor([0.0, 0.0, 0.0, torch.nan])
    assert live_entries(BEFORE, BEFORE, new, STEPPED).tolist() == [False, False, False, True]


def test_none_is_all():
    assert live_entries(AFTER, AFTER, STEPPED, STEPPED, mask_moments=False) is None
    assert live_entries(AFTER, BEFORE, STEPPED, STEPPED, mask_moments=False, reset_grown=False) is None
