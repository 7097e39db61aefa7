"""What lets a run that was killed resume: the journal of the parts that are done, and
the outputs of parts, in files.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn.core.state import State, Where, everywhere
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.checkpoint.folders import StoredTensor, read_json, some
from sparsefn.nn.modules.calls import Call, quiet_call
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    CachedTensor,
    CachedTree,
    copied_call,
    form_of,
    on_disk,
)
from sparsefn.posttraining.calibration.capture import (
    Chain,
    PausedRun,
    guarded_calls,
    intercepted,
)
from sparsefn.posttraining.calibration.folders.disk import (
    PLACE,
    digest_of,
    naming,
    write_json,
    write_whole,
)
from sparsefn.posttraining.calibration.folders.model import ModelFolder, check_places
from sparsefn.posttraining.calibration.in_order import with_one_example
from sparsefn.posttraining.calibration.inputs import (
    collector,
    weights_of_call,
    without_fusion,
)

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
    before = read_json("stream", file)
    if not _is_journal(before):
        raise ValueError(
            f"stream: expected the journal of a run in {os.fspath(file)!r}, which says "
            f"its run and parts, got {some(before)}: another release wrote it; remove "
            f"{os.fspath(out)!r}, or give another folder out"
        )
    others = [name for name in run if before["run"].get(name) != run[name]]
    if others:
        raise ValueError(
            f"stream: expected the run that was killed in {os.fspath(out)!r}, but of "
            f"another run were its {', '.join(others)}: go on with the same, or give "
            "another folder out"
        )
    parts = tuple(Part(**one) for one in before["parts"])
    return Journal(out, run, parts)


def _is_journal(held: Mapping[str, Any]) -> bool:
    parts = held.get("parts")
    if not isinstance(held.get("run"), dict) or not isinstance(parts, list):
        return False
    return all(isinstance(one, dict) and {*one} == {*Part._fields} for one in parts)


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


class Runs:
    """The runs of a model for some batches, all paused before the same part.

    The outputs of parts are files in the folder that `scratch` is in, which outlive the
    process; all other tensors that parts are called with are files in `scratch`. Both
    are read when a part is called, for one batch at a time.
    """

    def __init__(
        self,
        folder: ModelFolder,
        calls: Sequence[Call],
        scratch: Path,
        device: torch.device,
    ) -> None:
        parts = folder.model.parts(folder.order)
        forms = forms_of(folder, calls[0], device)
        self.folder = folder
        self.work = scratch.parent
        self.device = device
        self.chain = Chain(parts, folder.order, forms, frozenset(), [])
        disk = on_disk(scratch)

        def cache(x: Tensor) -> CachedTensor:
            with naming(scratch):
                return disk(x)

        self.paused = [
            PausedRun(folder.model, self.chain, call, cache) for call in calls
        ]
        self.entered: set[int] = set()  # parts before which the model itself computes

    def advance(self, number: int) -> None:
        """Find out what the part of a number is called with, by the leaves of the model
        outside of all parts.
        """
        if number in self.paused[0].calls:
            return
        self.entered.add(number)
        weights = self.folder.weights_outside_parts(self.device)
        for run in self.paused:
            run.advance(number, weights)

    def calls(self, number: int) -> Iterator[Call]:
        """What each batch calls the part of a number with."""
        return guarded_calls(
            self.paused, number, self.folder.order[number] in self.folder.blocks
        )

    def cache(self, number: int) -> Callable[[Tree], CachedTree]:
        """How to keep the outputs of a part: each call is for the next batch, in a
        cycle.
        """
        turns = itertools.cycle(range(len(self.paused)))

        def cache(out: Tree) -> CachedTree:
            file = self._file(number, next(turns))
            tensors = [
                x.clone() for x in optree.tree_leaves(out) if isinstance(x, Tensor)
            ]
            # to a full disk torch itself raises no OSError
            torch.save(tensors, saved := io.BytesIO())
            write_whole(file, lambda path: path.write_bytes(saved.getbuffer()))
            return _in_file(file, form_of(out))

        return cache

    def finish(self, number: int, outputs: Sequence[CachedTree]) -> None:
        """Go on to the next part, with the outputs of one."""
        for run, out in zip(self.paused, outputs, strict=True):
            run.finish(number, out)

    def skip(self, number: int) -> None:
        """Go on to the next part, with the outputs in files where they are still
        needed.
        """
        for i, run in enumerate(self.paused):
            file = self._file(number, i)
            if file.exists():
                run.finish(number, _in_file(file, self.chain.forms[number]))
            else:
                del run.calls[number]

    def needed(self) -> set[int]:
        """The numbers of the parts whose outputs are needed from here on."""
        return {*self.paused[0].outputs}

    def forget(self, needed: Iterable[int]) -> None:
        """Remove the files of all outputs, but keep the outputs of some parts."""
        names = {
            self._file(number, i).name
            for number in needed
            for i in range(len(self.paused))
        }
        for file in self.work.glob("outputs-*"):
            if file.name not in names:
                file.unlink()

    def _file(self, number: int, batch: int) -> Path:
        return self.work / f"outputs-{number}-{batch}.pt"


def forms_of(folder: ModelFolder, call: Call, device: torch.device) -> list[CachedTree]:
    """What each part of a model returns, without the tensors in it.

    >>> from sparsefn.nn.modules.wrappers import Named
    >>> layers = Named.of(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    >>> forms_of(
    ...     ModelFolder(Path("."), {}, layers, [], {}, {"": []}),
    ...     ((), {}),
    ...     torch.device("cpu"),
    ... )
    []

    The model runs to its end on one example of the call. The first part of each list
    runs, and the list's other parts return the same outputs: only the order in which
    the model calls them matters. Raises BrokenChainError where that is not the order of
    the parts, each of them once.
    """
    if not folder.order:
        return []
    return with_one_example(partial(_forms, folder, device), call)


def _forms(folder: ModelFolder, device: torch.device, call: Call) -> list[CachedTree]:
    parts = folder.model.parts(folder.order)
    called = list[str]()
    outputs = dict[str, Tree]()
    used = dict[str, list[str]]()

    def run(
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        # the part itself, with its weights
        if called[-1:] == [own := path.rpartition(".")[0]]:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if own not in outputs:
            called.append(own)
            part = parts[path]
            params, _ = folder.load(path, device)
            weights = weights_of_call(part, State(params, everywhere(params)))
            matrices = [name for name, x in weights.items() if x.ndim > 1]
            collect = collector(part, weights, matrices, ["count"])
            stats, outputs[own] = collect((args, kwargs), None)
            used[own] = [part.own[name][0] for name in stats]  # as they are first used
            form_of(outputs[own])
            called.pop()
        called.append(path)
        return optree.tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, outputs[own]
        )

    with torch.no_grad(), without_fusion(), intercepted(parts, run):
        quiet_call(folder.model, folder.weights_outside_parts(device))(
            copied_call(call)
        )
    for path in folder.order:
        times = called.count(path)
        if times != 1:
            raise BrokenChainError(f"{path!r} is called {times} times")
    for path, other in zip(called, folder.order, strict=True):
        if path != other:
            raise BrokenChainError(f"{path!r} is called before {other!r}")
    for path, blocks in folder.blocks.items():
        turns = used[path.rpartition(".")[0]]
        places: list[tuple[int, Where]] = []
        for block, chosen in blocks:
            at = [parts[path].own[name][0] for name in chosen]
            seen = [turns.index(one) for one in at if one in turns]
            if seen:
                places.append((min(seen), block))
        check_places(places)
    return [form_of(outputs[path.rpartition(".")[0]]) for path in folder.order]


def _in_file(file: Path, form: CachedTree) -> CachedTree:
    places = itertools.count()
    leaves = []
    for leaf in form.leaves:
        if leaf is None:
            leaves.append(CachedTensor(partial(_read, file, next(places))))
        else:
            leaves.append(leaf)
    return CachedTree(form.structure, leaves)


def _read(file: Path, place: int) -> Tensor:
    tensor: Tensor = torch.load(file, weights_only=True)[place]
    return tensor
