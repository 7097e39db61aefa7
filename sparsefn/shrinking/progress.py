"""What a long call tells."""

from __future__ import annotations

import sys
import time

AFTER = 10.0  # seconds in which a call says nothing


class Progress:
    """Says on stderr what a call does, once it has taken more than AFTER seconds.

    >>> tell = Progress("shrink")
    >>> tell("traces the model")
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = time.monotonic()

    def __call__(self, doing: str) -> None:
        seconds = time.monotonic() - self.start
        if seconds > AFTER:
            print(f"{self.name}: {seconds:.0f} s so far, {doing}", file=sys.stderr, flush=True)
