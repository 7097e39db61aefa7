"""Models of transformers with small random configs."""

import torch
import transformers as hf

from tests.shrinking.zoo import in_the_zoo

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
COMMON = {
    **SIZES,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, **COMMON, **ENDS}
PIXELS = {"image_size": 8, "patch_size": 4}


def enter(name, model, config, *names, **sizes):
    """Enters a model with what it is called with: the tokens' numbers, unless there are
    `names` of other inputs.
    """

    def build():
        return made(model, config, *names, **sizes)

    build.__name__ = name
    in_the_zoo(build)


def made(model, config, *names, **sizes):
    """A model and its inputs, for `enter`."""
    inputs = {
        "input_ids": torch.randint(3, 20, (2, 5)),
        "pixel_values": torch.randn(2, 3, 8, 8),
    }
    inputs |= {
        "decoder_input_ids": torch.randint(3, 20, (2, 4)),
        "attention_mask": torch.ones(2, 5).long(),
    }
    inputs |= {
        "input_features": torch.randn(2, 8, 12),
        "input_values": torch.randn(2, 400),
    }
    inputs["attention_mask"][0, 3:] = 0
    own = getattr(hf, config)(**sizes)
    # the grouped product has no float64
    own.use_cache, own._experts_implementation = (False, "batched_mm")
    chosen = {key: inputs[key] for key in names or ("input_ids", "attention_mask")}
    return getattr(hf, model)(own), chosen


def causal(name, stem, **sizes):
    enter(name, f"{stem}ForCausalLM", f"{stem}Config", **sizes)


causal("llama", "Llama", **GROUPED)
causal("mistral", "Mistral", sliding_window=3, **GROUPED)
causal("qwen2", "Qwen2", **GROUPED)
causal("qwen3", "Qwen3", head_dim=6, **GROUPED)
causal("gemma", "Gemma", head_dim=6, **GROUPED)
causal(
    "gemma2",
    "Gemma2",
    head_dim=4,
    sliding_window=3,
    **{**GROUPED, "num_hidden_layers": 2},
)
causal("phi", "Phi", partial_rotary_factor=0.5, **GROUPED)
causal("phi3", "Phi3", **GROUPED)
causal("stablelm", "StableLm", partial_rotary_factor=0.5, **GROUPED)
causal("olmo2", "Olmo2", **GROUPED)
causal("mixtral", "Mixtral", num_local_experts=3, num_experts_per_tok=2, **GROUPED)
causal("opt", "OPT", ffn_dim=20, word_embed_proj_dim=16, **COMMON, **ENDS)
causal(
    "gpt_j",
    "GPTJ",
    n_embd=16,
    n_layer=1,
    n_head=4,
    n_positions=16,
    rotary_dim=2,
    n_inner=20,
    vocab_size=20,
    **ENDS,
)
causal("gpt_neox", "GPTNeoX", **COMMON, **ENDS)
causal("falcon", "Falcon", ffn_hidden_size=20, multi_query=True, **COMMON, **ENDS)
causal("bloom", "Bloom", n_layer=1, n_head=4, vocab_size=20, hidden_size=16, **ENDS)
enter(
    "gpt2",
    "GPT2LMHeadModel",
    "GPT2Config",
    n_embd=16,
    n_layer=1,
    n_head=4,
    n_positions=16,
    n_inner=20,
    vocab_size=20,
    **ENDS,
)
kinds = [[["global", "local"], 1]]
enter(
    "gpt_neo",
    "GPTNeoForCausalLM",
    "GPTNeoConfig",
    attention_types=kinds,
    num_layers=2,
    num_heads=4,
    window_size=3,
    vocab_size=20,
    hidden_size=16,
    intermediate_size=20,
    max_position_embeddings=16,
    **ENDS,
)
enter("bert", "BertModel", "BertConfig", **COMMON)
enter("roberta", "RobertaForMaskedLM", "RobertaConfig", **COMMON)
enter(
    "distilbert",
    "DistilBertModel",
    "DistilBertConfig",
    dim=16,
    n_layers=1,
    n_heads=4,
    hidden_dim=20,
    vocab_size=20,
)
enter(
    "albert",
    "AlbertModel",
    "AlbertConfig",
    embedding_size=10,
    **{**COMMON, "num_hidden_layers": 2},
)
enter("electra", "ElectraModel", "ElectraConfig", embedding_size=10, **COMMON)
enter(
    "deberta",
    "DebertaV2Model",
    "DebertaV2Config",
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
    type_vocab_size=0,
    **COMMON,
)
T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 20,
    "num_layers": 1,
    "num_heads": 4,
    "vocab_size": 20,
    "decoder_start_token_id": 0,
}
enter(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    "input_ids",
    "decoder_input_ids",
    **T5,
)
enter(
    "t5_gated",
    "T5ForConditionalGeneration",
    "T5Config",
    "input_ids",
    "decoder_input_ids",
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    **T5,
)
BART = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 12,
}
BART |= {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "vocab_size": 20,
    "max_position_embeddings": 16,
}
enter(
    "bart",
    "BartModel",
    "BartConfig",
    "input_ids",
    "decoder_input_ids",
    **BART,
    **ENDS,
    decoder_start_token_id=2,
)
enter(
    "hf_vit",
    "ViTForImageClassification",
    "ViTConfig",
    "pixel_values",
    **PIXELS,
    **COMMON,
)
enter(
    "hf_swin",
    "SwinModel",
    "SwinConfig",
    "pixel_values",
    image_size=8,
    patch_size=1,
    embed_dim=8,
    depths=[1, 1],
    num_heads=[2, 4],
    window_size=4,
)
enter(
    "hf_convnext",
    "ConvNextModel",
    "ConvNextConfig",
    "pixel_values",
    patch_size=2,
    hidden_sizes=[6, 8],
    depths=[1, 1],
    num_stages=2,
)
enter(
    "segformer",
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    "pixel_values",
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 12],
    num_attention_heads=[2, 4],
    patch_sizes=[3, 3],
    strides=[2, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=10,
)
enter(
    "clip_vision",
    "CLIPVisionModel",
    "CLIPVisionConfig",
    "pixel_values",
    **PIXELS,
    **COMMON,
)
enter(
    "dinov2",
    "Dinov2Model",
    "Dinov2Config",
    "pixel_values",
    mlp_ratio=2,
    **PIXELS,
    **SIZES,
)
WHISPER = {
    **BART,
    "num_mel_bins": 8,
    "max_source_positions": 6,
    "max_target_positions": 16,
    "pad_token_id": 0,
}
enter(
    "whisper",
    "WhisperModel",
    "WhisperConfig",
    "input_features",
    "decoder_input_ids",
    **WHISPER,
    **ENDS,
    decoder_start_token_id=2,
)
enter(
    "wav2vec2",
    "Wav2Vec2Model",
    "Wav2Vec2Config",
    "input_values",
    conv_dim=[6, 8],
    conv_stride=[5, 4],
    conv_kernel=[10, 4],
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    **COMMON,
)
causal("mamba", "Mamba", state_size=3, conv_kernel=3, time_step_rank=2, **SIZES)
