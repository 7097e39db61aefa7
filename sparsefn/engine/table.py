"""Text in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(lines: Sequence[tuple[str, ...]], left: int) -> str:
    """Rows of cells as a table whose first `left` columns hold text and the rest numbers.

    >>> print(aligned([("path", "kept"), ("0.bias", "8"), ("w", "16")], left=1))
    path    kept
    0.bias     8
    w         16
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for line in lines:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)
