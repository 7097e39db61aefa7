"""The folder that a run makes: a file of weights for each part of the model, and the
other files of its model.
"""

from __future__ import annotations

import math
import os
import shutil
from functools import partial
from pathlib import Path

from torch import Tensor

from sparsefn.calibration.folders import (
    INDEX,
    digest_of,
    read_json,
    read_tensors,
    without_sparsity,
    write_json,
    write_tensors,
    write_whole,
)
from sparsefn.calibration.journal import PLACE
from sparsefn.calibration.plan import Plan

# which a tokenizer has besides its own; other folders are of other tools
_TEMPLATES = "additional_chat_templates"
# they are not copied
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}


def write_part(plan: Plan, out: Path, path: str, weights: dict[str, Tensor]) -> None:
    """Write the weights of a part, and its buffers, under the names that the folder
    has.

    >>> import tempfile
    >>> plan = Plan(Path("."), {}, torch.nn.Module(), [], {}, {"": []})
    >>> with tempfile.TemporaryDirectory() as out:
    ...     write_part(plan, Path(out), "", {})
    ...     os.listdir(out)
    ['model-00001-of-00001.safetensors']
    """
    write_tensors(out / _file(plan, path), _named(plan, path, weights))


def check_part(plan: Plan, out: Path, path: str, weights: dict[str, Tensor]) -> None:
    """Raise ValueError where the weights of a part are not the bits that were written,
    which it names.

    >>> import tempfile
    >>> plan = Plan(Path("."), {}, torch.nn.Module(), [], {}, {"": []})
    >>> with tempfile.TemporaryDirectory() as out:
    ...     write_part(plan, Path(out), "", {})
    ...     check_part(plan, Path(out), "", {})
    """
    tensors = _named(plan, path, weights)
    for name, old in read_tensors(out, dict.fromkeys(tensors, _file(plan, path))):
        if digest_of(old) != digest_of(tensors[name]):
            raise ValueError(
                f"stream: expected the run that was killed in {os.fspath(out)!r}, but "
                f"{name!r} comes out otherwise: go on with the same prune, number of "
                "threads and versions, or give another folder out"
            )


def finish(plan: Plan, out: Path) -> None:
    """Copy the other files, write the index, without which the folder is no model, and
    remove what the run kept.

    >>> import tempfile
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     tempfile.TemporaryDirectory() as out,
    ... ):
    ...     for name in ("config.json", "model.safetensors"):
    ...         _ = Path(folder, name).write_text("{}")
    ...     Path(out, PLACE).mkdir()
    ...     finish(
    ...         Plan(Path(folder), {}, torch.nn.Module(), [], {}, {"": []}), Path(out)
    ...     )
    ...     sorted(os.listdir(out))
    ['config.json', 'model.safetensors.index.json']
    """
    for folder, name in [(plan.folder, "*"), (plan.folder / _TEMPLATES, "*.jinja")]:
        for file in folder.glob(name):
            weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
            if file.is_file() and not weights and not file.name.startswith("."):
                (to := out / file.relative_to(plan.folder)).parent.mkdir(exist_ok=True)
                write_whole(to, partial(shutil.copyfile, file))
    said = read_json(plan.folder / "config.json")
    if without_sparsity(said) != said:
        write_json(out / "config.json", without_sparsity(said))
    placed = dict[str, str]()
    size = 0
    for path, leaves in plan.leaves.items():
        placed |= {leaf.stored[0]: _file(plan, path) for leaf in leaves}
        size += sum(
            math.prod(plan.stored[leaf.stored[0]].shape) * leaf.dtype.itemsize
            for leaf in leaves
        )
    write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": placed})
    for kept in (out / PLACE).iterdir():
        if kept.is_dir():  # the journal goes last
            shutil.rmtree(kept)
    shutil.rmtree(out / PLACE)


def _file(plan: Plan, path: str) -> str:
    number = [*plan.leaves].index(path) + 1
    return f"model-{number:05d}-of-{len(plan.leaves):05d}.safetensors"


def _named(plan: Plan, path: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    # Tied leaves once.
    tensors = dict(plan.model.named_buffers()) | weights
    return {leaf.stored[0]: tensors[leaf.names[0]] for leaf in plan.leaves[path]}
