"""The best of a few units in each column, against `winners`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn._engine.selection import Entry, best_of_columns, columns, winners
from sparsefn.testing.launches import counted

# squares, ties among them
VALUES = st.sampled_from([0.0, 1e-45, 1.0, 2.0, 3.0, float("inf"), float("nan")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_comparisons_choose_the_winners(dtype, units, width, data):
    numbers = data.draw(
        st.lists(VALUES, min_size=units * width, max_size=units * width)
    )
    scores = torch.tensor(numbers, dtype=dtype).reshape(units, width)
    count = data.draw(st.integers(0, units))
    (want,) = winners([Entry(scores[None])], [count])
    assert torch.equal(best_of_columns(units, count, scores.device)(scores), want[0])
    earlier = torch.ones(units, units, dtype=torch.bool).triu(1)[:, :, None]
    assert torch.equal(columns._by_pairs(scores, earlier, count), want[0])


def test_members_choose_by_themselves():
    scores = torch.rand(3, 4, 5)
    best = best_of_columns(4, 2, scores.device)
    made = torch.func.vmap(best)(scores)
    assert torch.equal(made, torch.stack([best(one) for one in scores]))


def test_a_choice_on_a_device_takes_six_launches_and_waits_for_nothing():
    scores = torch.empty(4, 100, device="meta")
    best = best_of_columns(4, 2, scores.device)
    found = counted(lambda: best(scores))
    assert found.launches <= 6 and not found.waits


def test_the_last_columns_may_have_fewer_units(monkeypatch):
    scores = torch.tensor([[1.0], [3.0], [3.0]])
    best = best_of_columns(4, 2, scores.device)
    want = [[False], [True], [True]]
    assert best(scores).tolist() == want
    monkeypatch.setattr(columns, "pays", lambda tensors: True)
    assert best(scores).tolist() == want
