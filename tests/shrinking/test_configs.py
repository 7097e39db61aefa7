"""Configs of smaller models."""

import dataclasses

import pytest
import torch
import transformers as hf
from torch import nn

from sparsefn.shrinking.groups import groups
from tests.shrinking.classes import drawn, same, small_of

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    **ENDS,
}


def llama(heads=6, keys=3, **sizes):
    config = hf.LlamaConfig(
        num_attention_heads=heads,
        num_key_value_heads=keys,
        **{**SIZES, "head_dim": 4, **sizes},
    )
    config.use_cache = False
    return drawn_weights(hf.LlamaForCausalLM(config))


def drawn_weights(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.rand(p.shape) + 0.5 if p.ndim < 2 else torch.randn(p.shape) * 0.2
            )
    return model.eval()


def words():
    return {"input_ids": torch.randint(0, 33, (2, 7))}


def saved_and_loaded(model, path):
    model.save_pretrained(path)
    return type(model).from_pretrained(path).eval()


@pytest.mark.deep(but=["counted"])
@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
def test_a_llama_is_saved_and_loaded(counted, tmp_path):
    model, x = llama(), words()
    made, whole, _ = same(model, x, counted=counted, share=1 / 3)
    small = made.model
    assert (
        made.notes == ()
        and small.config.num_key_value_heads == 2
        and model.config.num_key_value_heads == 3
    )
    assert (small.config.hidden_size, small.config.head_dim) == (
        16 if counted else 24,
        4,
    )
    assert bool(made.scaled) == counted
    again = saved_and_loaded(small, tmp_path)
    torch.testing.assert_close(
        again(**x).logits, whole(**x).logits, rtol=1e-4, atol=1e-5
    )
    assert isinstance(hf.LlamaForCausalLM(small.config), hf.LlamaForCausalLM)
    new = again.generate(
        x["input_ids"], max_new_tokens=3, do_sample=False, use_cache=True
    )
    assert torch.equal(
        new,
        whole.generate(
            x["input_ids"], max_new_tokens=3, do_sample=False, use_cache=True
        ),
    )


@pytest.mark.deep
@pytest.mark.parametrize("heads", [4, 6])
def test_heads_are_told_from_their_width(heads):
    model = llama(heads, heads // 2, head_dim=heads)
    small, whole = small_of(model, words(), share=1 / 2 if heads == 4 else 1 / 3)
    assert (
        small.config.head_dim == heads
        and small.config.num_attention_heads == {4: 2, 6: 4}[heads]
    )
    torch.testing.assert_close(
        small(**(x := words())).logits, whole(**x).logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.deep
def test_layers_that_differ_keep_the_config():
    model = llama()
    made, _, _ = same(model, words(), gone=second_inner(model))
    assert made.model.model.layers[1].mlp.gate_proj.out_features == 20
    assert made.model.config.intermediate_size == 40
    assert made.notes == (
        "the config of the LlamaForCausalLM keeps its numbers: no others give "
        "model.layers.1.mlp.gate_proj.weight",
    )


def second_inner(model):
    found = groups(model, words())
    return {max(i for i, g in enumerate(found) if g.size == 40): range(20)}


def test_counted_layer_norms_are_not_in_a_config():
    model = drawn_weights(
        hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=24,
                n_layer=2,
                n_head=6,
                n_inner=40,
                vocab_size=33,
                use_cache=False,
                **ENDS,
            )
        )
    )
    made, whole, _ = same(model, words(), counted=True, share=1 / 3)
    assert made.notes[0].endswith(
        "keeps its numbers: no others give the CountedLayerNorm at "
        "'transformer.h.0.ln_1'"
    )
    assert len(made.notes) == 1 and made.model.config.n_embd == 24
    attention = made.model.transformer.h[0].attn
    assert (attention.split_size, attention.c_attn.nf, attention.c_attn.nx) == (
        16,
        48,
        16,
    )
    torch.testing.assert_close(
        made.model(**(x := words())).logits, whole(**x).logits, rtol=1e-4, atol=1e-5
    )


def test_a_model_inside_another_has_its_config_set():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = llama().model, nn.Linear(24, 2)

        def forward(self, input_ids):
            return self.head(self.body(input_ids).last_hidden_state[:, -1])

    small, _ = small_of(drawn_weights(Classifier()), words(), share=1 / 2)
    assert small.body.config.intermediate_size == 20


@dataclasses.dataclass
class Config:
    width: int = 6
    inner: int = 8
    lr: float = 0.5


class Own(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.one, self.two = (
            config,
            nn.Linear(config.width, config.inner),
            nn.Linear(config.inner, 6),
        )

    def forward(self, x):
        return self.two(self.one(x).relu())


def test_configs_of_ones_own():
    small, _ = small_of(drawn(Own(Config())), torch.randn(2, 6))
    assert small.config == Config(6, 4) and isinstance(
        Own(small.config)(torch.randn(2, 6)), torch.Tensor
    )


def test_a_config_and_its_model_are_proven_at_once():
    made, _, runs = same(drawn(Own(Config())), torch.randn(2, 6))
    assert made.model.config == Config(6, 4) and not made.notes and len(runs) == 1


class Reads(Own):
    """Its forward computes with its config."""

    def forward(self, x):
        return super().forward(x) * self.config.inner


def test_configs_that_the_forward_reads_stay():
    made, _, _ = same(drawn(Reads(Config())), torch.randn(2, 6))
    note = "the config of the Reads keeps its numbers: others give other outputs"
    assert made.model.config == Config() and made.notes == (note,)
