"""The models of the zoo without residual layers give the outputs of the masked ones."""

import pytest

import sparsefn as sf
from tests.shrinking import compare, zoo

# How many layers each model has; the others have none.
COUNTS = {
    "resnet basic": 2,
    "wide resnet": 1,
    "stochastic depth": 2,
    "mobilenet v2": 2,
    "shufflenet v1": 2,
    "convnext": 2,
    "mobilenet v3": 1,
    "efficientnet": 2,
    "group norms": 1,
    "rolled and added": 1,
    "vit": 4,
    "vit with fused queries keys values": 4,
    "grouped queries": 4,
    "windows with a table of relative positions": 6,
    "grids of attention": 2,
    "mixer": 2,
    "spatial gating units": 2,
    "linear attention": 2,
    "attention by einsum": 1,
    "encoder of torch": 4,
    "decoder of torch": 4,
    "temporal convolutions": 1,
    "gated temporal convolutions": 2,
    "tied embedding and head": 1,
    "experts by einsum": 1,
    "rotary of a part": 1,
    "writes in place": 1,
    "llama": 2,
    "mistral": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma": 2,
    "gemma2": 4,
    "phi": 1,
    "phi3": 2,
    "stablelm": 2,
    "olmo2": 2,
    "mixtral": 2,
    "opt": 2,
    "gpt j": 1,
    "gpt neox": 1,
    "falcon": 1,
    "bloom": 2,
    "gpt2": 2,
    "gpt neo": 4,
    "bert": 2,
    "roberta": 2,
    "distilbert": 2,
    "electra": 2,
    "deberta": 2,
    "t5": 5,
    "t5 gated": 5,
    "bart": 5,
    "hf vit": 2,
    "hf swin": 4,
    "hf convnext": 2,
    "segformer": 4,
    "clip vision": 2,
    "dinov2": 2,
    "whisper": 5,
    "wav2vec2": 2,
}
# Of each idea one.
SHRUNK = (
    "gated temporal convolutions",
    "grids of attention",
    "hf convnext",
    "mobilenet v2",
    "shufflenet v1",
)


# The models are in float64 as they are: `.double()` would make constants of a program
# wider that the model's own code rounds to float32, as DeBERTa does.
@pytest.mark.deep(but=["gated temporal convolutions", "mobilenet v2"])
@pytest.mark.parametrize("name", COUNTS)
def test_programs_without_layers_equal_the_masked_models(name):
    model, example = zoo.MODELS[name]()
    layers = sf.shrinking.layers(model, example)
    count = len(layers)
    assert count == COUNTS[name]
    if count == 1:
        check_without_the_only_layer(model, example, layers)
        return
    choices = [{0}]
    if count > 2:
        choices.append({*range(1, count)})
    for gone in choices:
        masks = layers.masks(gone)
        left, _ = compare.check_layers(model, example, layers, masks)
        assert left == layers.cost(gone)


def check_without_the_only_layer(model, example, layers):
    with pytest.raises(ValueError, match="one of the model's 1 layers to stay"):
        layers.masks([0])
    (layer,) = layers
    masks = {
        name: mask & (name not in layer.leaves)
        for name, mask in layers.masks([]).items()
    }
    left, _ = compare.check_layers(model, example, layers, masks)
    assert left == layers.cost() - layer.entries


@pytest.mark.deep(but=["mobilenet v2"])
@pytest.mark.parametrize("name", SHRUNK)
def test_what_shrink_makes_without_a_layer_equals_the_masked_model(name):
    model, example = zoo.MODELS[name]()
    layers = sf.shrinking.layers(model, example)
    gone = {len(layers) - 1}
    masks = layers.masks(gone)
    _, (made,) = compare.check_layers(model, example, layers, masks, forms=[None])
    assert compare.entries(made.module) == layers.cost(gone)
    assert made.stays == ()


@pytest.mark.deep(but=["vgg", "one layer used three times"])
@pytest.mark.parametrize("name", [name for name in zoo.MODELS if name not in COUNTS])
def test_models_without_layers_are_refused(name):
    model, example = zoo.MODELS[name]()
    with pytest.raises(ValueError, match="expected a model that adds") as error:
        sf.shrinking.layers(model, example)
    kind = type(model).__name__
    assert f"x + f(x), got none of such layers in the {kind}" in str(error.value)
