"""Tiny language models of transformers, and the folders that they write."""

import torch
import transformers

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}


def llama(layers=3, **other):
    config = transformers.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **SIZES | other)
    return transformers.LlamaForCausalLM(config)


def gemma(layers=3):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    sizes = SIZES | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 3, "layer_types": kinds}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(num_hidden_layers=layers, **sizes))


def gpt2(layers=3):
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))


def opt(layers=3):
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 16}
    config = transformers.OPTConfig(vocab_size=64, hidden_size=32, word_embed_proj_dim=32, **sizes)
    return transformers.OPTForCausalLM(config)


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))


def folder_of(make, path, dtype=torch.float32, **sizes):
    """A folder of the model, drawn from seed 0, in several files."""
    torch.manual_seed(0)
    model = make(**sizes).to(dtype)
    with torch.no_grad():  # transformers starts biases and norms alike
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    model.save_pretrained(path, max_shard_size="30KB")
    return path
