"""The tables that the examples print."""

from collections.abc import Sequence


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """A line for the names of the columns and one for each row; the first `left`
    columns begin at one place.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
