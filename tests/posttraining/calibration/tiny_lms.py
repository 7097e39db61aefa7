"""Tiny language models of transformers, the folders that they write, and ways to prune
them.
"""

import os
from contextlib import contextmanager

import torch
import transformers
from safetensors.torch import load_file

import sparsefn as sf

transformers.utils.logging.disable_progress_bar()
WORDS = torch.randint(2, 64, (6, 10), generator=torch.Generator().manual_seed(1))
BATCHES = [{"input_ids": words} for words in WORDS.split(2)]

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
}


def llama(layers=3, **other):
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, num_key_value_heads=2, **SIZES | other
    )
    return transformers.LlamaForCausalLM(config)


def gemma(layers=3):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    sizes = SIZES | {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "sliding_window": 3,
        "layer_types": kinds,
    }
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(num_hidden_layers=layers, **sizes)
    )


def gpt2(layers=3):
    sizes = {
        "n_embd": 32,
        "n_layer": layers,
        "n_head": 4,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))


def opt(layers=3):
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 16,
    }
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, word_embed_proj_dim=32, **sizes
    )
    return transformers.OPTForCausalLM(config)


def neox(layers=3):
    config = transformers.GPTNeoXConfig(num_hidden_layers=layers, **SIZES)
    return transformers.GPTNeoXForCausalLM(config)


def qwen_moe(layers=4):
    """Layer 1 has an MLP, the others have experts."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
        "num_key_value_heads": 2,
    }
    config = transformers.Qwen2MoeConfig(num_hidden_layers=layers, **SIZES, **experts)
    return transformers.Qwen2MoeForCausalLM(config)


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, **sizes)
    )


def folder_of(make, path, dtype=torch.float32, **sizes):
    """A folder of the model, drawn from seed 0, in several files."""
    torch.manual_seed(0)
    model = make(**sizes).to(dtype)
    with torch.no_grad():  # transformers starts biases and norms alike
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    model.save_pretrained(path, max_shard_size="30KB", save_original_format=False)
    return path


def wanda(stats, axis=0, sparsity=0.5):
    return sf.methods.wanda(
        sparsity, stats, pattern=sf.patterns.row_balanced(axis), where=list(stats)
    )


def sparsegpt(stats, axis=0):
    pattern = sf.patterns.nm(2, 4, axis=1 - axis)
    return sf.methods.sparsegpt(
        None, stats, pattern=pattern, block=16, where=list(stats)
    )


def files(folder):
    """The bytes of the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def differing(folder, other):
    """What differs between two folders, by file: the bytes, or which tensors, in how
    many entries and how far.
    """
    found, theirs = files(folder), files(other)
    told = dict.fromkeys(found.keys() ^ theirs.keys(), "is in one only")
    for name in [
        name for name in found.keys() & theirs.keys() if found[name] != theirs[name]
    ]:
        told[name] = "other bytes"
        if name.endswith(".safetensors"):
            pairs = [
                (key, x, load_file(other / name)[key])
                for key, x in load_file(folder / name).items()
            ]
            told[name] = {
                k: (int((x != y).sum()), float((x - y).abs().max()))
                for k, x, y in pairs
                if not x.equal(y)
            }
    return told


def weights_in(folder):
    """All tensors of a folder, by name."""
    return {
        name: x
        for file in folder.glob("*.safetensors")
        for name, x in load_file(file).items()
    }


@contextmanager
def ending_at(number, error=KeyboardInterrupt):
    """While it is entered, the file of a number does not get its name, nor does any
    after it.
    """
    replaced = os.replace

    def until(*args):
        nonlocal number
        number -= 1
        if number < 0:
            raise error
        replaced(*args)

    os.replace = until
    try:
        yield
    finally:
        os.replace = replaced
