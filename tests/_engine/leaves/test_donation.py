"""Tensors that were given away cannot be used, and only memory that nobody else reads
is given.
"""

import copy

import pytest
import torch

from sparsefn._engine.leaves import blockwise, donation


def emptied():
    x = torch.ones(3, 4)
    donation.empty([x])
    return x


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape,
        lambda x: x.dtype,
        lambda x: x + 1,
        lambda x: torch.ones(1) + x,
        lambda x: torch.stack([torch.ones(3, 4), x]),
        lambda x: x[0],
        lambda x: x.numpy(),
        lambda x: float(x),
        lambda x: copy.deepcopy(x),
        lambda x: x.requires_grad_(),
        lambda x: torch.nn.functional.linear(torch.ones(1, 4), weight=x),
        lambda x: torch.vmap(torch.sin)(x),
    ],
)
def test_every_use_raises(use):
    expected = (
        "expected a tensor, got <given away: float32 of shape (3, 4)>: a donated "
        "algorithm has updated the state that it belongs to; go on with the state "
        "that update returned, or copy a state before: optree.tree_map(torch.clone, "
        "state)"
    )
    with pytest.raises(ValueError) as error:
        use(emptied())
    assert str(error.value) == expected


def test_another_name_of_the_memory_stays():
    x = torch.ones(3)
    alias = x.detach()
    donation.empty([x])
    assert torch.equal(alias, torch.ones(3))
    assert repr(x) == "<given away: float32 of shape (3,)>"


def test_inference_tensors_are_emptied_too():
    with torch.inference_mode():
        x = torch.ones(3)
    donation.empty([x])
    with pytest.raises(ValueError, match="given away"):
        x.sum()


def test_a_subclass_is_left_alone():
    x = torch.nn.Parameter(torch.ones(3))
    donation.empty([x])
    assert torch.equal(x, torch.ones(3))


def test_memory_is_alone():
    a, b, c = torch.ones(2, 3), torch.ones(6), torch.ones(4)
    assert donation.unshared_memory([a, b, b.view(2, 3), c[1:], a.t()], []) == []
    assert [x is a for x in donation.unshared_memory([a, b], [b[:1]])] == [True]


def test_memory_is_taken_once_and_only_inside():
    for inside in (True, False):
        x = torch.ones(8192)
        at, rows = x.data_ptr(), []
        with donation.donating([x] if inside else []):
            flat = blockwise.flat_memory(x)
            first, second = blockwise.append_row(rows, flat, [x], 2, overwrites=(0, 0))
        assert (first.data_ptr() == at) is (type(x) is donation.Emptied) is inside
        assert second.data_ptr() != at and second.shape == (8192,)
    assert donation.claim(torch.ones(1)) is None


def test_only_memory_of_ones_own_is_offered():
    own, shared = torch.ones(8192), torch.ones(8192)
    with donation.donating([]) as left:
        donation.donate([own, shared], others=[shared.view(2, -1)])
        assert [x is own for x in left.values()] == [True]
    donation.donate([own], others=[])
    assert donation.claim(own) is None


def test_what_an_update_made_itself_is_told_from_what_it_was_given():
    own, given = torch.ones(8192), torch.ones(8192)
    assert not donation.saves_memory() and not donation.is_donated(own)
    with donation.donating([given]):
        donation.donate([own], others=[given])
        assert (
            donation.saves_memory()
            and donation.is_donated(own)
            and not donation.is_donated(given)
        )
        with donation.donating([]):
            assert not donation.is_donated(own)
        donation.claim(own)
        assert not donation.is_donated(own)
    assert not donation.saves_memory()
