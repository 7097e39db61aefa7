import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.memory import Scores
from sparsefn.algorithms.unit_table import unit_table
from sparsefn.masks.budgets.distributions import spread

ROWS = Competition(sf.patterns.row_balanced(), sf.budgets.uniform())
WHOLE = Competition(sf.patterns.unstructured(), sf.budgets.uniform())
W = {"w": torch.arange(12.0).reshape(3, 4)}


def test_a_sparsity_is_a_goal_and_so_is_a_count():
    above = sf.counts.above(3.0)
    assert WHOLE.goal(None) is None and WHOLE.goal(above) is above
    known = unit_table(WHOLE, W, goal=WHOLE.goal(0.5))
    told = unit_table(WHOLE, W, goal=above)
    assert (
        known.wanted(Scores(W), known.free) == known.known == [6] and told.known is None
    )
    assert [n.tolist() for n in told.wanted(Scores(W), told.free)] == [[8]]


def test_counts_of_active_units():
    units = unit_table(ROWS, W)
    active = [torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])]
    for goal in (sf.counts.above(1.5), sf.counts.below(1.5)):
        assert [n.tolist() for n in units.counted(goal, Scores(W), active)] == [
            [2, 0, 2]
        ]


def test_a_group_without_room_leaves_its_part_to_the_others():
    allowed = {"w": torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])}
    assert unit_table(ROWS, W, allowed=allowed).targets(0.5)[0].tolist() == [4, 0, 2]
    assert unit_table(ROWS, W).targets(0.5) == [2]
    assert unit_table(WHOLE, W, allowed=allowed).targets(0.5) == [6]
    nm = Competition(sf.patterns.nm(2, 4), sf.budgets.uniform())
    assert unit_table(nm, W, allowed=allowed).targets(None) == [2]


@pytest.mark.parametrize("count", range(16))
def test_a_count_is_spread_over_the_room(count):
    room = torch.tensor([3, 0, 5, 1, 4])
    given = spread(count, 5, room)
    assert int(given.sum()) == min(count, 13) and bool((given <= room).all())
    full = given == room
    assert (
        int(given[~full].max() if (~full).any() else 0)
        - int(given[~full].min() if (~full).any() else 0)
        <= 1
    )
    assert torch.equal(
        spread(count, 5, torch.full((5,), 99)),
        torch.as_tensor(spread(count, 5)).expand(5),
    )
    assert torch.equal(
        torch.vmap(lambda n: spread(n, 5, room))(torch.tensor([count]))[0], given
    )


def test_no_group_gets_more_than_a_group_with_room_left():
    given = spread(9, 4, torch.tensor([1, 9, 2, 9]))
    assert given.tolist() == [1, 3, 2, 3]
