"""Many states as one, for `torch.vmap`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn.core.checks import aligned, check_int
from sparsefn.core.state import State
from sparsefn.core.tree import Tree, check_like, flatten, leaves_like, leaves_of

__all__ = ["freeze", "member", "size", "stack", "summary", "unstack"]
__dir__ = __all__.copy


def stack(states: Sequence[Tree]) -> Tree:
    """One tree whose leaves hold the members' leaves along a new first dimension.

    >>> states = [sf.dense().init({"w": torch.full((2,), float(i))}) for i in range(3)]
    >>> stacked = sf.ensemble.stack(states)
    >>> stacked.params["w"].shape, stacked.masks["w"].shape
    (torch.Size([3, 2]), torch.Size([3]))
    >>> torch.vmap(sf.effective)(stacked)["w"].shape
    torch.Size([3, 2])

    Args:
        states: States, or any trees of tensors, all with the structure, shapes and
            dtypes of the first.

    Returns:
        A tree like one member. A 0-d mask becomes (B,), so masks of a stack are applied
        inside `vmap`.

    Raises:
        ValueError: There is no member, or a member has another structure or shape than
            member 0. The text names the member and the path.
        TypeError: `states` is no sequence, a member has another dtype, or a leaf is not
            a tensor.
    """
    if hasattr(states, "_fields") or not isinstance(states, Sequence):
        raise TypeError(
            f"expected a sequence of states, got one {type(states).__name__}"
        )
    if not states:
        raise ValueError("expected one state or more to stack, got none")
    for i, state in enumerate(states):
        check_like(f"member {i}", state, states[0])
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *states)


def size(state: Tree) -> int:
    """How many members a stack has.

    >>> sf.ensemble.size({"w": torch.zeros(3, 2), "b": torch.zeros(3)})
    3

    Args:
        state: A stack: a tree of tensors with the members along their first dimension.

    Returns:
        The size of the first dimension.

    Raises:
        ValueError: Leaves disagree about their first dimension or have none, or there
            are no leaves.
        TypeError: A leaf is not a tensor.
    """
    leaves = flatten(state)[0]
    if not leaves:
        raise ValueError("expected a stack of states, got a tree without leaves")
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected a stack of tensors, got {type(leaf).__name__} at {path!r}"
            )
        if not leaf.ndim:
            raise ValueError(f"expected a stack, but the leaf at {path!r} is 0-d")
    (first, model), *others = leaves.items()
    for path, leaf in others:
        if len(leaf) != len(model):
            raise ValueError(
                f"expected {len(model)} members at {path!r} as at {first!r}, got "
                f"{len(leaf)}"
            )
    return len(model)


def member(state: Tree, i: int) -> Tree:
    """One member of a stack; a negative index counts from the end.

    >>> sf.ensemble.member({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, -1)
    {'w': tensor([3., 4.])}

    Args:
        state: A stack.
        i: Index of the member, from -size to size - 1.

    Returns:
        A tree that shares no memory with the stack.

    Raises:
        IndexError: The index is out of range.
        TypeError: The index is not an int, or as in `size`.
        ValueError: As in `size`.
    """
    n = size(state)
    check_int("", "the index of a member", i)
    if not -n <= i < n:
        raise IndexError(f"expected a member from {-n} to {n - 1}, got {i}")
    return optree.tree_map(lambda leaf: leaf[i].clone(), state)


def unstack(state: Tree) -> list[Tree]:
    """The members of a stack: `unstack(stack(states))` gives the states back.

    >>> sf.ensemble.unstack({"w": torch.tensor([[1.0], [2.0]])})
    [{'w': tensor([1.])}, {'w': tensor([2.])}]

    Args:
        state: A stack.

    Returns:
        A list of trees that share no memory with the stack.

    Raises:
        ValueError: As in `size`.
        TypeError: As in `size`.
    """
    return [member(state, i) for i in range(size(state))]


def freeze(old: Tree, new: Tree, frozen: Tensor) -> Tree:
    """`new`, except that frozen members keep their `old` leaves.

    >>> old, new = {"w": torch.zeros(3, 2)}, {"w": torch.ones(3, 2)}
    >>> sf.ensemble.freeze(old, new, torch.tensor([True, False, False]))["w"].tolist()
    [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]

    Args:
        old: A stack of states, or of other trees of tensors.
        new: A stack with the structure, shapes and dtypes of `old`.
        frozen: Which members keep their `old` leaves: a bool tensor of shape (B,), or
            0-d inside `vmap`, or (A, B) for a stack of stacks. Its dimensions are the
            first ones of every leaf.

    Returns:
        A stack like `new`. Leaves are selected and not computed with, so a frozen
        member keeps every bit: weights, masks, scores, key and optimizer.

    Raises:
        TypeError: `frozen` is not a bool tensor, or leaves have another dtype.
        ValueError: Structures or shapes differ. The text names the path.

    To keep the best state of each member, freeze the members that have not improved:

    >>> best, lowest = {"w": torch.tensor([[1.0], [2.0]])}, torch.tensor([0.5, 0.3])
    >>> now, losses = {"w": torch.tensor([[5.0], [6.0]])}, torch.tensor([0.4, 0.9])
    >>> best, lowest = (
    ...     sf.ensemble.freeze(best, now, losses >= lowest),
    ...     torch.minimum(lowest, losses),
    ... )
    >>> best["w"].tolist(), lowest
    ([[5.0], [2.0]], tensor([0.4000, 0.3000]))
    """
    check_like("the new states", new, old)
    if not isinstance(frozen, Tensor) or frozen.dtype != torch.bool:
        got = frozen.dtype if isinstance(frozen, Tensor) else type(frozen).__name__
        raise TypeError(f"expected frozen to be a bool tensor, got {got}")
    for path, leaf in flatten(old)[0].items():
        if leaf.shape[: frozen.ndim] != frozen.shape:
            raise ValueError(
                f"expected a stack of shape {(*frozen.shape, ...)} at {path!r}, got "
                f"{tuple(leaf.shape)}"
            )

    def select(before: Tensor, after: Tensor) -> Tensor:
        if before is after:
            return after
        return torch.where(
            frozen.reshape((*frozen.shape, *(1,) * (after.ndim - frozen.ndim))),
            before,
            after,
        )

    return optree.tree_map(select, old, new)


def check_one_state(state: State) -> None:
    """Raise ValueError for a stack of states where one state is wanted.

    A stack is recognized by masks that were 0-d and by keys; one without either passes.
    """
    if isinstance(state.key, Tensor) and state.key.ndim > 1:
        batches = {state.key.shape[:-1]}
    else:
        batches = set()
    for leaf, mask in zip(
        leaves_of(state.params), leaves_of(state.masks), strict=False
    ):
        if (
            isinstance(mask, Tensor)
            and mask.ndim == 1 < leaf.ndim
            and len(mask) == len(leaf)
        ):
            batches.add(mask.shape)
    if len(batches) == 1:
        ((members, *_),) = batches
        raise ValueError(
            f"expected one state, got a stack of {members}: sf.ensemble.summary "
            "counts the members of a stack, and sf.ensemble.member(states, i) gives "
            "one"
        )


class Row(NamedTuple):
    """Kept weights of one leaf, or of several together, for each two members.

    >>> row = sf.ensemble.Row("w", (2,), total=2, shared=torch.tensor([[1, 0], [0, 2]]))
    >>> row.kept, row.sparsity, row.mean
    ((1, 2), (0.5, 0.0), 0.25)

    Attributes:
        path: Dotted path of the leaf, or what the row sums up.
        shape: Shape of the leaf in one member.
        total: Entries of the leaf in one member.
        shared: How many weights members i and j both keep, int64 of shape
            (members, members).
    """

    path: str
    shape: tuple[int, ...]
    total: int
    shared: Tensor

    @property
    def kept(self) -> tuple[int, ...]:
        """How many weights each member keeps."""
        return tuple(self.shared.diagonal().tolist())

    @property
    def sparsity(self) -> tuple[float, ...]:
        """The fraction of zeros of each member."""
        return tuple((self.total - kept) / max(self.total, 1) for kept in self.kept)

    @property
    def mean(self) -> float:
        """The mean sparsity over members, from exact counts: rounded once."""
        cells = self.total * len(self.kept)
        return (cells - sum(self.kept)) / max(cells, 1)

    @property
    def overlap(self) -> Tensor:
        """Pairwise overlap, (B, B) float64: weights kept by both members over weights
        kept by either, 1.0 if none.
        """
        kept = self.shared.diagonal()
        either = kept[:, None] + kept - self.shared
        return torch.where(either > 0, self.shared.double() / either.clamp(min=1), 1.0)


class Summary(NamedTuple):
    """The result of `summary`; `str()` of it is a table.

    >>> members = [sf.static(s).init({"w": torch.ones(2, 4)}) for s in (0.5, 0.75)]
    >>> sf.ensemble.summary(sf.ensemble.stack(members)).sparsified.kept
    (4, 2)

    Attributes:
        rows: A `Row` for every leaf.
        total: The row of all leaves together.
        sparsified: The row of all leaves that have masks.
        dense: Paths of the leaves that have none.
    """

    rows: tuple[Row, ...]
    total: Row
    sparsified: Row
    dense: tuple[str, ...]

    @property
    def overlap(self) -> Tensor:
        """Pairwise overlap of the masks, (B, B) float64."""
        return self.sparsified.overlap

    def __str__(self) -> str:
        """Align the rows, with the totals below."""
        lines = [("path", "shape", "total", "mean", "min", "max", "overlap")]
        for row in self.rows:
            if row.path in self.dense:
                cells = ("dense", "", "", "")
            else:
                cells = _cells(row)
            lines.append((row.path, str(row.shape), f"{row.total:,}", *cells))
        for row in (self.sparsified, self.total):
            lines.append((row.path, "", f"{row.total:,}", *_cells(row)))
        return aligned(lines, left=2)


def _cells(row: Row) -> tuple[str, str, str, str]:
    n = len(row.kept)
    levels = row.sparsity
    pairs = n * (n - 1) / 2
    overlap = f"{row.overlap.triu(1).sum().item() / pairs:.4f}" if pairs else "-"
    return f"{row.mean:.4f}", f"{min(levels):.4f}", f"{max(levels):.4f}", overlap


def summary(states: State) -> Summary:
    """Sparsity over the members of a stack, and how much their masks overlap.

    >>> def init(key, sparsity):
    ...     return sf.static(sparsity, key=key).init(
    ...         {"0.weight": torch.ones(20, 50), "0.bias": torch.ones(20)}
    ...     )
    >>> keys = sf.random.split(sf.random.key(0), 3)
    >>> states = torch.vmap(init)(
    ...     keys, torch.tensor([0.5, 0.5, 0.9], dtype=torch.float64)
    ... )
    >>> summary = sf.ensemble.summary(states)
    >>> print(summary)
    path        shape     total    mean     min     max  overlap
    0.bias      (20,)        20   dense
    0.weight    (20, 50)  1,000  0.6333  0.5000  0.9000   0.1681
    sparsified            1,000  0.6333  0.5000  0.9000   0.1681
    all                   1,020  0.6209  0.4902  0.8824   0.1952
    >>> summary.overlap
    tensor([[1.0000, 0.3106, 0.0969],
            [0.3106, 1.0000, 0.0969],
            [0.0969, 0.0969, 1.0000]], dtype=torch.float64)

    Args:
        states: A stack of states. For a stack of stacks, ask for one stack at a time.

    Returns:
        A `Summary`, whose `str()` is the table. Counts come from the masks, exact to
        the last weight.

    Raises:
        ValueError: Masks do not fit params, there is no member, or as in `size`.
        TypeError: A mask is not bool, or as in `size`.

    The overlap of two members is the number of weights that both keep over the number
    that at least one keeps (Jaccard), as in `sf.report.changed`; the table shows its
    mean over pairs of members. Two random masks that keep shares p and q have p * q /
    (p + q - p * q). It is computed by a product of (B, weights) matrices: no (B, B,
    weights) tensor is made.
    """
    members = size(states)
    if not members:
        raise ValueError("expected a stack of one member or more, got none")
    leaves = flatten(states.params)[0]
    rows = []
    dense = []
    for (path, leaf), mask in zip(
        leaves.items(), leaves_like(states.masks, states.params), strict=True
    ):
        shape = tuple(leaf.shape[1:])
        total = math.prod(shape)
        if mask.dtype != torch.bool:
            raise TypeError(f"expected a bool mask at {path!r}, got {mask.dtype}")
        if tuple(mask.shape) == (members,):
            dense.append(path)
            shared = torch.full((members, members), total, device="cpu")
        elif mask.shape == leaf.shape:
            shared = _shared(mask.reshape(members, total))
        else:
            wanted = f"{tuple(leaf.shape)} or {(members,)}"
            raise ValueError(
                f"expected a mask of shape {wanted} at {path!r}, got "
                f"{tuple(mask.shape)}"
            )
        rows.append(Row(path, shape, total, shared))
    sparsified = _sum(
        "sparsified", [row for row in rows if row.path not in dense], members
    )
    return Summary(tuple(rows), _sum("all", rows, members), sparsified, tuple(dense))


def _shared(masks: Tensor) -> Tensor:
    # Sums of zeros and ones are exact in float64 below 2^53, in any order; parts bound
    # the memory.
    counts = torch.zeros(len(masks), len(masks), dtype=torch.int64, device="cpu")
    for first in range(0, masks.shape[1], 1 << 16):
        wide = masks[:, first : first + (1 << 16)].double()
        counts += (wide @ wide.T).to("cpu", torch.int64)
    return counts


def _sum(path: str, rows: Sequence[Row], members: int) -> Row:
    shared = sum(
        (row.shared for row in rows),
        torch.zeros(members, members, dtype=torch.int64, device="cpu"),
    )
    return Row(path, (), sum(row.total for row in rows), shared)
