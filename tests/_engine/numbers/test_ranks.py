import pytest
import torch

from sparsefn._engine.numbers.ranks import back, falling, ranks_within, running_sums

NAN = float("nan")


def test_order_is_that_of_selection():
    rows = torch.tensor([[1.0, NAN, 3.0, 1.0, -torch.inf], [0.0, -0.0, 0.0, NAN, NAN]])
    assert falling(rows).tolist() == [[2, 0, 3, 4, 1], [0, 1, 2, 3, 4]]
    assert torch.equal(
        back(rows.gather(-1, falling(rows)), falling(rows)).isnan(), rows.isnan()
    )


@pytest.mark.parametrize("width", [0, 1, 2, 3, 64, 1000])
def test_running_sums(width):
    rows = torch.rand(
        3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    sums = running_sums(rows)
    assert torch.allclose(sums, rows.cumsum(-1)) and bool(
        (sums[:, 1:] >= sums[:, :-1]).all()
    )
    assert torch.equal(torch.vmap(running_sums)(rows), sums)
    assert torch.equal(running_sums(rows[1]), sums[1])


def test_ranks_count_the_worse_of_a_class():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (4, 40), generator=generator).float()
    kinds = [torch.randint(0, 2, (4, 40), generator=generator) for _ in range(2)]
    same = (kinds[0][:, :, None] == kinds[0][:, None]) & (
        kinds[1][:, :, None] == kinds[1][:, None]
    )
    place = torch.arange(40)
    # the first of equal ones is better
    tied_after = (rows[:, :, None] == rows[:, None]) & (place[:, None] < place)
    expected = (same & ((rows[:, :, None] > rows[:, None]) | tied_after)).sum(-1)
    assert torch.equal(ranks_within(rows, *kinds), expected)
    assert torch.equal(torch.vmap(ranks_within)(rows, *kinds), expected)


def test_nan_is_worst_and_rows_may_be_empty():
    assert ranks_within(
        torch.tensor([NAN, 1.0, -torch.inf]), torch.zeros(3)
    ).tolist() == [0, 2, 1]
    assert ranks_within(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)
