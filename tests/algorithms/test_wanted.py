import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.wanted import as_goal, counted, rooms, wanted
from sparsefn.budgets import spread

ROWS = Competition(sf.patterns.row_balanced(), sf.budgets.uniform())
WHOLE = Competition(sf.patterns.unstructured(), sf.budgets.uniform())
W = {"w": torch.arange(12.0).reshape(3, 4)}


def test_a_sparsity_is_a_goal_and_so_is_a_count():
    above = sf.counts.above(3.0)
    assert as_goal(WHOLE, None) is None and as_goal(WHOLE, above) is above
    pools = WHOLE.pools(W)
    assert wanted(WHOLE, pools, as_goal(WHOLE, 0.5), W, None, {}, 0) == [6]
    assert [n.tolist() for n in wanted(WHOLE, pools, above, W, None, {}, 0)] == [[8]]


def test_counts_of_active_units():
    pools = ROWS.pools(W)
    active = [torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])]
    for goal in (sf.counts.above(1.5), sf.counts.below(1.5)):
        assert [n.tolist() for n in counted(ROWS, pools, goal, W, active, 0)] == [[2, 0, 2]]


def test_room_is_counted_where_there_are_several_groups():
    allowed = {"w": torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])}
    assert rooms(ROWS, ROWS.pools(W), W, allowed)["w"].tolist() == [4, 0, 2]
    assert rooms(ROWS, ROWS.pools(W), W, None) == {} == rooms(WHOLE, WHOLE.pools(W), W, allowed)
    nm = Competition(sf.patterns.nm(2, 4), sf.budgets.uniform())
    assert rooms(nm, nm.pools(W), W, allowed) == {}


@pytest.mark.parametrize("count", range(16))
def test_a_count_is_spread_over_the_room(count):
    room = torch.tensor([3, 0, 5, 1, 4])
    given = spread(count, 5, room)
    assert int(given.sum()) == min(count, 13) and bool((given <= room).all())
    full = given == room
    assert int(given[~full].max() if (~full).any() else 0) - int(given[~full].min() if (~full).any() else 0) <= 1
    assert torch.equal(spread(count, 5, torch.full((5,), 99)), torch.as_tensor(spread(count, 5)).expand(5))
    assert torch.equal(torch.vmap(lambda n: spread(n, 5, room))(torch.tensor([count]))[0], given)


def test_no_group_gets_more_than_a_group_with_room_left():
    given = spread(9, 4, torch.tensor([1, 9, 2, 9]))
    assert given.tolist() == [1, 3, 2, 3]
