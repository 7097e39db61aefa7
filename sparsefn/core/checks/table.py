"""Text in aligned columns, and the order of its lines."""

from __future__ import annotations

import re
from collections.abc import Sequence


def aligned(lines: Sequence[tuple[str, ...]], left: int) -> str:
    """Rows of cells as a table whose first `left` columns hold text, and the other
    columns numbers.

    >>> print(aligned([("path", "kept"), ("0.bias", "8"), ("w", "16")], left=1))
    path    kept
    0.bias     8
    w         16
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for line in lines:
        cells = []
        for i, (cell, w) in enumerate(zip(line, widths, strict=True)):
            if i < left:
                cells.append(cell.ljust(w))
            else:
                cells.append(cell.rjust(w))
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def natural(path: str) -> list[str | int]:
    """The key by which paths are sorted, with numbers by their value.

    >>> sorted(["10.w", "2.w", "2.b"], key=natural)
    ['2.b', '2.w', '10.w']
    """
    return [
        int(part) if i % 2 else part
        for i, part in enumerate(re.split(r"([0-9]+)", path))
    ]
