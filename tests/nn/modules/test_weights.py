"""Weights chosen by the types of layers, and a small GPT-2 trained with them."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import sparsefn as sf
import sparsefn.nn.modules as M


class Conv1D(nn.Module):
    """As in transformers: the weight is (inputs, outputs)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": Conv1D(3 * width, width), "c_proj": Conv1D(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": Conv1D(4 * width, width), "c_proj": Conv1D(width, 4 * width)}
        )

    def forward(self, x):
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        x = x + self.attn["c_proj"](
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        return x + self.mlp["c_proj"](
            nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)))
        )


class GPT2(nn.Module):
    """The names and layouts of transformers' GPT2LMHeadModel."""

    def __init__(self, tokens=11, width=8, layers=2):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(tokens, width),
                "wpe": nn.Embedding(16, width),
                "h": nn.ModuleList(Block(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens):
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](
            torch.arange(tokens.shape[-1])
        )
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CONV1DS = [f"transformer.h.{i}.{name}.weight" for i in range(2) for name in PARTS]


def chosen(module, *args, **kwargs):
    where = M.weights_of(module, *args, **kwargs)
    return [path for path, leaf in M.params_of(module).items() if where(path, leaf)]


LAYERS = {
    "linear": (nn.Linear(2, 3), ["weight"]),
    "one output": (nn.Linear(2, 1), ["weight"]),
    "bilinear": (nn.Bilinear(2, 3, 4), ["weight"]),
    "conv": (nn.Conv2d(2, 3, 3), ["weight"]),
    "transposed": (nn.ConvTranspose1d(2, 3, 3), ["weight"]),
    "conv1d of transformers": (Conv1D(2, 3), ["weight"]),
    "lstm": (
        nn.LSTM(2, 3, proj_size=2),
        ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"],
    ),
    "cell": (nn.GRUCell(2, 3), ["weight_ih", "weight_hh"]),
    "attention": (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        ["in_proj_weight", "out_proj.weight"],
    ),
    "projections": (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
    "norms": (
        nn.Sequential(nn.LayerNorm((4, 4)), nn.BatchNorm1d(4), nn.Linear(2, 3)),
        ["2.weight"],
    ),
    "embeddings": (
        nn.Sequential(nn.Embedding(4, 4), nn.EmbeddingBag(4, 4), nn.Linear(2, 3)),
        ["2.weight"],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_chosen_by_the_type_of_the_layer(name):
    module, weights = LAYERS[name]
    assert chosen(module) == weights
    assert chosen(nn.ModuleDict({"bias": module})) == [
        f"bias.{path}" for path in weights
    ]  # names do not matter


COMPUTED = {
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(2, 3)),
        "torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule('0'), "
        "'weight')",
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(2, 3)),
        "torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule('0'), "
        "'weight')",
    ),
    "old weight norm": (
        lambda: weight_norm(nn.Conv2d(2, 3, 3)),
        "torch.nn.utils.remove_weight_norm(model.get_submodule('0'), 'weight')",
    ),
    "pruned": (
        lambda: prune.l1_unstructured(nn.Linear(2, 3), "weight", amount=1),
        "torch.nn.utils.prune.remove(model.get_submodule('0'), 'weight')",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", COMPUTED)
def test_weights_that_are_computed_are_named(name):
    make, call = COMPUTED[name]
    text = (
        "'0.weight' is computed, so it stays dense: to sparsify it make it a "
        f"parameter, before the optimizer is made, with {call}"
    )
    with pytest.raises(
        ValueError,
        match="^weights_of: no .* layer has a weight that is no embedding: "
        f"{re.escape(text)}$",
    ):
        M.weights_of(nn.Sequential(make()))
    net = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=f"^weights_of: {re.escape(text)}$"):
        assert chosen(net) == ["1.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(net, skip="0") == ["1.weight"]


def test_types_and_skip():
    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(2, 3, 3),
            "body": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)),
        }
    )
    everything = ["conv.weight", "body.0.weight", "body.1.weight"]
    assert chosen(net) == everything
    assert (
        chosen(net, nn.Linear)
        == chosen(net, types=(nn.Linear, nn.Conv1d))
        == everything[1:]
    )
    assert chosen(net, [nn.Conv2d]) == everything[:1]
    assert (
        chosen(net, skip="body")
        == chosen(net, skip=["body.*"])
        == chosen(net, skip=["b*y"])
        == everything[:1]
    )
    assert (
        chosen(net, skip=["body.0"])
        == chosen(net, skip=("*.0.weight",))
        == ["conv.weight", "body.1.weight"]
    )
    assert chosen(net, skip=["*.1", "conv.weight"]) == ["body.0.weight"]
    assert chosen(net, skip=["*.bias"]) == everything  # it is there, and dense anyway


def test_layers_of_a_class_of_ones_own():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.bias = (
                nn.Parameter(torch.ones(2, 2)),
                nn.Parameter(torch.ones(1, 2)),
            )
            self.table = nn.Embedding(3, 3)

    net = nn.Sequential(Mine(), nn.Linear(2, 2))
    assert chosen(net) == ["1.weight"]
    assert chosen(net, types=(Mine, nn.Linear)) == ["0.matrix", "1.weight"]


def test_ties():
    net = nn.ModuleDict(
        {
            "head": nn.Linear(4, 7),
            "wte": nn.Embedding(7, 4),
            "a": nn.Linear(4, 4),
            "b": nn.Linear(4, 4),
        }
    )
    net["head"].weight, net["b"].weight = net["wte"].weight, net["a"].weight
    assert chosen(net) == ["a.weight"]
    assert chosen(net, skip="head") == ["a.weight"]
    assert chosen(net, types=nn.Linear, skip="wte") == ["a.weight"]
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        sf.static(0.5, where=M.weights_of(net, skip="b")).init(M.params_of(net))


def test_what_matches_nothing_is_refused():
    net = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    layers = "there are ['Embedding', 'LayerNorm', 'Linear', 'Sequential']"
    with pytest.raises(ValueError) as raised:
        M.weights_of(net, types=(nn.Conv2d, nn.Embedding))
    assert (
        str(raised.value)
        == "weights_of: no Conv2d, Embedding layer has a weight that is no "
        f"embedding; {layers}"
    )
    with pytest.raises(
        ValueError, match="no linear, convolution and recurrent layer has a weight"
    ):
        M.weights_of(nn.LayerNorm(3))
    text = (
        "skip: no path matches 'lm_head'; the paths are '0', '0.weight', '1', "
        "'1.weight', '1.bias', '2', '2.weight', "
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        M.weights_of(net, skip=["lm_head"])
    with pytest.raises(
        TypeError, match="^expected skip to be a glob or a sequence of globs, got int$"
    ):
        M.weights_of(net, skip=3)
    with pytest.raises(TypeError, match="^expected skip to hold globs, got int$"):
        M.weights_of(net, skip=[3])
    with pytest.raises(
        TypeError, match="^expected types to be classes of layers, .*, got 'Linear'$"
    ):
        M.weights_of(net, types=["Linear"])
    with pytest.raises(
        TypeError,
        match=r"^expected a module first, as in call\(module, state, x\), got dict$",
    ):
        M.weights_of({})


@pytest.mark.deep
def test_the_where_reads_names_alone_and_works_under_vmap_and_compile():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    algorithm = sf.static(0.5, where=M.weights_of(net, skip="1"))
    params = M.params_of(net)
    state = algorithm.init(params)
    compiled = torch.compile(algorithm.init, backend="eager", fullgraph=True)(params)
    assert sf.checkpoint.tree_equal(compiled, state)
    batch = torch.vmap(algorithm.init)(sf.ensemble.stack([params] * 2))
    assert torch.equal(batch.masks["0.weight"][0], state.masks["0.weight"])
    assert batch.masks["1.weight"].shape == (2,)


def test_a_small_gpt2():
    net, generator = GPT2(), torch.Generator().manual_seed(0)
    assert chosen(net) == chosen(net, skip="lm_head") == CONV1DS
    assert [
        path for path, p in M.params_of(net).items() if sf.default_where(path, p)
    ] == CONV1DS
    tokens = torch.arange(16)[None] * torch.tensor([[1], [2], [3], [4]]) % 11
    start = torch.randint(11, (4, 1), generator=generator)
    tokens = (tokens + start) % 11

    def loss(params):
        logits = M.call(net, params, tokens[:, :-1])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )

    rigl = sf.rigl(
        0.75, where=M.weights_of(net), when=sf.every(5), key=sf.random.key(0)
    )
    algorithm = sf.with_optimizer(rigl, sf.optimizers.adam(0.02))
    state = first = algorithm.init(M.params_of(net))
    losses = []
    for step in range(60):
        value, grads = M.value_and_grad(loss)(sf.effective(state))
        losses.append(float(value))
        state = algorithm.update(state, grads, step)
    assert losses[-1] < 0.3 * losses[0]
    for path, mask in state.masks.items():
        assert int(mask.sum()) == (mask.numel() // 4 if path in CONV1DS else 1)
    assert any(
        not torch.equal(first.masks[path], state.masks[path]) for path in CONV1DS
    )
    baked = M.bake(net, state)
    assert baked.lm_head.weight is baked.transformer["wte"].weight
    with torch.no_grad():
        torch.testing.assert_close(baked(tokens), M.call(net, state, tokens))


def test_each_layout_of_a_small_gpt2_gets_its_axis():
    net = GPT2()
    net.lm_head = nn.Linear(8, 11, bias=False)  # a head of its own
    where, params = M.weights_of(net), M.params_of(net)
    axes = {
        path: M.pattern_axis(net, path)
        for path, leaf in params.items()
        if where(path, leaf)
    }
    assert axes == {**dict.fromkeys(CONV1DS, 0), "lm_head.weight": 1}
    parts = []
    for axis in sorted({*axes.values()}):
        paths = [path for path in axes if axes[path] == axis]
        parts.append(
            (paths, sf.ste(None, pattern=sf.patterns.nm(2, 4, axis=axis), where=paths))
        )
    masks = sf.partition(parts).init(params).masks
    for path, axis in axes.items():
        assert M.check_pattern_axis(net, path, sf.patterns.nm(2, 4, axis=axis))
        assert axis or not M.check_pattern_axis(net, path, sf.patterns.nm(2, 4))
        runs = masks[path].movedim(axis, -1).unflatten(-1, (-1, 4)).sum(-1)
        assert (runs == 2).all()
