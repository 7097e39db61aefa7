"""The file `.metadata` of a checkpoint, read without running what it says.

torch writes it with pickle, which can name any function of the interpreter and have it
called. Here the file gets no classes but blank ones, which hold what it says, and what
they hold is checked before torch's own are made of it.
"""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from sparsefn.core.checks import is_int

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    *(
        f"{_CHECKPOINT}.metadata.{name}"
        for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")
    ),
    *(
        f"{_CHECKPOINT}.metadata.{name}"
        for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
    ),
    *(f"{_CHECKPOINT}.metadata.StorageMeta", f"{_CHECKPOINT}.filesystem._StorageInfo"),
}


class Stored(NamedTuple):
    """Where in which file a part of a tensor is, as torch's reader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """The metadata of a checkpoint.

    Raises ValueError for a file that holds anything else, naming it.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
    )

    where = (
        f"expected a checkpoint of sf.distributed.save in {os.fspath(folder)!r}, but "
        "its file .metadata"
    )
    with (Path(folder) / ".metadata").open("rb") as file:
        try:
            top = _Unpickler(file).load()
        except _Refused as error:
            raise ValueError(
                f"{where} names {error}, which no such checkpoint needs; nothing of "
                "it was run"
            ) from None
        except Exception as error:  # a damaged pickle raises almost anything
            raise ValueError(
                f"{where} cannot be read: {type(error).__name__}: {error}"
            ) from None
    try:
        fields = _fields(top, "Metadata")
        entries: dict[str, Any] = {}
        for path, entry in _dict(fields["state_dict_metadata"]).items():
            _check(isinstance(path, str), path)
            bare = type(entry).__name__ == "BytesStorageMetadata"
            entries[path] = BytesStorageMetadata() if bare else _tensor(entry)
        stored = {}
        for index, info in _dict(fields["storage_data"]).items():
            at = _fields(index, "MetadataIndex")
            place = _fields(info, "_StorageInfo")
            part = Stored(place["relative_path"], place["offset"], place["length"])
            offset = at.get("offset")  # of an object there is none
            _check(at["fqn"] in entries and (offset is None or _is_shape(offset)), at)
            _check(
                _is_shape((part.offset, part.length))
                and not place.get("transform_descriptors"),
                place,
            )
            # A file of this folder, and of no other one.
            name = part.relative_path
            _check(
                isinstance(name, str)
                and name not in ("", ".", "..")
                and not {*name} & {*"/\\:\0"},
                name,
            )
            stored[MetadataIndex(at["fqn"], offset)] = part
    except _Refused as error:
        raise ValueError(
            f"{where} holds {error}, which no such checkpoint does"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} is not whole: {type(error).__name__}: {error}"
        ) from None
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


def _tensor(entry: Any) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    fields = _fields(entry, "TensorStorageMetadata")
    properties = fields["properties"]
    size = fields["size"]
    _check(
        type(properties).__name__ == "TensorProperties"
        and isinstance(properties.state, tuple),
        properties,
    )
    dtype = properties.state[0]
    _check(
        isinstance(dtype, torch.dtype)
        and _is_shape(size)
        and isinstance(fields["chunks"], list),
        fields,
    )
    chunks = []
    held = 0
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        first = box["offsets"]
        n = box["sizes"]
        _check(
            _is_shape(first) and _is_shape(n) and len(first) == len(n) == len(size), box
        )
        _check(
            all(a + b <= whole for a, b, whole in zip(first, n, size, strict=True)), box
        )
        chunks.append(ChunkStorageMetadata(torch.Size(first), torch.Size(n)))
        held += math.prod(n)
    if held != math.prod(size):
        raise ValueError(
            f"its parts hold {held} of {math.prod(size)} entries of a tensor"
        )
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)


class _Refused(Exception):
    """What the file may not hold."""


class _Unpickler(pickle.Unpickler):
    """Loads records with blank classes, made for this file alone, and nothing that can
    be called but these.
    """

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _RECORDS:
            return self._blank(name)
        dtype = None
        if module == "torch":
            dtype = vars(torch).get(name)
        if isinstance(dtype, torch.dtype):
            return dtype
        if full == "torch.Size":
            return lambda items: items if isinstance(items, tuple) else ()
        if full in (
            "torch.serialization._get_layout",
            f"{_CHECKPOINT}.metadata._MEM_FORMAT_ENCODING",
        ):
            return _nothing
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return _nothing  # of the folder at the time
        raise _Refused(full)

    def _blank(self, name: str) -> type:
        made: dict[str, type] = self.__dict__.setdefault("made", {})
        return made.setdefault(name, type(name, (_Record,), {}))


class _Record:
    """What the file says of an object of some class."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _nothing(*_: Any) -> None:
    return None


def _fields(record: Any, kind: str) -> dict[str, Any]:
    _check(isinstance(record, _Record) and type(record).__name__ == kind, record)
    return _dict(record.state)


def _dict(x: Any) -> dict[Any, Any]:
    _check(isinstance(x, dict), x)
    return x  # type: ignore[no-any-return]


def _is_shape(x: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(x, tuple) and all(is_int(n) and 0 <= n < 2**63 for n in x)


def _check(holds: bool, what: object) -> None:
    if not holds:
        raise _Refused(str(what.state if isinstance(what, _Record) else what)[:200])
