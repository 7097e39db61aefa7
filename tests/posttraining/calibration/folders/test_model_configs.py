"""Configs of models with fewer layers: what the classes of transformers are told."""

import pytest
import torch
import transformers
from torch import nn

from sparsefn.posttraining.calibration.folders.model_configs import (
    Cut,
    first_difference,
    smaller_config,
)

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
}
QUERIES = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FULL, LOCAL = "full_attention", "sliding_attention"
MAKE = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64},
    ),
    "gptneo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "vocab_size": 64,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SIZES | QUERIES),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **SIZES,
            **EXPERTS,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **SIZES,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 2,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **SIZES,
            **QUERIES,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": SIZES | QUERIES,
            "vision_config": {**SIZES, "image_size": 16, "patch_size": 8},
            "mm_tokens_per_image": 4,
        },
    ),
    # full attention has heads of 16 entries, in per_layer_config
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **SIZES,
            **QUERIES,
            "global_head_dim": 16,
            "layer_types": [LOCAL, FULL, LOCAL, FULL],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**SIZES, "pad_token_id": 0, "global_attn_every_n_layers": 2},
    ),
}


def made(name, **more):
    """A model without weights, and what its file says."""
    kind, config, sizes = MAKE[name]
    config = getattr(transformers, config)(**sizes, **more)
    with torch.random.fork_rng():
        model = getattr(transformers, kind)._from_config(config).eval()
    return model, {**config.to_diff_dict(), "architectures": [kind]}


@pytest.mark.deep(but=["gpt2-*", "gemma2-*"])
@pytest.mark.parametrize(
    ("name", "path", "kept", "changes"),
    [
        ("llama", "model.layers", (1, 2, 3), {"num_hidden_layers": 3}),
        # heads are as many as layers
        ("gpt2", "transformer.h", (0, 3), {"n_layer": 2}),
        (
            "gemma2",
            "model.layers",
            (0, 2, 3),
            {"num_hidden_layers": 3, "layer_types": [LOCAL, LOCAL, FULL]},
        ),
        (
            "gemma4",
            "model.layers",
            (0, 2, 3),
            {
                "num_hidden_layers": 3,
                "layer_types": [LOCAL, LOCAL, FULL],
                "per_layer_config": {"2": {"head_dim": 16}},
            },
        ),
        (
            "gptneo",
            "transformer.h",
            (1, 2, 3),
            {
                "num_layers": 3,
                "attention_layers": ["local", "global", "local"],
                "attention_types": [
                    [["local"], 1],
                    [["global"], 1],
                    [["local"], 1],
                ],
            },
        ),
        (
            "deepseek",
            "model.layers",
            (1, 3),
            {"num_hidden_layers": 2, "first_k_dense_replace": 1},
        ),
        ("deepseek", "model.layers", (0, 1, 3), {"num_hidden_layers": 3}),
        (
            "llama4",
            "model.layers",
            (0, 2, 3),
            {
                "num_hidden_layers": 3,
                "moe_layers": [2],
                "no_rope_layers": [1, 1, 0],
                "layer_types": ["chunked_attention", "chunked_attention", FULL],
            },
        ),
        (
            "modernbert",
            "model.layers",
            (0, 2, 3),
            {"num_hidden_layers": 3, "layer_types": [FULL, FULL, LOCAL]},
        ),
    ],
)
def test_the_file_says_which_layers_stay(name, path, kept, changes):
    model, said = made(name)
    before = dict(said)
    config, small = smaller_config(said, model, [Cut(path, 4, kept)])
    assert said == before
    assert {k: v for k, v in config.items() if said.get(k) != v} == changes
    assert len(small.get_submodule(path)) == len(kept)
    assert first_difference(model, small, Cut(path, 4, kept)) == ""


@pytest.mark.deep
def test_configs_inside_of_a_config():
    model, said = made("gemma3")
    cuts = [
        Cut("model.vision_tower.encoder.layers", 4, (0, 1, 3)),
        Cut("model.language_model.layers", 4, (2, 3)),
    ]
    config, small = smaller_config(said, model, cuts)
    assert config["vision_config"]["num_hidden_layers"] == 3
    assert config["text_config"]["num_hidden_layers"] == 2
    assert config["text_config"]["layer_types"] == [LOCAL, LOCAL]
    assert said["text_config"]["num_hidden_layers"] == 4
    assert config.keys() == said.keys()
    for cut, size in zip(cuts, (3, 2), strict=True):
        assert len(small.get_submodule(cut.path)) == size


@pytest.mark.deep(but=["qwen2moe-*"])
@pytest.mark.parametrize(
    ("name", "path", "kept", "why"),
    [
        # every second layer has experts
        (
            "qwen2moe",
            "model.layers",
            (0, 2, 3),
            r"'model\.layers\.1\.mlp' is a Qwen2MoeSparseMoeBlock, and was a Qwen2MoeM",
        ),
        # the first layer has no norm
        (
            "modernbert",
            "model.layers",
            (1, 2, 3),
            r"'model\.layers\.0\.attn_norm' is a Identity, and was a LayerNorm",
        ),
    ],
)
def test_layers_that_no_config_can_say_are_refused(name, path, kept, why):
    model, said = made(name)
    told = (
        rf"^stream: expected a config.json that can say which layers of '{path}' stay, "
        rf"but for \[{', '.join(map(str, kept))}\] of 4 none was found that makes the "
        rf"{type(model).__name__} with these layers: {why}"
    )
    with pytest.raises(ValueError, match=told):
        smaller_config(said, model, [Cut(path, 4, kept)])


def test_layers_that_compute_by_their_place_are_refused():
    model, said = made("gpt2", scale_attn_by_inverse_layer_idx=True)
    told = (
        "compute the same in another place, but 'scale_attn_by_inverse_layer_idx' of "
        "config.json has them compute by their place: drop the last layers alone"
    )
    with pytest.raises(ValueError, match=told):
        smaller_config(said, model, [Cut("transformer.h", 4, (0, 2))])
    config, _ = smaller_config(said, model, [Cut("transformer.h", 4, (0, 1))])
    assert config["n_layer"] == 2


class Scaled(nn.Module):
    def __init__(self, scale, place, width=2, shift=0.0):
        super().__init__()
        self.scale, self.place = scale, place
        self.linear = nn.Linear(width, 2)
        self.register_buffer("shift", torch.tensor(shift), persistent=False)


def listed(*layers, **held):
    model = nn.Module()
    model.items = nn.ModuleList(layers)
    vars(model).update(held)
    return model


def test_every_difference_is_told():
    cut = Cut("items", 3, (0, 2))
    whole = listed(
        Scaled(1.0, 0), Scaled(2.0, 1), Scaled(3.0, 2, shift=1.0), depth=3, kinds=[1, 2]
    )
    first = Scaled(1.0, 0)
    for second, text in (
        (Scaled(3.0, 1, shift=1.0), ""),
        (Scaled(3.0, 2, shift=1.0), ""),
        (Scaled(2.0, 1, shift=1.0), "'scale' of 'items.1' is another"),
        (Scaled(3.0, 0, shift=1.0), "'place' of 'items.1' is another"),
        (Scaled(3.0, 1), "'shift' of 'items.1' has other values"),
        (
            Scaled(3.0, 1, width=3, shift=1.0),
            "'items.1.linear.weight' has the shape (2, 3), and had (2, 2)",
        ),
        (nn.Linear(2, 2), "'items.1' is a Linear, and was a Scaled"),
    ):
        small = listed(first, second, depth=2, kinds=[2])
        assert first_difference(whole, small, cut) == text
    good = Scaled(3.0, 1, shift=1.0)
    for small, text in (
        (listed(first, good, good, depth=2), "'items.2' is new"),
        (listed(first, depth=2), "'items.1' is gone"),
        (listed(first, good, depth=1), "'depth' of '' is another"),
        (listed(first, good, kinds=[3]), "'kinds' of '' is another"),
    ):
        assert first_difference(whole, small, cut) == text
