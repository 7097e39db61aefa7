"""Folders of SparseML and llm-compressor that store a bit for each weight."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsefn.core.state import State
from sparsefn.masks.packing import unpack
from sparsefn.nn.checkpoint.folders import read_json, read_tensors, some, stored_in
from sparsefn.nn.checkpoint.states import INTEGERS

_FORMATS = {
    "sparse-bitmask": ("shape", "compressed", "bitmask", "row_offsets"),
    "sparse-24-bitmask": ("shape", "compressed", "bitmask"),
}
_NEWEST = (0, 14)  # compressed-tensors 0.15 neither writes nor reads the formats


def read_legacy(folder: str | os.PathLike[str]) -> State:
    """The weights and masks in a folder that SparseML or llm-compressor wrote.

    >>> import json, pathlib, tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     config = {"format": "sparse-bitmask"}
    ...     _ = pathlib.Path(folder, "config.json").write_text(
    ...         json.dumps({"quantization_config": {"sparsity_config": config}})
    ...     )
    ...     tensors = {
    ...         "fc.shape": torch.tensor([2, 3]),
    ...         "fc.bitmask": torch.tensor([[0b101], [0b010]], dtype=torch.uint8),
    ...         "fc.compressed": torch.tensor([1.0, 2.0, 3.0]),
    ...         "fc.row_offsets": torch.tensor([0, 2]),
    ...     }
    ...     save_file(tensors, pathlib.Path(folder, "model.safetensors"))
    ...     sf.checkpoint.read_legacy(folder).params
    {'fc.weight': tensor([[1., 0., 2.],
            [0., 3., 0.]])}

    compressed-tensors 0.14 was the last that read the formats `sparse-bitmask` and
    `sparse-24-bitmask`. This needs safetensors, and none of those libraries.

    Args:
        folder: A folder with config.json and safetensors, in one file or several.

    Returns:
        A State of flat dicts by path, on the CPU. A tensor that is stored with a
        bitmask has that mask, and 0.0 where it is pruned; `sparse-bitmask` calls every
        zero pruned. All other tensors are dense: their masks are 0-d True. Values are
        copied bit by bit. Quantised values stay as they are stored, with their scales
        as leaves beside them (`<path>_scale`).

    Raises:
        ValueError: The folder is none or not whole, its config names another format or
            a newer version, parts of a tensor are missing, or they do not fit each
            other. The text names the file or the path.
        TypeError: `folder` is no path, or a part has another dtype.

    `model.load_state_dict(state.params)` writes the weights to a model of the same
    class. `sf.from_masks(state.masks).init(state.params)` starts to train.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"read_legacy: expected a path to a folder, got {type(folder).__name__}"
        )
    path = Path(folder)
    stored = stored_in("read_legacy", path)
    format = _format_in(read_json("read_legacy", path / "config.json"))
    parts = _FORMATS[format]
    files = {name: tensor.file for name, tensor in stored.items()}
    tensors = dict(read_tensors("read_legacy", path, files))
    params: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for leaf, prefix in _leaves_in(tensors).items():
        names = [f"{prefix}.{part}" for part in parts]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ValueError(
                f"read_legacy: expected {some(missing)} beside "
                f"{prefix + '.bitmask'!r}: the folder is half written"
            )
        if leaf in tensors:
            raise ValueError(
                f"read_legacy: expected {leaf!r} or {prefix + '.bitmask'!r}, got both"
            )
        shape, values, bitmask, *offsets = (tensors.pop(name) for name in names)
        masks[leaf] = _mask_of(prefix, shape, bitmask)
        if format == "sparse-24-bitmask":
            _check_two_of_four(prefix, masks[leaf])
        else:
            _check_offsets(prefix, offsets[0], masks[leaf])
        params[leaf] = _weights_of(prefix, values, masks[leaf])
    alone = [name for name in tensors if name.endswith(".compressed")]
    if alone:
        prefix = alone[0].removesuffix(".compressed")
        raise ValueError(
            f"read_legacy: expected {prefix + '.bitmask'!r} beside {alone[0]!r}: the "
            "folder is half written"
        )
    for leaf, tensor in tensors.items():
        params[leaf] = tensor
        masks[leaf] = torch.ones((), dtype=torch.bool, device="cpu")
    return State(
        {leaf: params[leaf] for leaf in sorted(params)},
        {leaf: masks[leaf] for leaf in sorted(params)},
    )


def _format_in(config: object) -> str:
    # SparseML wrote `sparsity_config` itself, then inside of `compression_config`;
    # llm-compressor writes it inside of `quantization_config`.
    whole = _dict(config)
    outer = _dict(whole.get("quantization_config") or whole.get("compression_config"))
    outer = outer or whole
    name = _dict(outer.get("sparsity_config")).get("format")
    if not isinstance(name, str) or name not in _FORMATS:
        raise ValueError(
            "read_legacy: expected a config whose sparsity_config has the format "
            f"{' or '.join(map(repr, _FORMATS))}, got {name!r}: read other folders "
            "with from_pretrained of transformers, and masks with sf.masks.from_zeros"
        )
    version = outer.get("version")
    if version is not None and not _is_known(str(version)):
        newest = ".".join(map(str, _NEWEST))
        raise ValueError(
            f"read_legacy: expected the format {name!r} of compressed-tensors {newest} "
            f"or older, got version {version!r}, whose files are not known"
        )
    return name


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_known(version: str) -> bool:
    numbers = version.split(".")[:2]
    return (
        len(numbers) == 2
        and all(number.isdecimal() for number in numbers)
        and tuple(map(int, numbers)) <= _NEWEST
    )


def _leaves_in(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    # From the path of a leaf to the prefix of its parts: until compressed-tensors 0.8
    # `fc.weight` and every other tensor by its whole name, then `fc` for `fc.weight`.
    prefixes = [
        name.removesuffix(".bitmask") for name in tensors if name.endswith(".bitmask")
    ]
    if not prefixes:
        raise ValueError(
            "read_legacy: expected tensors with a bitmask, as the config says, got "
            f"{some(sorted(tensors))}"
        )
    if any(prefix.endswith(".weight") for prefix in prefixes):
        return {prefix: prefix for prefix in prefixes}
    return {f"{prefix}.weight": prefix for prefix in prefixes}


def _mask_of(prefix: str, shape: Tensor, bitmask: Tensor) -> Tensor:
    # A row of a mask begins with a new byte.
    name = f"{prefix}.bitmask"
    for part, tensor, dtype in (
        (f"{prefix}.shape", shape, torch.int64),
        (name, bitmask, torch.uint8),
    ):
        if tensor.dtype != dtype:
            raise TypeError(
                f"read_legacy: expected a tensor of {dtype} at {part!r}, got "
                f"{tensor.dtype}"
            )
    size = shape.flatten().tolist()
    if not size or min(size) < 0:
        raise ValueError(
            f"read_legacy: expected the sizes of a tensor at '{prefix}.shape', got "
            f"{size}"
        )
    *rows, columns = size
    stored = (*rows, -(-columns // 8))
    if bitmask.shape != stored:  # before memory of that size is asked for
        raise ValueError(
            f"read_legacy: expected a bitmask of shape {stored} at {name!r}, got "
            f"{tuple(bitmask.shape)}"
        )
    whole = torch.empty(*rows, 8 * stored[-1], dtype=torch.bool, device="meta")
    bits = unpack({name: bitmask.flatten()}, {name: whole})[name]
    if bool(bits[..., columns:].any()):
        raise ValueError(
            f"read_legacy: expected zeros after bit {columns} of each row at {name!r}: "
            "its bytes are damaged"
        )
    mask: Tensor = bits[..., :columns].contiguous()
    return mask


def _check_offsets(prefix: str, offsets: Tensor, mask: Tensor) -> None:
    # Where in the values each row starts, as the writer adds: along the first axis.
    counts = mask.sum(-1)
    if not torch.equal(offsets, counts.cumsum(0) - counts):
        raise ValueError(
            f"read_legacy: expected '{prefix}.row_offsets' to fit the bitmask: its "
            "bytes are damaged"
        )


def _check_two_of_four(prefix: str, mask: Tensor) -> None:
    if mask.numel() % 4 or bool((mask.reshape(-1, 4).sum(-1) != 2).any()):
        raise ValueError(
            "read_legacy: expected 2 set bits for every 4 weights at "
            f"'{prefix}.bitmask', which is sparse-24-bitmask: its bytes are damaged"
        )


def _weights_of(prefix: str, values: Tensor, mask: Tensor) -> Tensor:
    kept = int(mask.sum())
    if values.numel() != kept:
        raise ValueError(
            f"read_legacy: expected {kept} values at '{prefix}.compressed', as the "
            f"bitmask says, got {values.numel()}"
        )
    bits = values.view(INTEGERS[values.element_size()])
    leaf = bits.new_zeros(mask.shape).masked_scatter_(mask, bits)
    return leaf.view(values.dtype)
