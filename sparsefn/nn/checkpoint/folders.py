"""Tensors in the folder of a model: config.json, and safetensors in a file or more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHOWN = 4  # names in an error
_WIDTH = 60  # letters of a value in an error


class StoredTensor(NamedTuple):
    """A tensor in a file of a folder; `dtype` is as safetensors writes it.

    >>> StoredTensor("model.safetensors", (2, 3), "BF16").shape
    (2, 3)
    """

    file: str
    shape: tuple[int, ...]
    dtype: str


def stored_in(caller: str, folder: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of a model's folder, by name.

    No values are read.

    >>> stored_in("stream", Path("/nowhere"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the folder of a model, got '/nowhere', which is no
    folder
    """
    if not folder.is_dir():
        raise ValueError(
            f"{caller}: expected the folder of a model, got {os.fspath(folder)!r}, "
            "which is no folder"
        )
    single = (folder / SINGLE).exists()  # transformers looks for it first
    if not (folder / "config.json").exists() or not (
        single or (folder / INDEX).exists()
    ):
        there = some(sorted(path.name for path in folder.iterdir()))
        raise ValueError(
            f"{caller}: expected config.json and {SINGLE} or {INDEX} in "
            f"{os.fspath(folder)!r}, got {there}: write the folder with "
            "model.save_pretrained, or copy all of it"
        )
    if single:
        file_of = None
    else:
        file_of = _file_of(caller, folder / INDEX)
    found = {}
    for file in [SINGLE] if file_of is None else sorted({*file_of.values()}):
        with _opened(caller, folder / file) as inside:
            for name in inside.keys():  # noqa: SIM118
                if file_of is None or file_of.get(name) == file:
                    one = inside.get_slice(name)
                    found[name] = StoredTensor(
                        file, tuple(one.get_shape()), one.get_dtype()
                    )
    lost = [name for name in file_of or () if name not in found]
    if lost:
        raise ValueError(
            f"{caller}: {INDEX} names tensors that its files lack: {some(lost)}"
        )
    return found


def _file_of(caller: str, index: Path) -> dict[str, str]:
    # The file of each tensor.
    said = read_json(caller, index).get("weight_map", {})
    if not isinstance(said, dict) or any(type(one) is not str for one in said.values()):
        raise ValueError(
            f"{caller}: expected the weight_map of {os.fspath(index)!r} to be an "
            f"object of file names by tensor, got {repr(said)[:_WIDTH]}: write the "
            "folder with model.save_pretrained"
        )
    return said


def read_tensors(
    caller: str, folder: Path, files: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a folder, each in memory of its own, from `{name: file}`; one file is
    open at a time.

    >>> list(read_tensors("stream", Path("."), {}))
    []
    """
    for file in sorted({*files.values()}):
        with _opened(caller, folder / file) as inside:
            for name in sorted(name for name, own in files.items() if own == file):
                # the file may change or go away
                yield (name, inside.get_tensor(name).clone())


@contextmanager
def _opened(caller: str, file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        inside = safe_open(file, framework="pt")  # type: ignore[no-untyped-call, unused-ignore]
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{caller}: expected a safetensors file at {os.fspath(file)!r}, but: "
            f"{error}"
        ) from None
    with inside as one:
        yield one


def read_json(caller: str, file: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    >>> read_json("stream", Path("/nowhere"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected a file of JSON at '/nowhere', but: [Errno 2] No such
    file or directory: '/nowhere'
    """
    try:
        made = json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{caller}: expected a file of JSON at {os.fspath(file)!r}, but: {error}"
        ) from None
    if not isinstance(made, dict):
        raise ValueError(
            f"{caller}: expected {os.fspath(file)!r} to hold an object of JSON, "
            f"{{...}}, got {repr(made)[:_WIDTH]}: write the folder again, or copy all "
            "of it"
        )
    return made


def some(names: Iterable[object]) -> str:
    """The first names of many, for errors.

    >>> some("abcdef")
    "'a', 'b', 'c', 'd' and 2 more"
    """
    every = [*map(repr, names)]
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    if every:
        return ", ".join(every[:_SHOWN]) + more
    return "nothing"
