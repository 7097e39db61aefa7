"""What a long call tells."""

from __future__ import annotations

import sys
import time

EVERY = 10.0  # seconds


class Progress:
    """Says on stderr what a call does, at most one line in EVERY seconds, and none in
    the first ones.

    >>> tell = Progress("shrink")
    >>> tell("traces the model")
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = self.last = time.monotonic()

    def __call__(self, doing: str) -> None:
        now = time.monotonic()
        if now - self.last > EVERY:
            self.last = now
            print(
                f"{self.name}: {now - self.start:.0f} s so far, {doing}",
                file=sys.stderr,
                flush=True,
            )
