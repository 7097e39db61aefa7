"""A search for numbers, one or two at once, as long as what comes of them is better."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol


class Tried(NamedTuple):
    """What came of a choice of numbers: more is better."""

    score: tuple[float, float]
    done: bool
    why: str = ""  # not
    path: str = ""  # of the module that is to blame


class Open(Protocol):
    """A number to choose."""

    choice: int

    @property
    def options(self) -> Sequence[Any]: ...

    def take(self, choice: int) -> None: ...


def search(
    order: Callable[[Tried], Sequence[Open]], run: Callable[[], Tried], tries: int
) -> Tried:
    """Change one number, or two at once, as long as that is better; the best that was
    found in so many runs.
    """
    best = run()
    left = iter(range(tries))
    while not best.done:
        for change in _changes(order(best)):
            if next(left, None) is None:
                return best
            before = [(number, number.choice) for number, _ in change]
            for number, choice in change:
                number.take(choice)
            now = run()
            if now.done or now.score > best.score:
                best = now
                break
            for number, choice in before:
                number.take(choice)
        else:
            return best
    return best


def _changes(numbers: Sequence[Open]) -> Iterator[list[tuple[Open, int]]]:
    single = [
        (number, choice)
        for number in numbers
        for choice in range(len(number.options))
        if choice != number.choice
    ]
    yield from ([one] for one in single)
    for one, other in itertools.combinations(single, 2):
        if one[0] is not other[0]:
            yield [one, other]
