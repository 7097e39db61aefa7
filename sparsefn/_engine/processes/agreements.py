"""Agreements of processes: an error of one is raised on all, and none waits.

Processes agree where they change masks, and there alone: other steps send nothing. So
an error before an agreement is sent only if the other processes are about to agree.
Before they agree they leave a note, which asks for no answer.

With an agreement processes compare what they see: the call, the step, and the leaves
with their shapes, dtypes and placements. Where these differ, the messages after it
would have other sizes, or not be the same messages at all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from sparsefn._engine.processes.lines import Groups, Line, Lost, board, group_of
from sparsefn._engine.transforms import Array

Seen: TypeAlias = Mapping[tuple[str, str], str]  # what and at which path -> in words

WAIT = 3.0  # seconds in which other processes, at the same step, leave a note
_WORDS = 512  # bytes of an error that are sent
_DIGEST = 8  # bytes of what a process sees; an error has zeros there
_begun: Counter[str] = Counter()  # agreements of this process by group


class _Scope(NamedTuple):
    groups: Groups = ()
    error: Exception | None = None
    is_open: bool = False  # an agreement is open


_scope: ContextVar[_Scope] = ContextVar("scope", default=_Scope())  # noqa: B039


def agree(
    groups: Groups, error: BaseException | None = None, seen: Seen | None = None
) -> None:
    """Raise on all processes of some groups if one comes with an error, or if they do
    not see the same.

    >>> from sparsefn._engine.processes import agreements
    >>> agreements.agree((), ValueError("no"))
    Traceback (most recent call last):
        ...
    ValueError: no

    The process that has an error raises it unchanged. Takes one exchange of 8 bytes.
    Every exchange begins with it, so that a process with an error may call it in place
    of the exchange. Inside `agreement` and `scope` it is over their groups, not the
    groups of the exchange: a process with an error does not know which exchange the
    other processes are at. Raises ValueError where they do not see the same, and `Lost`
    where the other processes do not come.
    """
    scope = _scope.get()
    groups = _joined(scope.groups, groups)
    error = error or scope.error
    line = Line(groups)
    text = _as_text(seen or {})
    told = line.blocks(
        np.zeros(_DIGEST, np.uint8) if error is not None else _digest(text)
    )
    if not told.any(1).all():
        words = line.blocks(_words(error))
        if error is None:
            first = min(bytes(row).rstrip(b"\0") for row in words if row.any())
            error = RuntimeError(
                f"another process failed: {first.decode(errors='ignore')}"
            )
    elif (told != told[0]).any():
        error = ValueError(_difference(line.texts(text)))
    if error is not None:
        error._told = _told(error) | {*groups}  # type: ignore[attr-defined]
        raise error


@contextmanager
def agreement(groups: Groups) -> Iterator[None]:
    """Code that may fail on one process alone: if it does, it fails on all of them.

    >>> from sparsefn._engine.processes.agreements import agreement
    >>> with agreement(()):
    ...     int("1")
    1

    Inside, exchanges and agreements may stand. An error that they have raised on all
    processes is not sent again.
    """
    outer = _scope.get()
    groups = _joined(outer.groups, groups)
    if not outer.is_open:
        _note(groups)
    token = _scope.set(_Scope(groups, outer.error, is_open=True))
    try:
        yield
        agree(())
    except Lost:
        raise
    except Exception as error:
        if not _told(error) >= {*groups}:
            agree((), error)
        raise
    finally:
        _scope.reset(token)


@contextmanager
def scope(groups: Groups, error: Exception | None = None) -> Iterator[None]:
    """Code whose agreements are over these groups; with an error, the first of them
    raises it on all processes.

    >>> from sparsefn._engine.processes import agreements
    >>> with agreements.scope((), ValueError("no")):
    ...     agreements.agree(())
    Traceback (most recent call last):
        ...
    ValueError: no
    """
    outer = _scope.get()
    token = _scope.set(
        _Scope(_joined(outer.groups, groups), error or outer.error, outer.is_open)
    )
    try:
        yield
    finally:
        _scope.reset(token)


def is_open() -> bool:
    """Whether an agreement is open.

    >>> from sparsefn._engine.processes import agreements
    >>> agreements.is_open()
    False
    """
    return _scope.get().is_open


def tell(groups: Groups, error: Exception) -> NoReturn:
    """Raise an error, and on all processes of the groups where they wait for this one
    in an agreement.

    >>> from sparsefn._engine.processes import agreements
    >>> agreements.tell((), ValueError("no"))
    Traceback (most recent call last):
        ...
    ValueError: no

    They have `WAIT` seconds to begin one. Sends nothing if they do not.
    """
    if not _told(error) >= {*groups} and not is_open() and _others_wait(groups):
        with agreement(groups):
            raise error
    raise error


def _others_wait(groups: Groups) -> bool:
    # Whether a process of the groups has begun an agreement that this one has not.
    store = board()
    if store is None:
        return False
    notes = []
    for name in groups:
        ranks = {*torch.distributed.get_process_group_ranks(group_of(name))}
        for rank in ranks - {torch.distributed.get_rank()}:
            notes.append((_key(name, rank), _begun[name]))
    end = time.monotonic() + WAIT
    # a store that is gone: the error is this process's own
    with suppress(RuntimeError):
        while time.monotonic() < end:
            for key, begun in notes:
                if store.check([key]) and int(store.get(key)) > begun:
                    return True
            time.sleep(0.01)
    return False


def _note(groups: Groups) -> None:
    if groups and (store := board()) is not None:
        for name in groups:
            _begun[name] += 1
            store.set(_key(name, torch.distributed.get_rank()), str(_begun[name]))


def _key(group: str, rank: int) -> str:
    return f"sparsefn/{group}/{rank}"


def _joined(groups: Groups, others: Groups) -> Groups:
    return tuple(dict.fromkeys((*groups, *others)))


def _told(error: BaseException) -> set[str]:
    # The groups whose processes all know of an error.
    told: set[str] = getattr(error, "_told", set())
    return told


def _as_text(seen: Seen) -> bytes:
    if torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    else:
        rank = 0
    rows = [[*key, words] for key, words in seen.items()]
    return json.dumps([rank, rows]).encode()


def _digest(text: bytes) -> Array:
    # Of all but the rank, and never zeros.
    seen = text.split(b",", 1)[1]
    digest = hashlib.sha256(seen).digest()
    return np.array([1, *digest[: _DIGEST - 1]], np.uint8)


def _difference(texts: Sequence[bytes]) -> str:
    # The first thing that two processes do not see alike, in words.
    told: dict[int, Seen] = {}
    for rank, rows in map(json.loads, texts):
        told[rank] = {(what, path): words for what, path, words in rows}

    def is_alike(key: tuple[str, str]) -> bool:
        return len({seen.get(key) for seen in told.values()}) == 1

    first = min(told)
    keys = dict.fromkeys(key for rank in sorted(told) for key in told[rank])
    key = next(key for key in keys if not is_alike(key))
    other = next(
        rank for rank in sorted(told) if told[rank].get(key) != told[first].get(key)
    )
    what, path = key
    nothing = "no leaf" if path else "none"
    has = told[first].get(key, nothing)
    other_has = told[other].get(key, nothing)
    same = f"expected the same {what} on every rank, but "
    if not path:
        return f"{same}rank {first} has {has}, and rank {other} has {other_has}"
    return (
        f"{same}not at {path!r}: rank {first} has {has} there, and rank {other} has "
        f"{other_has} there"
    )


def _words(error: BaseException | None) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    row = np.zeros(_WORDS, np.uint8)
    if error is not None and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        words = f"rank {rank}, {type(error).__name__}: {error}"
        said = words.encode()[:_WORDS]
        row[: len(said)] = np.frombuffer(said, np.uint8)
    return row
