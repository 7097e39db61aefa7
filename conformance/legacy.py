"""The third table: folders that compressed-tensors 0.13 writes and reads, against
`sf.checkpoint.read_legacy`.
"""

import copy
import json
import tempfile
from pathlib import Path

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsefn as sf

Row = tuple[str, str, str, str]  # format, dtype, masks, equal
FORMATS = {"sparse-bitmask": BitmaskConfig, "sparse-24-bitmask": Sparse24BitMaskConfig}
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}


def pruned(format: str, dtype: torch.dtype) -> nn.Module:
    """A LLaMA with random weights, whose linear layers keep 2 of 4 or about half."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.data
            if format == "sparse-24-bitmask":
                kept = sf.masks.topk_mask(
                    weight.float().abs(), None, pattern=sf.patterns.nm(2, 4)
                )
            else:
                kept = torch.rand(weight.shape) < 0.5
            layer.weight.data = torch.where(kept, weight, 0.0)
    return model


def write(model: nn.Module, format: str, folder: Path) -> ModelCompressor:
    """The folder that the library writes."""
    compressor = ModelCompressor(sparsity_config=FORMATS[format](targets=["Linear"]))
    tensors = compressor.compress(copy.deepcopy(model))
    whole = {name: x.contiguous() for name, x in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    config = model.config.to_json_string()
    (folder / "config.json").write_text(config, encoding="utf-8")
    compressor.update_config(folder)
    return compressor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of equal dtype and shape."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def row(format: str, dtype: torch.dtype) -> Row:
    """What we read is what the library reads, and what the model had."""
    model = pruned(format, dtype)
    weights = model.state_dict()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compressor = write(model, format, folder)
        state = sf.checkpoint.read_legacy(folder)
        theirs = dict(compressor.sparsity_compressor.decompress(str(folder)))
    masks = [path for path, mask in state.masks.items() if mask.ndim]
    linear = [
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    assert sorted(masks) == sorted(linear), (masks, linear)
    assert {*linear} <= {*theirs} <= {*state.params}
    equal = all(same_bits(state.params[path], x) for path, x in theirs.items())
    equal = equal and all(
        same_bits(state.params[path], weights[path]) for path in masks
    )
    shown = str(dtype).removeprefix("torch.")
    return format, shown, str(len(masks)), "yes" if equal else "no"


if __name__ == "__main__":
    print(json.dumps([row(format, dtype) for format in FORMATS for dtype in DTYPES]))
