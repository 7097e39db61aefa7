"""Statistics of the models of transformers, and their weights pruned by them."""

import pytest
import torch
import transformers

import sparsefn as sf

HIDDEN, INNER = 32, 48
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": INNER,
}
WORDS = torch.arange(36).reshape(6, 6)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def gpt2():
    sizes = {
        "n_embd": HIDDEN,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "n_inner": INNER,
    }
    config = transformers.GPT2Config(
        vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES)
    ).eval()


def mixtral():
    sizes = SIZES | {"num_local_experts": 2, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=64, **sizes)
    ).eval()


def test_gpt2_stores_its_weights_as_inputs_by_outputs():
    model = gpt2()
    stats = sf.calibration.inputs(model, None, WORDS)
    layer = [name for name in stats if name.startswith("transformer.h.0.")]
    assert [stats[name]["square"].shape for name in layer] == [
        (32, 1),
        (32, 1),
        (32, 1),
        (48, 1),
    ]
    assert all(int(of["count"]) == WORDS.numel() for of in stats.values())
    # The first attention reads the normed embeddings.
    embedded = model.transformer.wte(WORDS) + model.transformer.wpe(torch.arange(6))
    x = model.transformer.h[0].ln_1(embedded).detach().flatten(0, 1).double()
    first = stats["transformer.h.0.attn.c_attn.weight"]
    assert torch.allclose(first["gram"].double(), x.T @ x, rtol=1e-4, atol=1e-4)
    assert "transformer.wte.weight" in stats  # which the head is tied to


@pytest.mark.parametrize(
    ("make", "blocks", "axis"),
    [(gpt2, "transformer.h.{}.*", 1), (llama, "model.layers.{}.*", 0)],
)
def test_a_model_is_pruned_block_after_block(make, blocks, axis):
    model = make()

    def prune(stats):
        rows = sf.patterns.row_balanced(axis)
        return sf.one_shot(0.5, sf.scores.wanda(stats), pattern=rows, where=list(stats))

    names = [blocks.format(i) for i in range(2)]
    state = sf.calibration.in_order(
        model, None, names, prune, {"input_ids": WORDS}, of="square", chunk_size=4
    )
    sparse = {name: mask for name, mask in state.masks.items() if mask.ndim}
    assert len(sparse) == (8 if make is gpt2 else 14)
    for mask in sparse.values():
        assert (mask.sum(1 - axis) * 2 == mask.shape[1 - axis]).all()
    stats = sf.calibration.inputs(model, state, WORDS, of="square")
    # Of the last block's first layer the inputs are those that its masks were chosen
    # by.
    first = min(
        name
        for name in sparse
        if name.startswith(blocks.format(1)[:-1]) and ("c_attn" in name or "q_" in name)
    )
    norm, weight = stats[first]["square"].sqrt(), sf.modules.params_of(model)[first]
    scores = (weight.abs() * norm).to(torch.float32)
    kept = sf.masks.topk_mask(
        scores, weight.shape[1 - axis] // 2, pattern=sf.patterns.row_balanced(axis)
    )
    assert torch.equal(kept, sparse[first])


def test_experts_in_one_leaf_are_seen_apart():
    model = mixtral()
    stats = sf.calibration.inputs(model, None, WORDS)
    experts = {name: of for name, of in stats.items() if "experts" in name}
    assert len(experts) == 4
    for of in experts.values():
        assert (
            of["gram"].shape[0] == 2 and int(of["count"].sum()) == 2 * WORDS.numel()
        )  # two experts a token
