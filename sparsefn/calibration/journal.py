"""What a run that prunes a folder has done so far, so that it can be killed at any
moment and go on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from sparsefn.calibration.folders import (
    StoredTensor,
    digest_of,
    read_json,
    some,
    write_json,
)
from sparsefn.tree import Tree, flatten

PLACE = ".stream"  # in the folder that the run makes, until it is whole
_JOURNAL = "journal.json"


class Part(NamedTuple):
    """A part of a model that is done: a digest of what was read, its blocks' errors.

    >>> Part("a1", {"0.*": 0.25}).errors
    {'0.*': 0.25}
    """

    digest: str
    errors: dict[str, float | None]


class Journal(NamedTuple):
    """The folder of a run, what the run is of, and the parts that it has done.

    >>> Journal(Path("out"), {"batches": "a1"}, ()).parts
    ()
    """

    out: Path
    run: Mapping[str, str]
    parts: tuple[Part, ...]

    def done(self, part: Part) -> Journal:
        """The journal with one part more, on the disk."""
        after = self._replace(parts=(*self.parts, part))
        parts = [one._asdict() for one in after.parts]
        write_json(self.out / PLACE / _JOURNAL, {"run": dict(self.run), "parts": parts})
        return after


@contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Keep other runs out of a folder while it is entered; the system lets go of it
    where the process is killed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, only_run_in(Path(folder)):
    ...     with only_run_in(Path(folder)):
    ...         pass
    Traceback (most recent call last):
        ...
    ValueError: stream: expected one run at a time, but another one writes to '...':
    wait for its end, or give another folder out
    """
    from filelock import FileLock, Timeout  # which torch brings

    _check_free(out)
    (out / PLACE).mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / PLACE / "lock", timeout=0):
            try:
                yield
            finally:
                if not (out / PLACE / _JOURNAL).exists():  # the run was not begun
                    shutil.rmtree(out / PLACE, ignore_errors=True)
    except Timeout:
        raise ValueError(
            "stream: expected one run at a time, but another one writes to "
            f"{os.fspath(out)!r}: wait for its end, or give another folder out"
        ) from None


def _check_free(out: Path) -> None:
    if (out / PLACE / _JOURNAL).exists():
        return
    if out.exists() and (not out.is_dir() or (there := {*os.listdir(out)} - {PLACE})):
        held = some(sorted(there)) if out.is_dir() else "a file"
        raise ValueError(
            f"stream: expected {os.fspath(out)!r} to be new or a run that was killed, "
            f"got {held}"
        )


def journal_in(out: Path, run: Mapping[str, str]) -> Journal:
    """The journal in a folder, or a new one if the folder is empty or new.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = journal_in(Path(folder), {"batches": "a1"}).done(Part("c3", {}))
    ...     journal_in(Path(folder), {"batches": "a1"}) == journal
    True

    Raises ValueError where the folder holds anything else, and names what differs from
    the run that it is of.
    """
    file = out / PLACE / _JOURNAL
    if not file.exists():
        _check_free(out)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"run": dict(run), "parts": []})
        return Journal(out, run, ())
    before = read_json(file)
    if others := [name for name in run if before["run"].get(name) != run[name]]:
        raise ValueError(
            f"stream: expected the run that was killed in {os.fspath(out)!r}, but of "
            f"another run were its {', '.join(others)}: go on with the same, or give "
            "another folder out"
        )
    return Journal(out, run, tuple(Part(**one) for one in before["parts"]))


def digest_of_batches(batches: Iterable[Tree]) -> str:
    """A digest of the values, shapes and dtypes of batches.

    >>> one, other = torch.tensor([1, 2]), torch.tensor([1, 3])
    >>> digest_of_batches([one]) == digest_of_batches([one.clone()])
    True
    >>> digest_of_batches([one]) == digest_of_batches([other])
    False
    """
    digest = hashlib.sha256()
    for batch in batches:
        for path, leaf in flatten(batch)[0].items():
            said = digest_of(leaf) if isinstance(leaf, Tensor) else leaf
            digest.update(f"{path} {said} ".encode())
    return digest.hexdigest()


def digest_of_model(config: Path, stored: Mapping[str, StoredTensor]) -> str:
    """A digest of what a model's folder says of it: its config, and its tensors but for
    their values.

    >>> digest_of_model(Path(__file__), {})[:0]
    ''
    """
    named = sorted((name, one.shape, one.dtype) for name, one in stored.items())
    return hashlib.sha256(config.read_bytes() + repr(named).encode()).hexdigest()
