"""The tensors of a competition in memory, read in blocks that stay in a core's cache, on one thread or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.memory import BLOCK, Array, See, each, visible

_THREADED = 1 << 22  # from here on one competition has several threads

Out = TypeVar("Out")


class Part(NamedTuple):
    """One tensor of a competition: scores, who may win (all without `allow`), who may not, where the mask goes.

    `wide` is float32 or float64. A 16-bit tensor comes as `narrow` and is widened block by block.
    """

    wide: Array | None
    narrow: Tensor | None
    allow: Array | None
    deny: Array | None
    out: Array


def part(scores: Tensor, allow: Tensor | None = None, deny: Tensor | None = None, see: See = visible) -> Part | None:
    """A part of a competition from tensors of one shape, with room for its mask; None where their memory is hidden.

    >>> from sparsefn.engine.selection import entries
    >>> from sparsefn.engine.selection import bracket
    >>> part = entries.part(torch.tensor([1.0, 2.0]))
    >>> bracket.select([part], 1)
    >>> part.out
    array([False,  True])
    """
    values, allowed, denied = (None if x is None else see(x) for x in (scores, allow, deny))
    if values is None or (allowed is None) != (allow is None) or (denied is None) != (deny is None):
        return None
    narrow = scores.dtype in (torch.float16, torch.bfloat16)
    out: Array = np.empty(values.shape, np.bool_)
    return Part(None if narrow else values, scores.detach() if narrow else None, allowed, denied, out)


def flat(at: Part) -> Part:
    """A part with one dimension.

    >>> from sparsefn.engine.selection import entries
    >>> entries.flat(entries.part(torch.ones(2, 2))).out.shape
    (4,)
    """
    return Part(*(None if x is None else x.reshape(-1) for x in at))  # type: ignore[arg-type]


def cut(at: Part, where: slice | int) -> Part:
    """Some of a part: its mask is written where the whole one's is.

    >>> from sparsefn.engine.selection import entries
    >>> entries.cut(entries.part(torch.ones(5)), slice(None, None, 2)).out.shape
    (3,)
    """
    return Part(*(None if x is None else x[where] for x in at))  # type: ignore[arg-type]


def bar(at: Part, start: int, stop: int, flags: Array) -> None:
    """Unset the flags of those in a range that may not win.

    >>> import numpy as np
    >>> from sparsefn.engine.selection import entries
    >>> flags = np.array([True, True])
    >>> entries.bar(entries.part(torch.ones(3), deny=torch.tensor([False, True, False])), 1, 3, flags)
    >>> flags
    array([False,  True])
    """
    if at.allow is not None:
        np.bitwise_and(flags, at.allow[start:stop], out=flags)
    if at.deny is not None:
        np.greater(flags, at.deny[start:stop], out=flags)


def open_count(at: Part) -> int:
    """How many may win; what `out` held is lost.

    >>> from sparsefn.engine.selection import entries
    >>> entries.open_count(entries.part(torch.ones(2), torch.tensor([True, False])))
    1
    """
    if at.allow is None:
        return at.out.size - (0 if at.deny is None else int(np.count_nonzero(at.deny)))
    if at.deny is None:
        return int(np.count_nonzero(at.allow))
    return int(np.count_nonzero(np.greater(at.allow, at.deny, out=at.out)))


class Room:
    """Room for one block of scores and flags, used again for every block.

    >>> from sparsefn.engine.selection import entries
    >>> room = entries.Room(2, absolute=True, double=False)
    >>> [scores.tolist() for _, _, scores, _, _ in room.blocks(entries.part(torch.tensor([-1.0, 2.0])))]
    [[1.0, 2.0]]
    """

    def __init__(self, size: int, absolute: bool, double: bool) -> None:
        self.scores: Array = np.empty(size, np.float64 if double else np.float32)
        self.flags: Array = np.empty(size, np.bool_)
        self.absolute = absolute

    def blocks(self, at: Part) -> Iterator[tuple[int, int, Array, Array, Array]]:
        """Start, end, scores, mask and flags to be written, of each block of a part."""
        for start in range(0, at.out.size, BLOCK):
            stop = min(start + BLOCK, at.out.size)
            scores = self.read(at, slice(start, stop), self.scores[: stop - start])
            yield start, stop, scores, at.out[start:stop], self.flags[: stop - start]

    def read(self, at: Part, where: slice, room: Array) -> Array:
        """Some scores of a part; in `room` unless they lie in memory as they are wanted."""
        if at.narrow is not None:
            torch.from_numpy(room).copy_(at.narrow[where])
            return np.abs(room, out=room) if self.absolute else room
        assert at.wide is not None
        if self.absolute:
            return np.abs(at.wide[where], out=room)
        if at.wide.dtype != room.dtype:  # a float32 part beside a float64 one
            room[...] = at.wide[where]
            return room
        return at.wide[where]


class Passes(NamedTuple):
    """The parts of a competition in their order, dealt out in groups of which each may have a thread of its own.

    >>> from sparsefn.engine.selection import entries
    >>> passes = entries.passes_over([entries.part(torch.ones(2)), entries.part(torch.ones(3))], False)
    >>> passes.run(lambda part, room: part.out.size)
    [2, 3]
    """

    groups: list[list[Part]]
    absolute: bool
    double: bool
    size: int

    @property
    def parts(self) -> list[Part]:
        """The parts of all groups in their order."""
        return [at for group in self.groups for at in group]

    def run(self, step: Callable[[Part, Room], Out]) -> list[Out]:
        """What a step gives for each part, in their order."""

        def group(parts: list[Part]) -> list[Out]:
            room = self.room(parts)
            return [step(at, room) for at in parts]

        return [out for outs in each(group, self.groups, self.size) for out in outs]

    def room(self, parts: list[Part]) -> Room:
        """Room for the blocks of some parts."""
        return Room(min(BLOCK, max((at.out.size for at in parts), default=0)), self.absolute, self.double)


def passes_over(parts: Sequence[Part], absolute: bool) -> Passes:
    """Flat parts dealt out to the threads that torch may use; those of a few million scores to one.

    >>> from sparsefn.engine.selection import entries
    >>> len(entries.passes_over([entries.part(torch.ones(2))], False).groups)
    1
    """
    size = sum(at.out.size for at in parts)
    share = max(1, -(-size // (torch.get_num_threads() if size >= _THREADED else 1)))
    groups: list[list[Part]] = [[]]
    left = share
    for at in parts:
        first = 0
        while first < at.out.size:
            if not left:
                groups.append([])
                left = share
            stop = min(at.out.size, first + left)
            groups[-1].append(cut(at, slice(first, stop)))
            left -= stop - first
            first = stop
    double = any(at.wide is not None and at.wide.dtype == np.float64 for at in parts)
    return Passes(groups, absolute, double, size)
