"""Tied sets of the models of transformers: they get smaller, with the outputs of the masked model."""

import pytest
import torch
import transformers
from torch import nn

import sparsefn as sf

HIDDEN, INNER, HEADS, WIDTH = 32, 48, 8, 4  # of each head
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS}
WORDS = {"input_ids": torch.arange(12).reshape(2, 6)}


def linear(names, block=1):
    *made, read = names.split()
    return sf.tied([*([f"*.{name}.weight", 0, block] for name in made), [f"*.{read}.weight", 1, block]])


def llama():
    config = transformers.LlamaConfig(vocab_size=64, intermediate_size=INNER, num_key_value_heads=HEADS // 2, **SIZES)
    # A head of keys and values is read by two heads of queries.
    heads = [["*.q_proj.weight", 0, 2 * WIDTH], ["*.k_proj.weight", 0, WIDTH], ["*.v_proj.weight", 0, WIDTH]]
    heads = sf.tied([*heads, ["*.o_proj.weight", 1, 2 * WIDTH]])
    return transformers.LlamaForCausalLM(config), [linear("gate_proj up_proj down_proj"), heads], WORDS


def gpt2():
    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 16, "n_inner": INNER}
    config = transformers.GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    mlp = sf.tied([["*.c_fc.weight", 1], ["*.c_fc.bias", 0], ["*.c_proj.weight", 0]])
    # Queries, keys and values side by side.
    heads = sf.tied([["*.c_attn.weight", 1, WIDTH, 3], ["*.c_attn.bias", 0, WIDTH, 3], ["*.c_proj.weight", 0, WIDTH]])
    return transformers.GPT2LMHeadModel(config), [mlp, heads], WORDS


def bert():
    config = transformers.BertConfig(vocab_size=64, intermediate_size=INNER, max_position_embeddings=16, **SIZES)
    heads = linear("self.query self.key self.value output.dense", WIDTH)
    return transformers.BertModel(config), [linear("intermediate.dense output.dense"), heads], WORDS


def vit():
    config = transformers.ViTConfig(intermediate_size=INNER, image_size=8, patch_size=4, **SIZES)
    heads = linear("q_proj k_proj v_proj o_proj", WIDTH)
    return transformers.ViTModel(config), [linear("fc1 fc2"), heads], {"pixel_values": torch.ones(2, 3, 8, 8)}


# How many parameters of a layer go with half of the inner width, and with half of the heads.
LINEAR, ATTENTION = HIDDEN * INNER // 2, HIDDEN * HIDDEN // 2
GONE = {
    llama: (3 * LINEAR, 3 * ATTENTION),
    gpt2: (2 * LINEAR + INNER // 2, 4 * ATTENTION + 3 * HIDDEN // 2),
    bert: (2 * LINEAR + INNER // 2, 4 * ATTENTION + 3 * HIDDEN // 2),
    vit: (2 * LINEAR + INNER // 2, 4 * ATTENTION + 3 * HIDDEN // 2),
}


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def made(build):
    model, ties, inputs = build()
    for param in model.parameters():  # biases and norms, too
        nn.init.normal_(param, std=0.3)
    return model.eval(), ties, inputs


def pruned(model, *ties):
    params, algorithm = sf.modules.params_of(model), sf.chain(*[sf.one_shot(0.5, pattern=one) for one in ties])
    return algorithm.update(algorithm.init(params), params, 0)


def size(model):
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("build", GONE)
def test_half_of_the_inner_width_and_of_the_heads_goes_and_outputs_stay(build):
    model, ties, inputs = made(build)
    state = pruned(model, *ties)
    small = sf.shrink(model, state, only=ties, example=inputs)
    assert size(model) - size(small) == 2 * sum(GONE[build])
    wanted, got = sf.modules.call(model, state, **inputs)[0], small(**inputs)[0]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, model(**inputs)[0], atol=0.1)  # the masks change something
    got.sum().backward()
    grads = torch.func.grad(lambda params: sf.modules.call(model, params, **inputs)[0].sum())(sf.effective(state))
    for path, param in small.named_parameters():
        mask = state.masks[path]
        if param.grad is None:
            continue
        whole = grads[path][mask.expand(grads[path].shape)] if mask.ndim else grads[path]
        if whole.numel() == param.numel():
            torch.testing.assert_close(param.grad.flatten(), whole.flatten(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build,only", [(llama, "model.layers.*.mlp"), (vit, "layers.*.mlp")])
def test_submodules_that_can_be_followed_need_no_sets(build, only):
    model, (mlp, _), inputs = made(build)
    state = pruned(model, mlp)
    small = sf.shrink(model, state, only=only)
    assert size(model) - size(small) == 2 * GONE[build][0]
    torch.testing.assert_close(small(**inputs)[0], sf.modules.call(model, state, **inputs)[0], atol=1e-5, rtol=1e-5)


def test_a_smaller_llama_is_saved_with_a_smaller_config(tmp_path):
    model, ties, inputs = made(llama)
    small = sf.shrink(model, pruned(model, *ties), only=ties, example=inputs)
    small.config.intermediate_size, small.config.head_dim = INNER // 2, WIDTH
    small.config.num_attention_heads, small.config.num_key_value_heads = HEADS // 2, HEADS // 4
    small.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**inputs)[0], small(**inputs)[0])


def test_a_smaller_llama_generates_as_the_masked_one():
    model, ties, inputs = made(llama)
    state = pruned(model, *ties)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    small, masked = sf.shrink(model, state, only=ties, example=inputs), sf.modules.bake(model, state)
    assert torch.equal(small.generate(**inputs, **settings), masked.generate(**inputs, **settings))


def opt():
    config = transformers.OPTConfig(
        vocab_size=64, ffn_dim=INNER, max_position_embeddings=16, word_embed_proj_dim=HIDDEN, **SIZES
    )
    return transformers.OPTModel(config), [linear("q_proj k_proj v_proj out_proj", WIDTH)], WORDS


def deberta():
    config = transformers.DebertaV2Config(vocab_size=64, intermediate_size=INNER, max_position_embeddings=16, **SIZES)
    heads = linear("self.query_proj self.key_proj self.value_proj output.dense", WIDTH)
    return transformers.DebertaV2Model(config), [heads], WORDS


@pytest.mark.parametrize("build", [opt, deberta])
def test_attentions_that_hold_the_number_of_their_heads_are_refused(build):
    model, ties, inputs = build()
    model.eval()
    state = pruned(model, *ties)
    with pytest.raises(ValueError, match=r"expected example= for tied.*such as heads"):
        sf.shrink(model, state, only=ties)
    with pytest.raises(ValueError, match=r"shrink: (on|the smaller) .* leave these units out of only="):
        sf.shrink(model, state, only=ties, example=inputs)


def test_a_glob_that_removes_nothing_says_what_is_there():
    model, (mlp, _), _ = made(gpt2)
    with pytest.warns(UserWarning, match=r"mlp\.c_fc' keeps 24 of 24 pruned channels: a Conv1D is not followed"):
        sf.shrink(model, pruned(model, mlp), only="transformer.h.*.mlp")
    with pytest.warns(UserWarning, match=r"removed nothing:\n  'transformer\.h\.0\.mlp' \(GPT2MLP\) stays as it is"):
        sf.shrink(model, pruned(model, sf.patterns.unstructured()), only="transformer.h.*.mlp")
