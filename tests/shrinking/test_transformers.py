"""Models of transformers get smaller, are saved with smaller configs, and generate what
the masked ones do.
"""

import pytest
import torch
import transformers
from torch import nn

import sparsefn as sf

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 64,
    "intermediate_size": 48,
}
WORDS = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=4, **SIZES)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=8, n_positions=16, n_inner=48
        )
    ),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(max_position_embeddings=16, **SIZES)
    ),
}


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def half(name):
    """A model in which half of the units are pruned, with the state."""
    model = KINDS[name]().eval()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    groups, params = sf.shrinking.groups(model, WORDS), sf.modules.params_of(model)
    algorithm = sf.one_shot(0.5, pattern=groups.pattern())
    return model, algorithm.update(algorithm.init(params), params, 0)


@pytest.mark.deep(but=["class-bert"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["class", "program"])
def test_half_of_the_units_go_and_outputs_stay(name, form):
    model, state = half(name)
    small = sf.shrinking.smaller(model, state, WORDS, form=form).module
    inner = [
        p.shape
        for path, p in small.named_parameters()
        if "mlp" in path or "intermediate" in path
    ]
    assert any(24 in shape for shape in inner) and not any(
        48 in shape for shape in inner
    )
    with torch.no_grad():
        wanted, got = sf.modules.call(model, state, **WORDS)[0], small(**WORDS)[0]
        # the masks change something
        assert not torch.allclose(wanted, model(**WORDS)[0], atol=0.1)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.deep
def test_a_smaller_llama_is_saved_with_a_smaller_config_and_generates(tmp_path):
    model, state = half("llama")
    small = sf.shrinking.smaller(model, state, WORDS).module
    assert (small.config.intermediate_size, small.config.num_attention_heads) == (24, 4)
    small.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**WORDS)[0], small(**WORDS)[0])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    masked = sf.modules.bake(model, state)
    assert torch.equal(
        small.generate(**WORDS, **settings), masked.generate(**WORDS, **settings)
    )


def step(**sizes):
    """Layers of one head count each, as `per_layer_config` says."""
    made = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = transformers.Step3p7TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        num_key_value_heads=4,
        num_sliding_attention_heads=4,
        head_dim=8,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        pad_token_id=0,
    )
    model = made.Step3p7TextModel(config).eval()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def without_heads(model, pruned):
    """A state without the last heads of keys of some layers, and what reads them."""
    params = sf.modules.params_of(model)
    masks = {path: torch.ones_like(x, dtype=torch.bool) for path, x in params.items()}
    for path, mask in masks.items():
        parts = path.split(".")
        if "self_attn" in parts and mask.ndim == 2:
            heads = pruned.get(int(parts[parts.index("layers") + 1]), 0)
            units = mask.T if "o_proj" in parts else mask
            units[len(units) * (4 - heads) // 4 :] = False
    return sf.State(params, masks)


def loaded(model, path):
    """The model from its folder, which computes the same."""
    model.save_pretrained(path)
    again = type(model).from_pretrained(path).eval()
    torch.testing.assert_close(again(**WORDS)[0], model(**WORDS)[0])
    return again


@pytest.mark.deep
def test_layers_of_different_heads_are_in_the_config(tmp_path):
    model = step()
    state = without_heads(model, {1: 2, 2: 1, 3: 1})
    small = sf.shrink(model, state, WORDS)
    masked = sf.modules.call(model, state, **WORDS)[0]
    torch.testing.assert_close(small(**WORDS)[0], masked, atol=1e-4, rtol=1e-4)
    layers = loaded(small, tmp_path).config.per_layer_config
    heads = [(x.num_attention_heads, x.num_key_value_heads) for x in layers]
    assert heads == [(8, 4), (2, 2), (6, 3), (3, 3)]
    assert [x.sliding_window for x in layers] == [16] * 4


@pytest.mark.deep
def test_layers_keep_their_numbers_when_others_go(tmp_path):
    model = step()
    layers = sf.shrinking.layers(model, WORDS, by="module")
    state = sf.State(sf.modules.params_of(model), layers.masks([0, 3]))
    small = sf.shrink(model, state, WORDS, groups=layers)
    kept = loaded(small, tmp_path).config.per_layer_config
    assert [x.num_attention_heads for x in kept] == [4, 8]


@pytest.mark.deep
def test_a_number_that_is_a_size_by_chance_stays():
    # No example of 6 tokens shows a window of 48.
    config = transformers.MistralConfig(
        num_key_value_heads=4, sliding_window=48, **SIZES
    )
    model = transformers.MistralForCausalLM(config).eval()
    groups = sf.shrinking.groups(model, WORDS)
    algorithm = sf.one_shot(0.5, pattern=groups.pattern())
    params = sf.modules.params_of(model)
    state = algorithm.update(algorithm.init(params), params, 0)
    small = sf.shrink(model, state, WORDS, groups=groups)
    assert (small.config.intermediate_size, small.config.sliding_window) == (24, 48)


@pytest.mark.deep
def test_heads_that_no_config_takes_leave_it_with_a_note():
    # LlamaConfig refuses 6 heads for a hidden size of 64. There are as many layers as
    # heads of keys.
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**{**SIZES, **sizes})
    model = transformers.LlamaForCausalLM(config).eval()
    state = without_heads(model, dict.fromkeys(range(4), 1))
    made = sf.shrinking.smaller(model, state, WORDS)
    masked = sf.modules.call(model, state, **WORDS)[0]
    torch.testing.assert_close(made.module(**WORDS)[0], masked)
    assert made.module.model.layers[0].self_attn.k_proj.out_features == 24
    assert made.module.config.num_hidden_layers == 4
    (note,) = made.notes
    assert "keeps its numbers: a LlamaConfig of others fails: Strict" in note


def test_shrink_warns_where_widths_that_differ_keep_the_config(tmp_path):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight.mul_(1.5)
    groups = sf.shrinking.groups(model, WORDS)
    inner = [i for i, group in enumerate(groups) if group.size == 48]
    params = sf.modules.params_of(model)

    def pruned(budget):
        pattern = groups.pattern(only=inner)
        algorithm = sf.one_shot(0.5, pattern=pattern, distribution=budget)
        return algorithm.update(algorithm.init(params), params, 0)

    text = (
        "could not set a config, and a saved model may not load again:\n  the config "
        r"of the LlamaForCausalLM keeps its numbers: .*\. Layers differ in "
        r"model\.layers\.\*\.mlp\.gate_proj\.weight: a distribution "
        r"sf\.budgets\.in_multiples\(\.\.\., equal_across=\.\.\.\) keeps them equal"
    )
    with pytest.warns(UserWarning, match=text) as warned:
        sf.shrink(model, pruned(sf.budgets.global_()), WORDS)
    assert [one.filename for one in warned] == [__file__]
    equal = sf.budgets.in_multiples(sf.budgets.uniform(), 8, equal_across="*.mlp.*")
    small = sf.shrink(model, pruned(equal), WORDS)
    assert loaded(small, tmp_path).config.intermediate_size == 24


@pytest.mark.deep
def test_no_llama_is_built_of_uneven_widths_yet():
    # Once this fails, `shrink` can write `per_layer_config`, and the recipes of LLaMA
    # and of experts are out of date.
    uneven = {0: {"intermediate_size": 8}}
    config = transformers.LlamaConfig(**SIZES, per_layer_config=uneven)
    with pytest.raises(RuntimeError, match="'intermediate_size' is a per-layer attrib"):
        transformers.LlamaForCausalLM(config)


def test_a_llama_of_fewer_layers_is_saved_and_generates_from_its_cache(tmp_path):
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(eos_token_id=None, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    layers = sf.shrinking.layers(model, WORDS, by="module")
    assert [layer.path for layer in layers] == [f"model.layers.{i}" for i in range(3)]
    state = sf.State(sf.modules.params_of(model), layers.masks([0]))
    small = sf.shrink(model, state, WORDS, groups=layers)
    assert sum(p.numel() for p in small.parameters()) == layers.cost([0])
    assert small.config.num_hidden_layers == len(small.model.layers) == 2
    assert [part.self_attn.layer_idx for part in small.model.layers] == [0, 1]
    assert config.num_hidden_layers == 3
    masked = sf.modules.bake(model, state)
    with torch.no_grad():
        wanted = masked.double()(**WORDS)[0]
        got = small.double()(**WORDS)[0]
    assert (got - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    ids = WORDS["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(small.generate(ids, **options), masked.generate(ids, **options))
    small.float().save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**WORDS)[0], small(**WORDS)[0])


ATTENTION = ["sliding_attention", "full_attention"] * 2


@pytest.mark.deep(but=["gemma2"])
@pytest.mark.parametrize(
    ("stem", "options"),
    [
        ("Qwen3", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 2}),
        ("Gemma2", {"sliding_window": 2}),
        ("Gemma3", {"sliding_window": 2}),
    ],
    ids=["qwen3", "qwen2", "gemma2", "gemma3"],
)
def test_kinds_of_layers_go_with_the_layers(stem, options):
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2}
    kinds = ATTENTION if options else ["full_attention"] * 4
    make = getattr(transformers, f"{stem}{'Text' if stem == 'Gemma3' else ''}Config")
    config = make(eos_token_id=None, head_dim=4, layer_types=kinds, **options, **sizes)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    layers = sf.shrinking.layers(model, WORDS, by="module")
    state = sf.State(sf.modules.params_of(model), layers.masks([1]))
    made = sf.shrinking.smaller(model, state, WORDS, groups=layers)
    small = made.module
    assert (made.form, made.notes) == ("class", ())
    assert small.config.num_hidden_layers == len(small.model.layers) == 3
    assert small.config.layer_types == kinds[:1] + kinds[2:]
    ids = WORDS["input_ids"]
    masked = sf.modules.bake(model, state)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(small.generate(ids, **options), masked.generate(ids, **options))
