"""Files in the folders of models: reads some tensors at a time, and writes so that a
crash loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLACE = ".stream"  # in the folder that the run makes, until it is whole


def stored_as(config: Mapping[str, Any]) -> str:
    """How the config of a folder says that weights are stored, where they are not plain
    numbers.

    >>> stored_as({"quantization_config": {"quant_method": "gptq"}})
    'gptq'
    >>> dense = {"format": "dense", "global_sparsity": 0.5}
    >>> stored_as(
    ...     {
    ...         "quantization_config": {
    ...             "quant_method": "compressed-tensors",
    ...             "sparsity_config": dense,
    ...         }
    ...     }
    ... )
    ''

    compressed-tensors says of plain weights with zeros that their format is dense.
    """
    said = config.get("quantization_config")
    if said is None:
        return ""
    sparsity = said.get("sparsity_config") or {} if isinstance(said, dict) else None
    if not isinstance(sparsity, dict):
        raise ValueError(
            "stream: expected quantization_config in config.json, and sparsity_config "
            f"in it, to be objects, {{...}}, got {said!r}: leave it out for weights "
            "that are plain numbers"
        )
    method = str(said.get("quant_method", "quantization_config"))
    if (
        method != "compressed-tensors"
        or said.get("config_groups")
        or said.get("kv_cache_scheme")
    ):
        return method
    formats = [said.get("format"), sparsity.get("format")]
    return next((one for one in formats if one not in (None, "dense")), "")


def without_sparsity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a folder with plain weights, without what it says of their zeros:
    other weights are zero now.

    >>> without_sparsity(
    ...     {
    ...         "model_type": "llama",
    ...         "sparsity_config": {"format": "dense", "global_sparsity": 0.5},
    ...     }
    ... )
    {'model_type': 'llama'}
    """
    said = () if stored_as(config) else ("quantization_config", "sparsity_config")
    return {name: value for name, value in config.items() if name not in said}


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of safetensors.

    After a crash it is there as a whole, or as it was before.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a.safetensors"), {"x": torch.ones(2)})
    ...     load_file(Path(folder, "a.safetensors"))
    {'x': tensor([1., 1.])}
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(path: Path) -> None:
        try:
            save_file(
                {name: x.contiguous() for name, x in tensors.items()},
                path,
                metadata={"format": "pt"},
            )
        except SafetensorError as error:  # of the system, as a full disk
            raise OSError(str(error)) from None

    write_whole(file, write)


def write_json(file: Path, value: object) -> None:
    """Write a file of JSON; after a crash it is there as a whole, or as it was before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(Path(folder, "a.json"), {"x": 1})
    ...     json.loads(Path(folder, "a.json").read_text())
    {'x': 1}
    """
    write_whole(
        file, lambda path: path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    )


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file by a function of a path.

    After a crash it is there as a whole, or as it was before.

    >>> write_whole(Path("/nowhere/a"), lambda path: path.write_text("x"))
    Traceback (most recent call last):
        ...
    OSError: stream: '/nowhere/a' could not be written: [Errno 2] No such file or
    directory: '/nowhere/a.part'. What was written before it is safe: make room, and the
    same call goes on from there
    """
    # Under another name first: what is on the disk before the file has its name cannot
    # be torn.
    part = file.with_name(f"{file.name}.part")
    with naming(file):
        try:
            write(part)
            _to_disk(part)
            os.replace(part, file)
            _to_disk(file.parent)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@contextmanager
def in_the_name_of(caller: str) -> Iterator[None]:
    """While it is entered, errors of the parts that functions of folders share begin
    with the name of the function that was called.

    >>> with in_the_name_of("drop_layers"):
    ...     raise ValueError("stream: expected a folder")
    Traceback (most recent call last):
        ...
    ValueError: drop_layers: expected a folder
    """
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        text = str(error)
        rest = text.removeprefix("stream: ")
        if rest == text:
            raise
        raise type(error)(f"{caller}: {rest}") from error.__cause__


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """While it is entered, an OSError says which file could not be written, and what to
    do.

    >>> with naming(Path("a")):
    ...     raise OSError("No space left on device")
    Traceback (most recent call last):
        ...
    OSError: stream: 'a' could not be written: No space left on device. What was written
    before it is safe: make room, and the same call goes on from there
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            f"stream: {os.fspath(file)!r} could not be written: {error}. What was "
            "written before it is safe: make room, and the same call goes on from "
            "there"
        ) from error


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def digest_of(x: Tensor) -> str:
    """A digest of the shape, dtype and bits of a tensor.

    >>> (
    ...     digest_of(torch.zeros(2)) == digest_of(-torch.zeros(2)),
    ...     digest_of(torch.ones(2)) == digest_of(torch.ones(2)),
    ... )
    (False, True)
    """
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode())
    row = x.detach().cpu().contiguous().reshape(-1)
    digest.update(row.view(torch.uint8).numpy().data)
    return digest.hexdigest()
