"""Layers that run one by one give what the whole model gives, for the models of
transformers and others.
"""

import itertools
from typing import ClassVar

import optree
import pytest
import torch
import transformers
from torch import nn

import sparsefn as sf
from sparsefn.core.tree.where import matching
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.blocks import chain_of
from sparsefn.posttraining.calibration.capture import intercepted

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
DECODER = {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 4, **SIZES}
WORDS = torch.arange(40).reshape(4, 10)
PAIR = {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :6]}
ALL_EXPERTS = {"num_experts_per_tok": 3}
SHORT = torch.arange(10) < torch.tensor([10, 7, 4, 9])[:, None]


def made(name, **sizes):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).eval()


def opt(layers=3):
    sizes = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 24,
        "num_attention_heads": 4,
    }
    return made(
        "OPTForCausalLM",
        vocab_size=64,
        num_hidden_layers=layers,
        max_position_embeddings=16,
        **sizes,
    )


def gpt2(layers=3):
    return made(
        "GPT2LMHeadModel",
        vocab_size=64,
        n_embd=16,
        n_layer=layers,
        n_head=4,
        n_positions=16,
    )


def llama(layers=3):
    return made("LlamaForCausalLM", **DECODER | {"num_hidden_layers": layers})


def t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return made(
        "T5ForConditionalGeneration", vocab_size=64, decoder_start_token_id=0, **sizes
    )


def mixtral(**options):
    return made("MixtralForCausalLM", num_local_experts=3, **DECODER | options)


def gemma():
    return made(
        "Gemma3ForCausalLM",
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **DECODER | {"num_hidden_layers": 4},
    )


def vit():
    return made("ViTForImageClassification", image_size=8, patch_size=2, **SIZES)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


def mlp():
    layers = (nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LayerNorm(8))
    return nn.Sequential(
        *layers, nn.Linear(8, 8), layers[1], nn.Dropout(0.5), nn.Linear(8, 8)
    ).eval()


def drawn(*shape):
    """Numbers that depend on no other module that is imported before this one."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


LLAMA = [f"model.layers.{i}.*" for i in range(3)]
MODELS = {
    "gpt2": (gpt2, [f"transformer.h.{i}.*" for i in range(3)], {"input_ids": WORDS}),
    "llama": (llama, LLAMA, {"input_ids": WORDS}),
    "left out": (llama, LLAMA[1::2], {"input_ids": WORDS}),
    "halves": (
        llama,
        [
            f"{layer[:-1]}{half}.*"
            for layer in LLAMA[::2]
            for half in ("self_attn", "mlp")
        ],
        {"input_ids": WORDS},
    ),
    "qwen": (lambda: made("Qwen3ForCausalLM", **DECODER), LLAMA, {"input_ids": WORDS}),
    "gemma": (gemma, [f"model.layers.{i}.*" for i in range(4)], {"input_ids": WORDS}),
    "mixtral": (mixtral, LLAMA, {"input_ids": WORDS}),
    "all experts": (lambda: mixtral(**ALL_EXPERTS), LLAMA, {"input_ids": WORDS}),
    "opt": (
        opt,
        [f"model.decoder.layers.{i}.*" for i in range(3)],
        {"input_ids": WORDS},
    ),
    "t5": (
        t5,
        [f"{side}.block.{i}.*" for side in ("encoder", "decoder") for i in range(2)],
        PAIR,
    ),
    "bert": (
        lambda: made("BertForMaskedLM", vocab_size=64, **SIZES),
        [f"bert.encoder.layer.{i}.*" for i in range(3)],
        {"input_ids": WORDS, "token_type_ids": WORDS % 2},
    ),
    "vit": (
        vit,
        [f"vit.layers.{i}.*" for i in range(3)],
        {"pixel_values": drawn(4, 3, 8, 8)},
    ),
    "encoder": (
        encoder,
        [f"layers.{i}.*" for i in range(3)],
        {"src": drawn(4, 5, 16)},
    ),
    "sequential": (mlp, ["0.*", "3.*", "6.*"], {"input": drawn(4, 8)}),
}


def wanda(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats), where=list(stats))


def sparsegpt(stats):
    def solve(path, weight, mask, step):
        matrix, back = sf.calibration.as_matrix(weight, stats[path])
        matrices, grams = (
            (matrix[None], stats[path]["gram"][None])
            if matrix.ndim == 2
            else (matrix, stats[path]["gram"])
        )
        done = [
            sf.solve.obs(w, h, keep=0.5, damp=0.1)
            for w, h in zip(matrices, grams, strict=True)
        ]
        return tuple(
            back(torch.stack(x).reshape(matrix.shape)) for x in zip(*done, strict=True)
        )

    return sf.rewrite(solve, when=sf.at([0]))


def slowly(model, blocks, prune, inputs, of, size, inputs_from="pruned"):
    """The whole model runs once for each block, which is the plain way."""
    start = state = sf.dense().init(sf.modules.params_of(model))
    for block in blocks:
        stats = {}
        for i in range(0, 4, size):
            batch = {name: x[i : i + size] for name, x in inputs.items()}
            weights = state if inputs_from == "pruned" else start
            new = sf.calibration.inputs(model, weights, **batch, paths=block, of=of)
            stats = (
                {
                    path: {k: x + new[path][k] for k, x in s.items()}
                    for path, s in stats.items()
                }
                if stats
                else new
            )
        algorithm = prune(stats)
        own = algorithm.init({path: sf.effective(state)[path] for path in stats})
        own = algorithm.update(
            own, {path: torch.zeros_like(x) for path, x in own.params.items()}, 0
        )
        state = state._replace(
            params=state.params | own.params, masks=state.masks | own.masks
        )
    return state


def written(model):
    return [(part, dict(vars(part))) for part in model.modules()], {
        k: x.clone() for k, x in model.state_dict().items()
    }


def assert_unwritten(model, before):
    attributes, tensors = before
    assert all(vars(part).items() == old.items() for part, old in attributes)
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), tensors)


@pytest.mark.deep(
    but=[
        "llama-wanda-square-pruned",
        "mixtral-wanda-square-pruned",
        "vit-wanda-square-pruned",
        "sequential-wanda-square-pruned",
    ]
)
@pytest.mark.parametrize("inputs_from", ["pruned", "dense"])
@pytest.mark.parametrize(("prune", "of"), [(wanda, "square"), (sparsegpt, "gram")])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_pruned_as_by_runs_of_the_whole(name, prune, of, inputs_from):
    make, blocks, inputs = MODELS[name]
    model = make()
    before = written(model)
    options = {"of": of, "chunk_size": 3, "inputs_from": inputs_from}
    *_, last = steps = list(
        sf.calibration.by_block(model, None, blocks, prune, inputs, **options)
    )
    assert [(done.block, done.why) for done in steps] == [
        (block, "") for block in blocks
    ]
    slow = slowly(model, blocks, prune, inputs, of, 3, inputs_from)
    assert sf.checkpoint.tree_equal(last.state, slow)
    assert all(
        (done.error is None) if inputs_from == "dense" else 0 < done.error < 1
        for done in steps
    )
    assert_unwritten(model, before)


@pytest.mark.deep
@pytest.mark.parametrize("layers", [4, 16])
@pytest.mark.parametrize(
    ("make", "path"),
    [(llama, "model.layers"), (gpt2, "transformer.h"), (opt, "model.decoder.layers")],
)
@pytest.mark.parametrize(("prune", "of"), [(wanda, "square"), (sparsegpt, "gram")])
def test_deep_models_keep_every_bit(make, path, layers, prune, of):
    model, blocks, inputs = (
        make(layers),
        [f"{path}.{i}.*" for i in range(layers)],
        {"input_ids": WORDS},
    )
    state = sf.calibration.in_order(
        model, None, blocks, prune, inputs, of=of, chunk_size=2
    )
    assert sf.checkpoint.tree_equal(state, slowly(model, blocks, prune, inputs, of, 2))


def calls_in(name):
    """What a model calls its parts with, and what they return."""
    make, blocks, inputs = MODELS[name]
    model = make()
    params = sf.modules.params_of(model)
    chosen = []
    for block in blocks:
        leaves = matching("blocks", block, params).items()
        chosen.append([path for path, leaf in leaves if leaf.ndim > 1])
    state = sf.dense().init(params)
    chain = chain_of(Named.of(model), state, chosen, ((), inputs))
    calls = []

    def run(path, part, args, kwargs):
        out = part._call_impl(*args, **kwargs)
        calls.append(((args, kwargs), out))
        return out

    with torch.no_grad(), intercepted(chain.parts, run):
        model(**inputs)
    return calls[: len(chain.order)]


def same(one, other):
    leaves, structure = optree.tree_flatten(one)
    others, form = optree.tree_flatten(other)
    return structure == form and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y or x == y
        for x, y in zip(leaves, others, strict=True)
    )


def in_the_fields_way(calls):
    """Whether each part gets what the first one gets, with the hidden states that the
    part before it returns in place of the first argument.
    """
    (args, kwargs), _ = calls[0]
    for (_, out), (call, _) in itertools.pairwise(calls):
        states = optree.tree_leaves(out)[0]
        if args:
            expected = ((states, *args[1:]), kwargs)
        else:
            expected = ((), kwargs | {next(iter(kwargs)): states})
        if not same(call, expected):
            return False
    return True


def test_the_models_that_need_more_than_the_inputs_of_their_first_block():
    assert [name for name in MODELS if not in_the_fields_way(calls_in(name))] == [
        "gemma",
        "t5",
    ]


class Between(nn.Module):
    """Does something between its layers."""

    def __init__(self, forward, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.run = forward

    def forward(self, x):
        return self.run(self.layers, x)


def skipping(layers, x):
    first = layers[0](x)
    second = layers[1](first)
    return layers[3](layers[2](second + first))


def halved(layers, x):
    for layer in layers:
        x = layer(x) / 2
    return x


@pytest.mark.parametrize("run", [skipping, halved])
def test_what_the_model_does_between_its_layers_is_done(run):
    model, x, blocks = (
        Between(run),
        {"x": torch.randn(4, 6)},
        [f"layers.{i}.*" for i in range(4)],
    )
    *_, last = steps = list(
        sf.calibration.by_block(
            model, None, blocks, wanda, x, of="square", chunk_size=2
        )
    )
    assert sf.checkpoint.tree_equal(
        last.state, slowly(model, blocks, wanda, x, "square", 2)
    )
    assert not any(done.why for done in steps)


def deep(layers, x):
    for layer in list(layers) * 2:
        x = layer(x)
    return x


def hidden(layers, x):
    seen = []
    for layer in layers:
        x = layer(x)
        seen.append(layer)
    return x @ seen[0].weight.T


class Remembers(nn.Linear):
    """Adds what the layer before it left behind."""

    last: ClassVar[list[torch.Tensor]] = []

    def forward(self, x):
        out = super().forward(x) + (self.last[0] if self.last else 0)
        self.last[:] = [] if self.last else [out]
        return out


def remembering():
    model = Between(lambda layers, x: nn.Sequential(*layers)(x))
    model.layers = nn.ModuleList(Remembers(6, 6) for _ in range(4))
    return model


class Adds(nn.Linear):
    """Adds what the model noted down of all layers before it."""

    def forward(self, x):
        return super().forward(x) + sum(Remembers.last)


def adding():
    def run(layers, x):
        Remembers.last.clear()
        for layer in layers:
            x = layer(x)
            Remembers.last.append(x)
        Remembers.last.clear()
        return x

    model = Between(run)
    model.layers = nn.ModuleList(Adds(6, 6) for _ in range(3))
    return model


class Cell(nn.Linear):
    """Gets and returns more than a tensor."""

    def forward(self, box):
        return Box(super().forward(box.x))


class Box:
    def __init__(self, x):
        self.x = x


def boxes():
    model = Between(lambda layers, x: nn.Sequential(*layers)(Box(x)).x)
    model.layers = nn.ModuleList(Cell(6, 6) for _ in range(4))
    return model


class Writes(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


def writing():
    model = Between(lambda layers, x: nn.Sequential(*layers)(x + 0))
    model.layers = nn.ModuleList(Writes(6, 6) for _ in range(4))
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Between(deep), r"'layers\.0' is called 2 times"),
        (
            lambda: Between(hidden),
            r"'layers\.0\.weight' gets other inputs where parts run one by one",
        ),
        (remembering, "gets other inputs where parts run one by one"),
        (adding, r"'layers\.0' by itself raises Touched"),
        (boxes, r"'layers\.0' returns a Box"),
        (writing, r"'layers\.0' writes into its inputs"),
    ],
)
def test_where_layers_do_not_follow_each_other_the_model_runs_and_the_reason_is_said(
    make, why
):
    model, x = make(), {"x": torch.randn(4, 6)}
    blocks = [f"layers.{i}.*" for i in range(len(model.layers))]
    steps = sf.calibration.by_block(
        model, None, blocks, wanda, x, of="square", chunk_size=2
    )
    with pytest.warns(
        UserWarning,
        match=f"in_order: the whole model runs once for each block, as .*{why}",
    ):
        *_, last = steps = list(steps)
    assert sf.checkpoint.tree_equal(
        last.state, slowly(model, blocks, wanda, x, "square", 2)
    )
    assert all(done.why and done.error is None for done in steps)


def test_many_operations_between_layers():
    model, x = Between(halved), {"x": torch.randn(4, 6)}
    model.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
    blocks = [f"layers.{i}.*" for i in range(8)]
    with pytest.warns(
        UserWarning, match=r"there are operations between parts, as after 'layers\.0'"
    ):
        state = sf.calibration.in_order(model, None, blocks, wanda, x, of="square")
    assert sf.checkpoint.tree_equal(state, slowly(model, blocks, wanda, x, "square", 4))


class Told(nn.Module):
    """A layer that others may tell what to multiply by."""

    def __init__(self):
        super().__init__()
        self.up, self.by = nn.Linear(6, 6), None

    def forward(self, x):
        return self.up(x) if self.by is None else self.up(x) * self.by


def telling(layers, x):
    for layer in layers:
        layer.by = x.mean(1, keepdim=True)
    return nn.Sequential(*layers)(x)


def telling_the_next(layers, x):
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        x = layer(x)
        if after is not None:
            after.by = x.mean(1, keepdim=True)
    return x


@pytest.mark.parametrize("run", [telling, telling_the_next])
def test_attributes_that_the_model_sets_on_a_layer_are_seen(run):
    model = Between(run)
    model.layers = nn.ModuleList(Told() for _ in range(3))
    x, blocks = torch.randn(4, 6), [f"layers.{i}.*" for i in range(3)]
    with pytest.warns(
        UserWarning,
        match="as 'layers.[01]' gets its 'by' from elsewhere, and not as an argument",
    ):
        state = sf.calibration.in_order(
            model, None, blocks, wanda, {"x": x}, of="square", chunk_size=2
        )
    assert sf.checkpoint.tree_equal(
        state, slowly(model, blocks, wanda, {"x": x}, "square", 2)
    )
    assert all(layer.by is None for layer in model.layers)


class Scales(nn.Linear):
    """Writes into its input, but with ones leaves it as it is."""

    def forward(self, x, by):
        x *= by
        return super().forward(x)


def test_a_write_is_seen_whatever_it_writes():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Scales(6, 6) for _ in range(3))

        def forward(self, x, by):
            for layer in self.layers:
                x = layer(x, by)
            return x

    model, blocks = Scaling(), [f"layers.{i}.*" for i in range(3)]
    call = {
        "x": torch.randn(4, 6),
        "by": torch.rand(4, 1).index_fill(0, torch.tensor([0]), 1.0),
    }
    with pytest.warns(UserWarning, match="as 'layers.0' writes into its inputs"):
        state = sf.calibration.in_order(
            model, None, blocks, wanda, call, of="square", chunk_size=2
        )
    assert sf.checkpoint.tree_equal(
        state, slowly(model, blocks, wanda, call, "square", 2)
    )


class Sums(nn.Linear):
    """Adds what it makes to a tensor that all layers get."""

    def __init__(self, writes):
        super().__init__(512, 512)
        self.writes = writes

    def forward(self, x, total):
        out = super().forward(x + total)
        if self.writes:
            total.add_(out.mean())
        return out


@pytest.mark.parametrize("offload", [None, "disk"])
def test_a_layer_that_is_left_out_may_not_write_where_others_read(offload):
    class Summing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Sums(i == 1) for i in range(4))

        def forward(self, x):
            total = torch.zeros_like(x)
            for layer in self.layers:
                x = layer(x, total)
            return x

    model, blocks, x = (
        Summing(),
        [f"layers.{i}.*" for i in (0, 2, 3)],
        {"x": torch.randn(4, 512)},
    )
    with pytest.warns(UserWarning, match="as 'layers.1' writes into its inputs"):
        state = sf.calibration.in_order(
            model, None, blocks, wanda, x, of="square", chunk_size=2, offload=offload
        )
    assert sf.checkpoint.tree_equal(state, slowly(model, blocks, wanda, x, "square", 2))


def test_activations_in_place_run_one_by_one():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(3))
    )
    model.insert(1, nn.ReLU(inplace=True))
    blocks, x = ["0.*", "2.*", "3.*"], {"input": torch.randn(4, 6)}
    *_, last = steps = list(
        sf.calibration.by_block(
            model, None, blocks, wanda, x, of="square", chunk_size=2
        )
    )
    assert not any(done.why for done in steps)
    assert sf.checkpoint.tree_equal(
        last.state, slowly(model, blocks, wanda, x, "square", 2)
    )


def test_experts_whose_weights_are_gathered_are_told():
    model = mixtral(num_experts_per_tok=3, experts_implementation="batched_mm")
    with pytest.warns(
        UserWarning,
        match="no product was seen with 'model.layers.0.mlp.experts.gate_up_proj' "
        ".MixtralEx",
    ):
        state = sf.calibration.in_order(
            model, None, LLAMA[:1], wanda, {"input_ids": WORDS}, of="square"
        )
    assert not state.masks["model.layers.0.mlp.experts.gate_up_proj"].ndim
