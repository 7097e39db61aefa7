"""Many states as one, for `torch.vmap`."""

from __future__ import annotations

from collections.abc import Sequence

import optree
import torch
from torch import Tensor

from sparsefn.tree import Tree, check_like, flatten


def stack(states: Sequence[Tree]) -> Tree:
    """One tree whose leaves hold those of all members along a new first dimension.

    >>> states = [sf.dense().init({"w": torch.full((2,), float(i))}) for i in range(3)]
    >>> stacked = sf.ensemble.stack(states)
    >>> stacked.params["w"].shape, stacked.masks["w"].shape
    (torch.Size([3, 2]), torch.Size([3]))
    >>> torch.vmap(sf.effective)(stacked)["w"].shape
    torch.Size([3, 2])

    A 0-d mask becomes (B,), so masks of a stack are applied inside `vmap`. Any trees of tensors
    may be stacked. Raises ValueError for no member, or one of another structure or shape than
    member 0, TypeError for another dtype or a leaf that is no tensor, naming the member and the path.
    """
    if hasattr(states, "_fields") or not isinstance(states, Sequence):
        raise TypeError(f"expected a sequence of states, got one {type(states).__name__}")
    if not states:
        raise ValueError("expected one state or more to stack, got none")
    for i, state in enumerate(states):
        check_like(f"member {i}", state, states[0])
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *states)


def size(state: Tree) -> int:
    """How many members a stack has.

    >>> sf.ensemble.size({"w": torch.zeros(3, 2), "b": torch.zeros(3)})
    3

    Raises ValueError where leaves disagree about their first dimension or have none.
    """
    leaves = flatten(state)[0]
    if not leaves:
        raise ValueError("expected a stack of states, got a tree without leaves")
    sizes = {path: _first_dimension(path, leaf) for path, leaf in leaves.items()}
    first = next(iter(sizes))
    for path, length in sizes.items():
        if length != sizes[first]:
            raise ValueError(f"expected {sizes[first]} members at {path!r} as at {first!r}, got {length}")
    return sizes[first]


def _first_dimension(path: str, leaf: Tensor) -> int:
    if not isinstance(leaf, Tensor):
        raise TypeError(f"expected a stack of tensors, got {type(leaf).__name__} at {path!r}")
    if not leaf.ndim:
        raise ValueError(f"expected a stack, but the leaf at {path!r} is 0-d")
    return leaf.shape[0]


def member(state: Tree, i: int) -> Tree:
    """One member of a stack; a negative index counts from the end.

    >>> sf.ensemble.member({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, -1)
    {'w': tensor([3., 4.])}

    It shares no memory with the stack. Raises IndexError for an index out of range, TypeError for one
    that is no int, and as `size` does.
    """
    n = size(state)
    if isinstance(i, bool) or not isinstance(i, int):
        raise TypeError(f"expected the index of a member to be an int, got {type(i).__name__}")
    if not -n <= i < n:
        raise IndexError(f"expected a member from {-n} to {n - 1}, got {i}")
    return optree.tree_map(lambda leaf: leaf[i].clone(), state)


def unstack(state: Tree) -> list[Tree]:
    """The members of a stack: `unstack(stack(states))` gives the states back.

    >>> sf.ensemble.unstack({"w": torch.tensor([[1.0], [2.0]])})
    [{'w': tensor([1.])}, {'w': tensor([2.])}]

    Raises as `size` does.
    """
    return [member(state, i) for i in range(size(state))]
