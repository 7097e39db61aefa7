"""Perplexity is the exponential of the mean loss over tokens, however they are cut into
windows.
"""

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import sparsefn as sf

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}


def bigram(tokens):
    """Logits that depend on the last token alone."""
    table = torch.randn(
        8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return table[tokens]


def losses(tokens):
    """The loss of each token but the first."""
    return functional.cross_entropy(bigram(tokens[:-1]), tokens[1:], reduction="none")


def text(length, seed=0):
    return torch.randint(8, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config).eval()


@given(st.integers(2, 40), st.integers(2, 12), st.integers(1, 12), st.integers(1, 5))
def test_every_token_counts_once_where_windows_overlap(
    length, window, stride, chunk_size
):
    tokens, stride = text(length), min(stride, window - 1)
    found = sf.report.perplexity(
        bigram, tokens, window, stride=stride, chunk_size=chunk_size
    )
    assert found == pytest.approx(math.exp(losses(tokens).mean()), rel=1e-12)


@given(st.integers(2, 40), st.integers(2, 12))
def test_the_first_of_each_window_is_not_predicted_where_they_do_not(length, window):
    tokens = text(length)
    counted = torch.arange(1, length) % window != 0
    found = sf.report.perplexity(bigram, tokens, window)
    assert found == pytest.approx(math.exp(losses(tokens)[counted].mean()), rel=1e-12)


def test_a_model_that_knows_nothing_has_the_size_of_its_vocabulary():
    found = sf.report.perplexity(
        lambda tokens: torch.zeros(*tokens.shape, 50), text(20), 7
    )
    assert found == pytest.approx(50, rel=1e-6)
    never = torch.tensor([0.0] + [-1e5] * 7)
    assert (
        sf.report.perplexity(
            lambda tokens: never.expand(*tokens.shape, 8), torch.ones(9).long(), 4
        )
        == math.inf
    )
    nan = sf.report.perplexity(
        lambda tokens: torch.full((*tokens.shape, 8), math.nan), text(9), 4
    )
    assert math.isnan(nan)


def test_one_window_is_the_loss_of_transformers(llama):
    tokens = torch.randint(40, (23,))
    with torch.no_grad():
        expected = math.exp(llama(tokens[None], labels=tokens[None]).loss)
    random, before = (
        torch.get_rng_state(),
        {name: x.clone() for name, x in llama.state_dict().items()},
    )
    assert sf.report.perplexity(llama, tokens, 23) == pytest.approx(expected, rel=1e-6)
    assert sf.report.perplexity(llama, tokens, 100) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), random) and not llama.training
    assert all(torch.equal(x, before[name]) for name, x in llama.state_dict().items())


def test_padding_and_labels_that_do_not_count(llama):
    tokens, mask = (
        torch.randint(40, (2, 9)),
        torch.tensor([[0] * 4 + [1] * 5, [1] * 7 + [0] * 2]),
    )
    labels = tokens.masked_fill(torch.arange(9) % 3 == 0, -100)
    found = sf.report.perplexity(
        llama, tokens, 9, attention_mask=mask, labels=labels, chunk_size=2
    )
    total, count = 0.0, 0
    for line, own, wanted in zip(tokens, mask.bool(), labels, strict=True):
        with torch.no_grad():
            loss = llama(line[own][None], labels=wanted[own][None]).loss
        number = int((wanted[own][1:] != -100).sum())
        total, count = total + float(loss) * number, count + number
    assert count == 7
    assert found == pytest.approx(math.exp(total / count), rel=1e-6)


def test_windows_of_all_sizes_go_together(llama):
    tokens = torch.randint(40, (3, 29))
    one = sf.report.perplexity(llama, tokens, 8, stride=5)
    assert sf.report.perplexity(
        llama, tokens, 8, stride=5, chunk_size=4
    ) == pytest.approx(one, rel=1e-6)


def test_bad_input_is_told():
    class Dropped(nn.Module):
        def forward(self, tokens):
            return bigram(tokens)

    for arguments, error, message in (
        (
            {"tokens": text(1)},
            ValueError,
            r"expected a text of two tokens or more, of which some count, got 1 tokens",
        ),
        (
            {"tokens": text(0)},
            ValueError,
            r"got 0 tokens of shape \(0,\), and nothing to predict",
        ),
        ({"labels": torch.full((9,), -100)}, ValueError, "of which some count"),
        (
            {"labels": torch.full((9,), 8)},
            ValueError,
            r"labels below 8, or -100, got \[8, 8, 8\]",
        ),
        (
            {"labels": text(8)},
            ValueError,
            r"expected labels of the shape of tokens, \(9,\), got \(8,\)",
        ),
        (
            {"attention_mask": torch.ones(2, 9)},
            ValueError,
            "expected attention_mask of the shape of tokens",
        ),
        (
            {"attention_mask": torch.arange(9) != 4},
            ValueError,
            "got some inside of text 0",
        ),
        ({"attention_mask": torch.zeros(9)}, ValueError, "nothing to predict"),
        (
            {"tokens": text(8).reshape(2, 2, 2)},
            ValueError,
            r"expected tokens of shape .* got \(2, 2, 2\)",
        ),
        (
            {"tokens": torch.ones(9)},
            TypeError,
            "a tensor of integers, got torch.float32",
        ),
        ({"tokens": [1, 2, 3]}, TypeError, "a tensor of integers, got list"),
        ({"window": 1}, ValueError, "window"),
        ({"stride": 0}, ValueError, "stride"),
        (
            {"stride": 5},
            ValueError,
            "expected stride <= window, or tokens are left out, got 5 > 4",
        ),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
        (
            {"model": Dropped()},
            ValueError,
            "eval mode, got one in train mode: call model.eval()",
        ),
        (
            {"model": lambda tokens: None},
            TypeError,
            "gives logits, or .logits, got NoneType",
        ),
        (
            {"model": lambda tokens: bigram(tokens)[0]},
            ValueError,
            r"\(1, 3, 'vocabulary'\), got \(3, 8\)",
        ),
    ):
        with pytest.raises(error, match=f"perplexity: .*{message}"):
            sf.report.perplexity(
                **({"model": bigram, "tokens": text(9), "window": 4} | arguments)
            )
    assert sf.report.perplexity(Dropped().eval(), text(9), 4) > 1


def test_padded_texts_without_a_mask_are_told():
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8, pad_token_id=0
    )
    model, text = (
        transformers.GPT2LMHeadModel(config).eval(),
        torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]]),
    )
    told = (
        "perplexity: 2 of 10 ids, at the ends of rows, are 0, the pad_token_id of the "
        "model, and count as text: give"
    )
    with pytest.warns(UserWarning, match=f"^{told} attention_mask$"):
        sf.report.perplexity(model, text, 4)
    sf.report.perplexity(model, text, 4, attention_mask=text.ne(0).long())
    sf.report.perplexity(model, text, 4, labels=torch.where(text == 0, -100, text))


def test_a_table_with_max_norm_stays_as_it_was():
    torch.manual_seed(0)
    model, tokens = (
        nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 8)).eval(),
        text(20),
    )
    before = model[0].weight.detach().clone()
    found = sf.report.perplexity(model, tokens, window=5)
    assert torch.equal(model[0].weight, before)
    model(torch.arange(8))  # scales all rows for good
    assert not torch.equal(model[0].weight, before)
    assert found == pytest.approx(sf.report.perplexity(model, tokens, window=5))
