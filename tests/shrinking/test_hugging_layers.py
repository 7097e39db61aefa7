"""Models of transformers of several families lose layers: outputs, configs, and what
they generate.
"""

import pytest
import torch

import sparsefn as sf
from tests.shrinking import compare
from tests.shrinking.zoo import settled
from tests.shrinking.zoo_hugging import (
    BART,
    COMMON,
    ENDS,
    GROUPED,
    PIXELS,
    T5,
    WHISPER,
    made,
)

THREE = {"num_hidden_layers": 3}
FULL = "full_attention"
SLIDES = "sliding_attention"

# The class, its sizes, the layers that go, and what changes in the config. Many sizes
# are as large as numbers of layers.
DECODERS = {
    "qwen2": (
        "Qwen2",
        {**GROUPED, **THREE, "use_sliding_window": True, "sliding_window": 3}
        | {"max_window_layers": 1},
        {1},
        {"num_hidden_layers": 2, "layer_types": [FULL, SLIDES]},
    ),
    "qwen3": (
        "Qwen3",
        {**GROUPED, **THREE, "head_dim": 6},
        {0, 1},
        {"num_hidden_layers": 1, "layer_types": [FULL]},
    ),
    "gemma2": (
        "Gemma2",
        {**GROUPED, **THREE, "head_dim": 4, "sliding_window": 3},
        {0, 2},
        {"num_hidden_layers": 1, "layer_types": [FULL]},
    ),
    "gemma3": (
        "Gemma3",
        {**GROUPED, **THREE, "head_dim": 4, "sliding_window": 3}
        | {"layer_types": [SLIDES, FULL, SLIDES]},
        {0},
        {"num_hidden_layers": 2, "layer_types": [FULL, SLIDES]},
    ),
    "mistral": (
        "Mistral",
        {**GROUPED, **THREE, "sliding_window": 3},
        {0},
        {"num_hidden_layers": 2},
    ),
    "gpt neox": (
        "GPTNeoX",
        {**COMMON, **ENDS, **THREE},
        {2},
        {"num_hidden_layers": 2},
    ),
    "opt": (
        "OPT",
        {**COMMON, **ENDS, **THREE, "ffn_dim": 20, "word_embed_proj_dim": 16},
        {1},
        {"num_hidden_layers": 2},
    ),
}
OTHERS = {
    "t5": (
        ("T5ForConditionalGeneration", "T5Config", "input_ids", "decoder_input_ids"),
        {**T5, "num_layers": 2, "num_decoder_layers": 1},
        {2, 3},
        {"num_layers": 1},
    ),
    "whisper": (
        ("WhisperModel", "WhisperConfig", "input_features", "decoder_input_ids"),
        {**WHISPER, **ENDS, "encoder_layers": 2, "decoder_start_token_id": 2},
        {0},
        {"encoder_layers": 1},
    ),
    "vit": (
        ("ViTForImageClassification", "ViTConfig", "pixel_values"),
        {**PIXELS, **COMMON, **THREE},
        {0, 2},
        {"num_hidden_layers": 1},
    ),
    "swin": (
        ("SwinModel", "SwinConfig", "pixel_values"),
        {"image_size": 8, "patch_size": 1, "embed_dim": 8, "window_size": 4}
        | {"depths": [2, 2], "num_heads": [2, 4]},
        {1},
        {"depths": [1, 2]},
    ),
    "convnext": (
        ("ConvNextModel", "ConvNextConfig", "pixel_values"),
        {"patch_size": 2, "hidden_sizes": [6, 8], "num_stages": 2, "depths": [2, 3]},
        {0, 4},
        {"depths": [1, 2]},
    ),
}
# Their norms stay after the sums, so that no layer goes as a whole.
PROGRAMS = {
    "bert": (("BertModel", "BertConfig"), {**COMMON, "num_hidden_layers": 2}, {0}),
    "bart": (
        ("BartModel", "BartConfig", "input_ids", "decoder_input_ids"),
        {**BART, **ENDS, "encoder_layers": 2, "decoder_start_token_id": 2},
        {1, 2},
    ),
}


def without(names, sizes, gone):
    """A model, its masks without layers, and what shrink makes, proven equal."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, example = settled(*made(*names, **sizes))
    layers = sf.shrinking.layers(model, example, by="module")
    masks = layers.masks(gone)
    left, (result,) = compare.check_layers(model, example, layers, masks, forms=[None])
    assert left == compare.entries(result.module) == layers.cost(gone)
    return model, example, masks, result


def check_class(model, example, result, changes):
    """The class stays, and what changes in its config gives the same model anew."""
    small = result.module
    assert (result.form, result.notes) == ("class", ())
    assert type(small) is type(model)
    before = model.config.to_dict()
    after = small.config.to_dict()
    assert {key: after[key] for key in after if after[key] != before[key]} == changes
    again = type(model)(type(model.config).from_dict(after)).double().eval()
    again.load_state_dict(small.state_dict())
    wanted = compare.outputs(small, example)
    compare.check_outputs(wanted, again, example, "a new model")


@pytest.mark.deep
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_without_layers_keeps_its_class_and_generates(name):
    stem, sizes, gone, changes = DECODERS[name]
    config = f"{stem}{'Text' if stem == 'Gemma3' else ''}Config"
    names = (f"{stem}ForCausalLM", config)
    model, example, masks, result = without(names, sizes, gone)
    check_class(model, example, result, changes)
    state = sf.State(sf.modules.params_of(model), masks)
    masked = sf.modules.bake(model, state)
    options = {"use_cache": True, "do_sample": False, "min_new_tokens": 5}
    ids = example["input_ids"]
    wanted = masked.generate(ids, max_new_tokens=5, **options)
    got = result.module.generate(ids, max_new_tokens=5, **options)
    assert torch.equal(got, wanted)


@pytest.mark.deep(but=["convnext"])
@pytest.mark.parametrize("name", OTHERS)
def test_an_encoder_without_layers_keeps_its_class(name):
    names, sizes, gone, changes = OTHERS[name]
    model, example, _, result = without(names, sizes, gone)
    check_class(model, example, result, changes)


@pytest.mark.deep
@pytest.mark.parametrize("name", PROGRAMS)
def test_layers_before_norms_go_from_the_program(name):
    names, sizes, gone = PROGRAMS[name]
    _, _, _, result = without(names, sizes, gone)
    assert result.form == "program"
    (note,) = result.notes
    assert note.startswith("pruned branches are no whole items of a list, in ")
