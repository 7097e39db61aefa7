"""States in checkpoints that many processes write and read together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sparsefn._engine.processes import agreement
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.checkpoint.states import (
    as_dense,
    check_fits,
    check_paths,
    check_values,
    refuse_false_masks,
    state_dict,
)
from sparsefn.nn.distributed.ends import everyone
from sparsefn.nn.distributed.metadata import read_metadata


def save(state: Tree, folder: str | os.PathLike[str]) -> None:
    """Save a state, or any tree of tensors, into a new folder.

    >>> import tempfile
    >>> state = sf.static(0.5).init({"w": torch.ones(2, 2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sf.distributed.save(state, folder)
    ...     again = sf.distributed.load(state, folder)
    >>> sf.checkpoint.tree_equal(again, state)
    True

    Args:
        state: The tree. Each process writes the shards that it holds; what several
            processes hold is written once.
        folder: A new folder, which all processes see.

    Raises:
        TypeError: A leaf is not a dense tensor.
        ValueError: A leaf is of the meta device, or the folder holds a checkpoint:
            writing over one would lose it if this process ended halfway.

    Every process of the default process group must call it; without a process group one
    process saves alone. It is a checkpoint of `torch.distributed.checkpoint`: params,
    masks, scores, moments, keys and step counts by dotted path. `load` reads it on any
    number of processes, with any layout: one process and plain tensors, too. The file
    `.metadata` comes last, so that a save that was interrupted is no checkpoint.

    `sf.checkpoint.state_dict` is for one process: a dict of what is here, for one file
    of `torch.save` or safetensors, where masks may be packed. Here they take a byte a
    weight.
    """
    with agreement(everyone()):
        tensors = {
            path: check_values("the state", path, leaf)
            for path, leaf in state_dict(state).items()
        }
        if (Path(folder) / ".metadata").exists():
            raise ValueError(
                f"save: expected a new folder, but {os.fspath(folder)!r} holds a "
                "checkpoint already"
            )
    # importing it takes a second
    from torch.distributed.checkpoint.state_dict_saver import save as write

    with _quiet():
        write(tensors, checkpoint_id=os.fspath(folder), no_dist=not everyone())


def load(template: Tree, folder: str | os.PathLike[str]) -> Tree:
    """A tree like the template, with the values that `save` wrote.

    >>> import tempfile
    >>> state = sf.static(0.5).init({"w": torch.ones(2, 2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sf.distributed.save(state, folder)
    ...     sf.distributed.load({"w": torch.ones(2, 2)}, folder)
    Traceback (most recent call last):
        ...
    ValueError: expected the paths of the template, but missing are ['w'] and unexpected
    ['key', 'masks.w', 'params.w']

    Args:
        template: A tree, `algorithm.init(params)` for example, which gives structure,
            shapes, dtypes, devices and how DTensors are laid out. Its values are not
            read, and it is not changed.
        folder: The folder that `save` wrote, on other processes perhaps and with
            another layout.

    Returns:
        A new tree. Each process reads what it holds.

    Raises:
        ValueError: Paths are missing or unexpected, a tensor has another shape, a mask
            of a state is a 0-d False, the template is of the meta device, or a file
            holds anything else. The text names the path or the file.
        TypeError: A tensor has another dtype, or a leaf is not a dense tensor. The text
            names the path.
        FileNotFoundError: There is no checkpoint.

    Every process of the default process group must call it. Nothing in the folder is
    run, even if a stranger wrote it: of its pickled file `.metadata` only names,
    shapes, dtypes and places of tensors are taken, and torch reads tensors with
    `weights_only=True`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as read

    found = {}
    reader = FileSystemReader(folder)
    with agreement(everyone()):
        leaves, rebuild = flatten(template)
        metadata = read_metadata(folder)
        check_paths(leaves, sorted(metadata.state_dict_metadata))
        for path, leaf in leaves.items():
            like = check_values(
                "the template", path, as_dense("the template", path, leaf)
            )
            saved = metadata.state_dict_metadata[path]
            if not isinstance(saved, TensorStorageMetadata):
                raise TypeError(
                    f"expected a tensor at {path!r} in the checkpoint, got an object "
                    "of another kind"
                )
            check_fits(path, like, saved.size, saved.properties.dtype)
            found[path] = torch.empty_like(like)
    reader.read_metadata = lambda *args, **kwargs: metadata  # type: ignore[method-assign]
    with _quiet():
        try:
            read(found, storage_reader=reader, no_dist=not everyone())
        except CheckpointException as error:  # on all processes; no Exception
            rank, (fault, _) = next(iter(error.failures.items()))
            said = f"rank {rank} got {type(fault).__name__}: {fault}"
            raise ValueError(
                f"expected files of tensors in {os.fspath(folder)!r} that can be "
                f"read, but {said}"
            ) from None
    refuse_false_masks(template, found)
    return rebuild([found[path] for path in leaves])


@contextmanager
def _quiet() -> Iterator[None]:
    # torch warns each time that one process saves alone, which is what was asked for.
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="torch.distributed is disabled, unavailable or uninitialized",
        )
        yield
