"""Stacks of states: there and back, under vmap, and what is refused."""

import pytest
import torch

from sparsefn import ensemble as E
from sparsefn import optimizers as O
from sparsefn.checkpoint import tree_equal
from sparsefn.types import State, effective


def make_state(seed):
    generator = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(3, 2, generator=generator), "b": [torch.randn(3, generator=generator)]}
    masks = {"w": params["w"] > 0, "b": [torch.tensor(True)]}
    return State(params, masks, key=torch.tensor([seed, seed]), opt=O.adam(0.1).init(params))


def test_round_trip():
    states = [make_state(seed) for seed in range(4)]
    stacked = E.stack(states)
    assert type(stacked) is State
    assert stacked.params["w"].shape == (4, 3, 2)
    assert stacked.masks["b"][0].shape == (4,)
    assert stacked.opt.count.shape == (4,)
    assert stacked.scores == ()
    assert E.size(stacked) == 4
    assert all(map(tree_equal, E.unstack(stacked), states))
    assert all(tree_equal(E.member(stacked, i), states[i]) for i in range(-4, 4))
    assert tree_equal(E.stack(E.unstack(stacked)), stacked)


def test_nothing_is_mutated_or_shared():
    states = [make_state(seed) for seed in range(2)]
    stacked = E.stack(states)
    for tree in (E.member(stacked, 0), *E.unstack(stacked)):
        tree.params["w"].zero_()
    assert tree_equal(stacked, E.stack([make_state(seed) for seed in range(2)]))
    stacked.params["w"].zero_()
    assert tree_equal(states, [make_state(seed) for seed in range(2)])


def test_masks_of_a_stack_are_applied_inside_vmap():
    states = [make_state(seed) for seed in range(3)]
    batched = torch.vmap(effective)(E.stack(states))
    assert all(tree_equal(E.member(batched, i), effective(states[i])) for i in range(3))


def test_a_stack_of_stacks_and_any_tree():
    stack = E.stack([E.stack([torch.tensor(i * 10 + j) for j in range(2)]) for i in range(3)])
    assert stack.tolist() == [[0, 1], [10, 11], [20, 21]]
    assert E.stack([(torch.ones(1),)])[0].shape == (1, 1)
    assert (
        E.stack(({"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.ones(1)}))["a"].shape[0] == 2
    )


def test_inside_compile():
    states = [make_state(seed) for seed in range(2)]
    compiled = torch.compile(lambda states: E.member(E.stack(states), 1), fullgraph=True, backend="eager")
    assert tree_equal(compiled(states), states[1])


def test_stack_refuses():
    state = make_state(0)
    with pytest.raises(ValueError, match="expected one state or more to stack, got none"):
        E.stack([])
    with pytest.raises(TypeError, match="expected a sequence of states, got one State"):
        E.stack(state)
    with pytest.raises(TypeError, match="expected a sequence of states, got one dict"):
        E.stack({"w": torch.ones(1)})
    with pytest.raises(ValueError, match=r"expected member 2 .* but there is no leaf at 'params.b.0'"):
        E.stack([state, state, state._replace(params={"w": state.params["w"], "b": []})])
    with pytest.raises(ValueError, match=r"expected member 1 of shape \(3, 2\) at 'masks.w', got \(\)"):
        E.stack([state, state._replace(masks={"w": torch.tensor(True), "b": [torch.tensor(True)]})])
    with pytest.raises(TypeError, match=r"expected member 1 of dtype torch.int64 at 'key', got torch.int32"):
        E.stack([state, state._replace(key=state.key.int())])
    with pytest.raises(TypeError, match="expected member 0 to be tensors, got float at 'a'"):
        E.stack([{"a": 1.0}])


def test_members_out_of_range_are_refused():
    stacked = E.stack([make_state(0), make_state(1)])
    for i in (2, -3):
        with pytest.raises(IndexError, match=f"expected a member from -2 to 1, got {i}"):
            E.member(stacked, i)
    for i in (1.0, True, torch.tensor(1)):
        with pytest.raises(TypeError, match="expected the index of a member to be an int, got"):
            E.member(stacked, i)


@pytest.mark.parametrize("use", [E.size, E.unstack, lambda tree: E.member(tree, 0)])
def test_what_is_no_stack_is_refused(use):
    with pytest.raises(ValueError, match=r"expected a stack, but the leaf at 'masks.b.0' is 0-d"):
        use(make_state(0))
    with pytest.raises(ValueError, match="expected a stack of states, got a tree without leaves"):
        use({})
    with pytest.raises(ValueError, match="expected 2 members at 'b' as at 'a', got 3"):
        use({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(TypeError, match="expected a stack of tensors, got int at 'a'"):
        use({"a": 1})
