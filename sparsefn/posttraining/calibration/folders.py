"""Folders of models: reading some tensors of their files at a time, writing so that a
crash loses nothing, and the journal of a run, so that it can be killed and go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsefn.core.tree import Tree, flatten

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHOWN = 4  # names in an error
PLACE = ".stream"  # in the folder that the run makes, until it is whole
_JOURNAL = "journal.json"


class StoredTensor(NamedTuple):
    """A tensor in a file of a folder; `dtype` is as safetensors writes it.

    >>> StoredTensor("model.safetensors", (2, 3), "BF16").shape
    (2, 3)
    """

    file: str
    shape: tuple[int, ...]
    dtype: str


def stored_in(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of a model's folder, by name.

    No values are read.

    >>> stored_in(Path("/nowhere"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the folder of a model, got '/nowhere', which is no
    folder
    """
    if not folder.is_dir():
        raise ValueError(
            f"stream: expected the folder of a model, got {os.fspath(folder)!r}, "
            "which is no folder"
        )
    single = (folder / SINGLE).exists()  # transformers looks for it first
    if not (folder / "config.json").exists() or not (
        single or (folder / INDEX).exists()
    ):
        there = some(sorted(path.name for path in folder.iterdir()))
        raise ValueError(
            f"stream: expected config.json and {SINGLE} or {INDEX} in "
            f"{os.fspath(folder)!r}, got {there}: write the folder with "
            "model.save_pretrained"
        )
    if single:
        placed = None
    else:
        placed = read_json(folder / INDEX).get("weight_map", {})
    found = {}
    for file in [SINGLE] if placed is None else sorted({*placed.values()}):
        with _opened(folder / file) as inside:
            for name in inside.keys():  # noqa: SIM118
                if placed is None or placed.get(name) == file:
                    one = inside.get_slice(name)
                    found[name] = StoredTensor(
                        file, tuple(one.get_shape()), one.get_dtype()
                    )
    lost = [name for name in placed or () if name not in found]
    if lost:
        raise ValueError(
            f"stream: {INDEX} names tensors that its files lack: {some(lost)}"
        )
    return found


def read_tensors(
    folder: Path, files: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a folder, each in memory of its own, from `{name: file}`; one file is
    open at a time.

    >>> list(read_tensors(Path("."), {}))
    []
    """
    for file in sorted({*files.values()}):
        with _opened(folder / file) as inside:
            for name in sorted(name for name, own in files.items() if own == file):
                # the file may change or go away
                yield (name, inside.get_tensor(name).clone())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        inside = safe_open(file, framework="pt")  # type: ignore[no-untyped-call, unused-ignore]
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"stream: expected a safetensors file at {os.fspath(file)!r}, but: {error}"
        ) from None
    with inside as one:
        yield one


def read_json(file: Path) -> Any:
    """What a file of JSON holds.

    >>> read_json(Path("/nowhere"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected a file of JSON at '/nowhere', but: [Errno 2] No such
    file or directory: '/nowhere'
    """
    try:
        return json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"stream: expected a file of JSON at {os.fspath(file)!r}, but: {error}"
        ) from None


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
    method = str(said.get("quant_method", "quantization_config"))
    if (
        method != "compressed-tensors"
        or said.get("config_groups")
        or said.get("kv_cache_scheme")
    ):
        return method
    formats = [said.get("format"), (said.get("sparsity_config") or {}).get("format")]
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
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a.safetensors"), {"x": torch.ones(2)})
    ...     list(read_tensors(Path(folder), {"x": "a.safetensors"}))
    [('x', tensor([1., 1.]))]
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
    ...     read_json(Path(folder, "a.json"))
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
        written = {"run": dict(self.run), "parts": parts}
        write_json(self.out / PLACE / _JOURNAL, written)
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
    if not out.exists():
        return
    held = "a file"
    if out.is_dir():
        there = set(os.listdir(out)) - {PLACE}
        held = some(sorted(there)) if there else ""
    if held:
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
    others = [name for name in run if before["run"].get(name) != run[name]]
    if others:
        raise ValueError(
            f"stream: expected the run that was killed in {os.fspath(out)!r}, but of "
            f"another run were its {', '.join(others)}: go on with the same, or give "
            "another folder out"
        )
    parts = tuple(Part(**one) for one in before["parts"])
    return Journal(out, run, parts)


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
    written = config.read_bytes() + repr(named).encode()
    return hashlib.sha256(written).hexdigest()
