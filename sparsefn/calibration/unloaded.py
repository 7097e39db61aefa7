"""A model without its weights, and which tensors of a folder are its leaves."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sparsefn.calibration.folders import (
    StoredTensor,
    digest_of,
    read_json,
    read_tensors,
    some,
    stored_as,
)


class Leaf(NamedTuple):
    """A parameter or persistent buffer: its names in the module, in the folder, and the
    dtype it is run in.

    >>> Leaf(("lm_head.weight",), ("lm_head.weight",), torch.bfloat16).stored
    ('lm_head.weight',)
    """

    names: tuple[str, ...]
    stored: tuple[str, ...]
    dtype: torch.dtype


def unloaded(
    folder: Path, make: Callable[[], nn.Module] | None, dtype: torch.dtype
) -> nn.Module:
    """The model of a folder in eval mode: parameters on the meta device, buffers in
    memory, as its code makes them.

    >>> layer = unloaded(Path("."), lambda: torch.nn.Linear(2, 1), torch.float32)
    >>> layer.weight.device, layer.training
    (device(type='meta'), False)

    `make` is any function that makes the model. Without it transformers makes the class
    that the folder's config names; `dtype` is for a config that has none. Each
    parameter leaves memory as soon as a layer gets it, so that there is one at a time.
    The global random state is left as it is.
    """
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model = _named(folder, dtype) if make is None else make()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"stream: expected make() to give a module, got {type(model).__name__}"
        )
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            "stream: expected make() to give buffers in memory, but on meta are "
            f"{some(lost)}"
        )
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    # A parameter that is registered twice is tied, and becomes one empty parameter.
    # Weak keys let it leave memory. The hook is there for all threads, and others make
    # their models as ever.
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


def _named(folder: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        os.fspath(folder), local_files_only=True
    )
    if how := stored_as(read_json(folder / "config.json")):
        raise ValueError(
            "stream: expected weights that are numbers, but config.json of "
            f"{os.fspath(folder)!r} has a quantization_config, by which they are "
            f"stored as {how!r}: load the model, dequantize or decompress it, and "
            "prune the folder that save_pretrained makes of that"
        )
    name = (config.architectures or [None])[0]
    kind: Any = getattr(transformers, str(name), None)
    if not hasattr(kind, "_from_config"):
        raise ValueError(
            "stream: expected config.json to name a class of transformers, got "
            f"{name!r}: pass make="
        )
    dtype = dtype if config.dtype is None else config.dtype
    model: nn.Module = kind._from_config(config, dtype=dtype)
    # What from_pretrained leaves in float32, as 16 bits are too few for it.
    wide = (
        getattr(model, "_keep_in_fp32_modules", None)
        if dtype == torch.float16
        else None
    )
    always = (
        getattr(model, "_keep_in_fp32_modules_strict", None)
        if dtype.itemsize < 4
        else None
    )
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
            f"are {some(missing)}, and unknown {some(unknown)}: make= gives a model "
            "of another kind; where transformers renames or joins tensors as it "
            "loads the folder, load it once, and write it with save_pretrained(..., "
            "save_original_format=False)"
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
        folder, {name: stored[name].file for name in owner}
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
