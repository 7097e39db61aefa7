"""The search for numbers that work.
Numbers that modules keep about sizes, and what becomes of them.
Configs of smaller models."""

import dataclasses

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.attributes import Trial, search
from sparsefn.shrinking.groups import groups
from tests.shrinking.classes import drawn, same, small_of


@dataclasses.dataclass
class Dial:
    options: list
    choice: int = 0

    def take(self, choice):
        self.choice = choice


def found(score, *dials, tries=100):
    runs = []

    def run():
        runs.append([dial.options[dial.choice] for dial in dials])
        points = score(*runs[-1])
        return Trial((points, 0), points == 0, "" if points == 0 else "too few")

    best = search(lambda _: dials, run, tries)
    return best, [dial.options[dial.choice] for dial in dials], len(runs)


def test_what_works_at_once_is_run_once():
    best, numbers, runs = found(lambda a: 0, Dial([3, 4]))
    assert best.done and numbers == [3] and runs == 1


def test_one_number_after_the_other():
    best, numbers, _ = found(
        lambda *some: -sum(n != 5 for n in some),
        Dial([1, 5]),
        Dial([5, 2]),
        Dial([1, 2, 5]),
    )
    assert best.done and numbers == [5, 5, 5] and best.why == ""


def test_two_at_once_where_one_alone_is_no_better():
    best, numbers, _ = found(
        lambda a, b: 0 if (a, b) == (2, 3) else -1, Dial([1, 2]), Dial([1, 2, 3])
    )
    assert best.done and numbers == [2, 3]


def test_without_success_the_best_stays():
    best, numbers, runs = found(lambda a, b: -1 - (a != 2), Dial([1, 2]), Dial([1, 2]))
    assert not best.done and best.why == "too few" and numbers == [2, 1] and runs == 5


def test_no_more_runs_than_allowed():
    best, numbers, runs = found(lambda a: a - 50, Dial(list(range(40))), tries=7)
    assert not best.done and runs == 8 and best.score == (numbers[0] - 50, 0)


def tokens():
    return torch.randn(2, 5, 6)


class Heads(nn.Module):
    """As many heads as entries of a head, both kept as numbers."""

    def __init__(self, width=6, heads=4, size=4):
        super().__init__()
        self.heads, self.size, self.scale = heads, size, size**-0.5
        self.qkv, self.out = (
            nn.Linear(width, 3 * heads * size),
            nn.Linear(heads * size, width),
        )
        self.stride = 4  # of something else

    def forward(self, x):
        q, k, v = (
            self.qkv(x).view(2, -1, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        )
        y = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(2, -1, self.heads * self.size)) + x


@pytest.mark.parametrize(("prefer", "heads", "size"), [(True, 2, 4), (False, 4, 2)])
def test_of_two_equal_numbers_the_one_that_works_changes(prefer, heads, size):
    model = drawn(nn.Sequential(Heads(), Heads()))
    made, whole, runs = same(model, tokens(), gone=halves(model, prefer))
    for layer in made.model:
        assert (layer.heads, layer.size, layer.stride) == (heads, size, 4)
    torch.testing.assert_close(made.model(tokens()).shape, whole(tokens()).shape)
    assert len(runs) < 20


def halves(model, prefer):
    # Half of the heads, or half of the entries of each.
    from sparsefn.shrinking.groups import groups

    found = groups(model, tokens())
    if prefer:
        return {i: range(2) for i, g in enumerate(found) if g.preferred}
    return {i: range(2) for i, g in enumerate(found) if not g.preferred}


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes, self.shape = [6, 4, 6], (2, 3)
        self.into, self.out = nn.Linear(6, 16), nn.Linear(6, 6)
        self.gate = nn.Linear(4, 6)

    def forward(self, x):
        a, b, c = self.into(x).split(self.sizes, -1)
        y = (a * c).unflatten(-1, self.shape).tanh().flatten(-2) * self.gate(b)
        return self.out(y)


def test_numbers_in_lists_and_tuples():
    model = drawn(Split())
    small, whole = small_of(model, tokens())
    assert type(small.sizes) is list and type(small.shape) is tuple
    assert (
        sum(small.sizes) == small.into.out_features < 16
        and small.sizes[0] == small.out.in_features
    )
    torch.testing.assert_close(small(tokens()).shape, whole(tokens()).shape)
    assert model.sizes == [6, 4, 6]


def test_modules_of_torch_that_keep_shapes():
    model = drawn(
        nn.Sequential(
            nn.Linear(6, 12),
            nn.Unflatten(-1, (3, 4)),
            nn.Tanh(),
            nn.Flatten(-2),
            nn.Linear(12, 2),
        )
    )
    small, _ = small_of(model, tokens())
    assert small[1].unflattened_size in [(2, 4), (3, 2), (1, 4)]


class Tripled(nn.Module):
    """A number of which only a multiple is a size."""

    def __init__(self):
        super().__init__()
        self.width, self.into, self.out = 4, nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.out(F.relu(self.into(x)).reshape(2, -1, 3 * self.width))


def test_numbers_of_which_a_multiple_is_a_size():
    small, _ = small_of(drawn(Tripled()), tokens())
    assert small.width == 2


class Layers(nn.Module):
    """Layers of one class with other numbers, and a number of them that is a size as
    well.
    """

    def __init__(self):
        super().__init__()
        self.depth = 4
        self.layers = nn.ModuleList([Heads(heads=h, size=3) for h in (4, 6, 2, 8)])

    def forward(self, x):
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x


def test_every_layer_gets_its_own_number():
    small, _ = small_of(drawn(Layers()), tokens())
    assert small.depth == 4 and [layer.heads for layer in small.layers] == [2, 3, 1, 4]
    assert [layer.size for layer in small.layers] == [3] * 4


class Derived(nn.Module):
    """The width of a head is that of the input."""

    def __init__(self):
        super().__init__()
        self.heads, self.q, self.out = 2, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.q(x).view(2, -1, self.heads, x.shape[-1] // self.heads)
        return self.out((y.softmax(1) * y).flatten(2))


def test_code_that_takes_a_size_from_elsewhere_has_no_smaller_model_of_its_class():
    made, _, runs = same(drawn(nn.Sequential(Derived())), tokens())
    assert made.model is None and len(runs) < 30
    assert made.why.startswith("the Derived at '0' fails: RuntimeError: shape")


class Silent(nn.Module):
    """Runs with fewer entries, but gives something else."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        y = self.into(x)
        return self.out(y * len(self.into.bias) ** -0.5)


def test_other_outputs_are_never_let_through():
    made, _, _ = same(drawn(nn.Sequential(nn.Linear(6, 6), Silent())), tokens())
    assert (
        made.model is None and made.why == "the Linear at '1.out' gives other outputs"
    )


def test_a_number_that_need_not_change_stays_where_it_is_also_one_that_stays():
    small, _ = small_of(drawn(nn.Sequential(Unused())), tokens())
    assert small[0].kernel == 3 and small[0].into.out_features == 2


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.into, self.out = 3, nn.Linear(6, 3), nn.Linear(3, 6)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        return self.out(self.into(x).relu()) * self.scale.exp().sum(0)


class Masked(Heads):
    def forward(self, x, mask=None):
        q, k, v = (
            self.qkv(x).view(2, -1, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(2, -1, self.heads * self.size)) + x


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Masked(heads=4, size=3), Masked(heads=2, size=6)

    def forward(self, x):
        return self.two(self.one(x), torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype))


def test_modules_that_are_called_with_more_or_less_are_alike():
    small, _ = small_of(drawn(Two()), tokens())
    assert (small.one.heads, small.two.heads) == (2, 1) and (
        small.one.size,
        small.two.size,
    ) == (3, 6)


def test_shuffles_keep_whole_columns():
    shuffle = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ChannelShuffle(4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    small, _ = small_of(drawn(shuffle), torch.randn(2, 3, 4, 4))
    assert small[0].out_channels == 4 and small[1].groups in (2, 4)


class Short(nn.Module):
    """Keeps the longest input that it takes, which is a size by chance."""

    def __init__(self):
        super().__init__()
        self.longest, self.inner = 8, 8
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.out(
            self.into(x[:, : self.longest]).relu().reshape(len(x), -1, self.inner)
        )


def test_what_is_a_size_by_chance_stays():
    model = drawn(nn.Sequential(Short()))
    small, whole = small_of(model, tokens())
    assert (small[0].longest, small[0].inner) == (8, 4)
    torch.testing.assert_close(small(x := torch.randn(2, 7, 6)), whole(x))


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
        "model.layers.1.mlp.gate_proj.weight. Layers differ in "
        "model.layers.*.mlp.gate_proj.weight: a distribution "
        "sf.budgets.in_multiples(..., equal_across=...) keeps them equal",
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


@dataclasses.dataclass
class Rows(Config):
    rows: int = 8
    window: int = 8


class Grouped(Own):
    """Its forward reads a number of its config that no new model shows."""

    def forward(self, x):
        rows = self.one(x).relu().reshape(-1, self.config.rows)
        return self.two(rows)


def test_numbers_of_configs_that_only_the_forward_reads_change():
    made, _, _ = same(drawn(Grouped(Rows())), torch.randn(2, 6))
    assert made.model.config.inner == made.model.config.rows == 4 and not made.notes
