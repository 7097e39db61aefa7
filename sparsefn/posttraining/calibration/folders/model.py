"""The model of a folder: made without weights, its parts read one at a time, and
written to a new folder.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sparsefn.core.state import Where
from sparsefn.core.tree.where import matching
from sparsefn.nn.checkpoint.folders import (
    INDEX,
    StoredTensor,
    read_json,
    read_tensors,
    some,
    stored_in,
)
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.blocks import Block, is_inside
from sparsefn.posttraining.calibration.folders.disk import (
    PLACE,
    digest_of,
    stored_as,
    without_sparsity,
    write_json,
    write_tensors,
    write_whole,
)

OUTSIDE = ""  # the part that is in no list
_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# which a tokenizer has besides its own; other folders are of other tools
_TEMPLATES = "additional_chat_templates"
# they are not copied
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}


class Leaf(NamedTuple):
    """A parameter or persistent buffer: its names in the module, in the folder, and the
    dtype it is run in.

    >>> Leaf(("lm_head.weight",), ("lm_head.weight",), torch.bfloat16).stored
    ('lm_head.weight',)
    """

    names: tuple[str, ...]
    stored: tuple[str, ...]
    dtype: torch.dtype


class ModelFolder(NamedTuple):
    """The folder of a model, whose weights stay in files.

    path: The folder.
    stored: The tensors in its files, by name.
    model: The model without weights.
    order: The paths of its parts, in the order in which data passes them.
    blocks: The blocks in each part, with the names of their leaves.
    leaves: All leaves of each part; under "" the leaves outside of all parts.
    """

    path: Path
    stored: dict[str, StoredTensor]
    model: Named
    order: list[str]
    blocks: dict[str, list[Block]]
    leaves: dict[str, list[Leaf]]

    def load(self, path: str, device: torch.device) -> tuple[dict[str, Tensor], str]:
        """The weights of a part by their names in the model, and a digest of them;
        buffers go into the model.
        """
        found, digest = read_leaves(self.path, self.stored, self.leaves[path])
        buffers = dict(self.model.module.named_buffers())
        for name in [name for name in found if name in buffers]:
            buffers[name].copy_(found.pop(name))
        return {name: x.to(device) for name, x in found.items()}, digest

    def weights_outside_parts(self, device: torch.device) -> dict[str, Tensor]:
        """The weights of the model; weights outside of all parts have values."""
        own = {name: param.detach() for name, (_, param) in self.model.own.items()}
        return own | self.load(OUTSIDE, device)[0]


def open_folder(
    folder: Path,
    blocks: Sequence[Where] | None,
    make: Callable[[], nn.Module] | None,
    device: torch.device,
) -> ModelFolder:
    """Read what a folder holds, and find its parts: the members of the lists of layers
    that have a block.

    >>> open_folder(Path("/nowhere"), None, None, torch.device("cpu"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the folder of a model, got '/nowhere', which is no
    folder
    """
    if blocks is not None and (
        isinstance(blocks, str) or not isinstance(blocks, Sequence)
    ):
        raise TypeError(
            "stream: expected blocks to be a sequence, with an entry a block, got "
            f"{blocks!r}"
        )
    stored = stored_in("stream", folder)
    dtype = next(
        (_PLAIN[one.dtype] for one in stored.values() if one.dtype in _PLAIN),
        torch.float32,
    )
    model = empty_model(folder, make, dtype)
    for part in model.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    leaves = leaves_in(model, stored)
    lists = _lists_of_layers(model)
    if not lists:
        raise ValueError(
            "stream: expected a model with a list of layers, but the "
            f"{type(model).__name__} has none"
        )
    members: dict[str, list[str]] = {}
    for path, layers in lists.items():
        members[path] = [f"{path}.{name}" for name, _ in layers.named_children()]
    every = [path for paths in members.values() for path in paths]
    places = list[tuple[int, Where]]()
    _by_part(leaves, every)  # which raises where layers share leaves
    asked = [f"{path}.*" for path in every] if blocks is None else blocks
    found: dict[str, list[Block]] = {}
    named = Named.of(model)
    params = {name: param for name, (_, param) in named.own.items()}
    for block in asked:
        chosen = [
            name
            for name, param in matching("blocks", block, params).items()
            if param.ndim > 1
        ]
        own = {_part_of(name, every) for name in chosen}
        if len(own) != 1 or OUTSIDE in own:
            raise ValueError(
                "stream: expected each block to be in one layer of a list "
                f"({some(members)}), but the matrices of {block!r} are {some(chosen)}"
            )
        found.setdefault(str(*own), []).append(Block(block, chosen))
        places.append((every.index(str(*own)), block))
    check_places(places)
    order: list[str] = []
    for paths in members.values():
        if any(path in found for path in paths):
            order += paths
    return ModelFolder(folder, stored, named, order, found, _by_part(leaves, order))


def check_places(places: Sequence[tuple[int, Where]]) -> None:
    """Raise ValueError where blocks, each with its place in the model, are in another
    order than data passes them.

    >>> check_places([(1, "1.*"), (0, "0.*")])
    Traceback (most recent call last):
        ...
    ValueError: stream: expected blocks in the order in which data passes them, but
    '1.*' is before '0.*'
    """
    for (place, block), (after, other) in itertools.pairwise(places):
        if after < place:
            raise ValueError(
                "stream: expected blocks in the order in which data passes them, but "
                f"{block!r} is before {other!r}"
            )


def _lists_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    # The outermost lists whose members are made of other modules: experts are inside of
    # layers, and heads are plain.
    lists: dict[str, nn.Module] = {}
    for path, part in model.named_modules():
        layers = (
            isinstance(part, nn.ModuleList)
            and len(part)
            and all(any(one.children()) for one in part)
        )
        if layers and not any(is_inside(path, other) for other in lists):
            lists[path] = part
    return lists


def _by_part(leaves: Iterable[Leaf], order: Sequence[str]) -> dict[str, list[Leaf]]:
    found: dict[str, list[Leaf]] = {path: [] for path in [OUTSIDE, *order]}
    for leaf in leaves:
        own = {_part_of(name, order) for name in leaf.names}
        if len(own) > 1:
            raise ValueError(
                "stream: expected the leaves of a layer to be its own, but "
                f"{some(leaf.names)} are one tensor: prune the model in memory, with "
                "sf.calibration.in_order"
            )
        found[own.pop()].append(leaf)
    return found


def _part_of(name: str, parts: Iterable[str]) -> str:
    return next((path for path in parts if is_inside(name, path)), OUTSIDE)


def empty_model(
    folder: Path, make: Callable[[], nn.Module] | None, dtype: torch.dtype
) -> nn.Module:
    """The model of a folder in eval mode: parameters on the meta device, buffers in
    memory, as its code makes them.

    >>> layer = empty_model(Path("."), lambda: torch.nn.Linear(2, 1), torch.float32)
    >>> layer.weight.device, layer.training
    (device(type='meta'), False)

    `make` is any function that makes the model. Without it transformers makes the class
    that the folder's config names; `dtype` is for a config that has none. Each
    parameter leaves memory as soon as a layer gets it, so that there is one at a time.
    The global random state is left as it is.
    """
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        if make is None:
            model = _of_config(folder, dtype)
        else:
            model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"stream: expected make() to give a module, got {type(model).__name__}"
        )
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ValueError(
            "stream: expected make() to give buffers in memory, but on meta are "
            f"{some(lost)}"
        )
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    # A parameter that is registered twice is tied, and becomes one empty parameter.
    # Weak keys let it leave memory. The hook is there for all threads; other threads
    # make their models as ever.
    empty: Any = WeakTensorKeyDictionary()
    thread = threading.get_ident()

    def emptied(module: nn.Module, name: str, param: Tensor | None) -> Tensor | None:
        if param is None or param.is_meta or threading.get_ident() != thread:
            return param
        if param not in empty:
            empty[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        found: Tensor = empty[param]
        return found

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _of_config(folder: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    how = stored_as(read_json("stream", folder / "config.json"))
    if how:
        raise ValueError(
            "stream: expected weights that are numbers, but config.json of "
            f"{os.fspath(folder)!r} has a quantization_config, by which they are "
            f"stored as {how!r}: load the model, dequantize or decompress it, and "
            "prune the folder that save_pretrained makes of that"
        )
    config = transformers.AutoConfig.from_pretrained(
        os.fspath(folder), local_files_only=True
    )
    name = (config.architectures or [None])[0]
    kind: Any = getattr(transformers, str(name), None)
    if not hasattr(kind, "_from_config"):
        raise ValueError(
            "stream: expected config.json to name a class of transformers, got "
            f"{name!r}: stream and layer_scores take another model as make="
        )
    if config.dtype is not None:
        dtype = config.dtype
    model: nn.Module = kind._from_config(config, dtype=dtype)
    # What from_pretrained leaves in float32, as 16 bits are too few for it.
    wide = None
    if dtype == torch.float16:
        wide = getattr(model, "_keep_in_fp32_modules", None)
    always = None
    if dtype.itemsize < 4:
        always = getattr(model, "_keep_in_fp32_modules_strict", None)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if {*name.split(".")} & {*(wide or ()), *(always or ())}:
            tensor.data = tensor.data.float()
    return model


def leaves_in(model: nn.Module, stored: Mapping[str, StoredTensor]) -> list[Leaf]:
    """The leaves of a model, and the names that the folder has them under.

    >>> leaves_in(
    ...     torch.nn.Linear(2, 1, bias=False),
    ...     {"weight": StoredTensor("model.safetensors", (1, 2), "F32")},
    ... )
    [Leaf(names=('weight',), stored=('weight',), dtype=torch.float32)]

    A folder of a model's base, without the prefix of its names, serves the model too,
    and the other way round. Raises ValueError for names that are missing or unknown,
    other shapes, and weights that are stored in 8 bits.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    head = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, list[str]] = {}
    unknown = []
    for name in stored:
        known = [
            one
            for one in (name, head + name, name.removeprefix(head))
            if one in tensors
        ]
        if known:
            found.setdefault(known[0], []).append(name)
        elif not _ignored(model, "unexpected", name):
            unknown.append(name)
    alike: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault(id(tensor), []).append(name)
    leaves = []
    missing = []
    for names in alike.values():
        like = tensors[names[0]]
        own = tuple(one for name in names for one in found.get(name, ()))
        if not own and not (
            _ignored(model, "missing", names[0]) and not isinstance(like, nn.Parameter)
        ):
            missing.append(names[0])
        leaves += [Leaf(tuple(names), own, like.dtype)] if own else []
        for one in own:
            _check_like(one, stored[one], like)
    if missing or unknown:
        raise ValueError(
            f"stream: expected the tensors of the {type(model).__name__}, but missing "
            f"are {some(missing)}, and unknown {some(unknown)}: where transformers "
            "renames or joins tensors as it loads the folder, load it once, and write "
            "it with save_pretrained(..., save_original_format=False); stream and "
            "layer_scores take a model of another kind as make="
        )
    return leaves


def _ignored(model: nn.Module, what: str, name: str) -> bool:
    # Transformers says of a model which old names its folders may have, or lack.
    return any(
        re.search(one, name)
        for one in getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ()
    )


def _check_like(name: str, stored: StoredTensor, like: Tensor) -> None:
    if stored.shape != tuple(like.shape):
        raise ValueError(
            f"stream: expected a tensor of shape {tuple(like.shape)} at {name!r}, got "
            f"{stored.shape}"
        )
    if like.is_floating_point() and stored.dtype not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(
            f"stream: expected floats of 16 bits or more at {name!r}, got "
            f"{stored.dtype}: such weights are multiplied by scales, so dequantize "
            "the model, and prune the folder that save_pretrained makes of that"
        )


def read_leaves(
    folder: Path, stored: Mapping[str, StoredTensor], leaves: Iterable[Leaf]
) -> tuple[dict[str, Tensor], str]:
    """The values of some leaves by their first name, and a digest of what was read.

    >>> read_leaves(Path("."), {}, [])[0]
    {}

    In the dtype that the model has them in, as `from_pretrained` does. ValueError for
    tied leaves that differ.
    """
    owner = {name: leaf for leaf in leaves for name in leaf.stored}
    found: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for name, tensor in read_tensors(
        "stream", folder, {name: stored[name].file for name in owner}
    ):
        digests[name] = digest_of(tensor)
        first = owner[name].names[0]
        cast = tensor.to(owner[name].dtype)
        if first in found and not torch.equal(found[first], cast):
            raise ValueError(
                "stream: expected tied tensors to be equal, got others at "
                f"{some(owner[name].stored)}"
            )
        found[first] = cast
    return found, hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def write_part(
    folder: ModelFolder, out: Path, path: str, weights: dict[str, Tensor]
) -> None:
    """Write the weights of a part, and its buffers, under the names that the folder
    has.

    >>> import tempfile
    >>> folder = ModelFolder(
    ...     Path("."), {}, Named.of(torch.nn.Module()), [], {}, {"": []}
    ... )
    >>> with tempfile.TemporaryDirectory() as out:
    ...     write_part(folder, Path(out), "", {})
    ...     os.listdir(out)
    ['model-00001-of-00001.safetensors']
    """
    write_tensors(out / _file(folder, path), _named(folder, path, weights))


def check_part(
    folder: ModelFolder, out: Path, path: str, weights: dict[str, Tensor]
) -> None:
    """Raise ValueError where the weights of a part are not the bits that were written,
    which it names.

    >>> import tempfile
    >>> folder = ModelFolder(
    ...     Path("."), {}, Named.of(torch.nn.Module()), [], {}, {"": []}
    ... )
    >>> with tempfile.TemporaryDirectory() as out:
    ...     write_part(folder, Path(out), "", {})
    ...     check_part(folder, Path(out), "", {})
    """
    tensors = _named(folder, path, weights)
    files = dict.fromkeys(tensors, _file(folder, path))
    for name, old in read_tensors("stream", out, files):
        if digest_of(old) != digest_of(tensors[name]):
            raise ValueError(
                f"stream: expected the run that was killed in {os.fspath(out)!r}, but "
                f"{name!r} comes out otherwise: go on with the same prune, number of "
                "threads and versions, or give another folder out"
            )


def finish(
    folder: ModelFolder, out: Path, config: Mapping[str, Any] | None = None
) -> None:
    """Copy the other files, write the config where it is another one, and the index,
    without which the folder is no model, and remove what the run kept.

    >>> import tempfile
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     tempfile.TemporaryDirectory() as out,
    ... ):
    ...     for name in ("config.json", "model.safetensors"):
    ...         _ = Path(folder, name).write_text("{}")
    ...     Path(out, PLACE).mkdir()
    ...     model = Named.of(torch.nn.Module())
    ...     finish(ModelFolder(Path(folder), {}, model, [], {}, {"": []}), Path(out))
    ...     sorted(os.listdir(out))
    ['config.json', 'model.safetensors.index.json']
    """
    for place, name in [(folder.path, "*"), (folder.path / _TEMPLATES, "*.jinja")]:
        for file in place.glob(name):
            weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
            if file.is_file() and not weights and not file.name.startswith("."):
                (to := out / file.relative_to(folder.path)).parent.mkdir(exist_ok=True)
                write_whole(to, partial(shutil.copyfile, file))
    said = read_json("stream", folder.path / "config.json")
    now = without_sparsity(said) if config is None else config
    if now != said:
        write_json(out / "config.json", now)
    placed = dict[str, str]()
    size = 0
    for path, leaves in folder.leaves.items():
        placed |= {leaf.stored[0]: _file(folder, path) for leaf in leaves}
        size += sum(
            math.prod(folder.stored[leaf.stored[0]].shape) * leaf.dtype.itemsize
            for leaf in leaves
        )
    write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": placed})
    for kept in (out / PLACE).iterdir():
        if kept.is_dir():  # the journal goes last
            shutil.rmtree(kept)
    shutil.rmtree(out / PLACE)


def _file(folder: ModelFolder, path: str) -> str:
    number = [*folder.leaves].index(path) + 1
    return f"model-{number:05d}-of-{len(folder.leaves):05d}.safetensors"


def _named(
    folder: ModelFolder, path: str, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    # Tied leaves once.
    tensors = dict(folder.model.module.named_buffers()) | weights
    return {leaf.stored[0]: tensors[leaf.names[0]] for leaf in folder.leaves[path]}
