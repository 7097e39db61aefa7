"""Rows of numbers in NAME.jsonl, one for each run that has ended: a killed run goes on
where it was.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from results.jobs import Key, Row


def key(row: Row) -> Key:
    """What tells rows apart."""
    return row["group"], row["arm"], row["level"], row["seed"]


def read(folder: Path, versions: dict[str, str]) -> dict[Key, Row]:
    """The rows of all groups that were made by these versions of them."""
    found = {}
    for group, version in versions.items():
        file = folder / f"{group}.jsonl"
        for line in (
            file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
        ):
            if line.endswith("\n"):  # else the run was killed in the midst of it
                row = json.loads(line)
                if row["version"] == version:
                    found[key(row)] = row
    return found


def add(folder: Path, rows: Iterable[Row]) -> None:
    """Append the rows of one job, of one group, in one write; what is left of a line
    that was cut goes first.
    """
    rows = list(rows)
    file = folder / f"{rows[0]['group']}.jsonl"
    with file.open("ab+") as out:
        end = out.seek(0, os.SEEK_END)
        out.seek(0)
        whole = out.read().rfind(b"\n") + 1
        if whole < end:
            out.truncate(whole)
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Refuse a second run that writes to the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run is writing to {folder}") from None
        yield
    finally:
        os.close(descriptor)
