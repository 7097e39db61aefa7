"""How far a run is: a bar on a terminal, a line every few seconds in a file."""

import sys
from typing import Any

from tqdm import tqdm


class Lines(tqdm):
    """Progress in lines of their own, for a log that would show every redrawn bar."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print a line where tqdm would draw its bar again."""
        del msg, pos
        print(self, file=self.fp, flush=True)


def progress(total: int, description: str, seconds: float = 5.0) -> Any:
    """A tqdm bar over `total` steps; where stderr is no terminal, a line about every
    `seconds`.
    """
    options = {"total": total, "desc": description, "unit": "step", "smoothing": 0.05}
    if sys.stderr.isatty():
        return tqdm(**options)
    return Lines(**options, mininterval=seconds, ncols=100, file=sys.stderr)
