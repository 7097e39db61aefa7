"""Blocks that learn to answer as before they were pruned."""

import functools
import importlib
import re

import pytest
import torch
import torchopt
from posttraining.calibration import tiny_lms
from torch import nn

import sparsefn as sf
from sparsefn.posttraining.calibration.targets import first_floats

in_order, by_block = sf.calibration.in_order, sf.calibration.by_block
blockwise = sf.recovery.blockwise
BLOCKS = ["0.*", "2.*", "4.*"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def inputs(n=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 2, generator=generator) @ torch.randn(
        2, 4, generator=generator
    )


def prune(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats), pattern=sf.patterns.row_balanced())


def pruned(recover=None, model=None, x=None, rule=prune, **options):
    options = {"of": "square", "chunk_size": 16} | options
    model = net() if model is None else model
    x = inputs() if x is None else x
    return list(by_block(model, None, BLOCKS, rule, x, recover=recover, **options))


def zeros_stay(state, masks):
    return all(
        torch.equal(state.masks[path], mask)
        and (mask.ndim == 0 or not state.params[path][~mask].any())
        for path, mask in masks.items()
    )


OPTIMIZERS = {
    "sgd": sf.optimizers.sgd(0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": sf.optimizers.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": sf.optimizers.adam(1e-2),
    "adamw": sf.optimizers.adamw(1e-2, weight_decay=0.1),
    "by path": sf.optimizers.by_path(
        [("*.bias", sf.optimizers.sgd(0.05)), ("*", sf.optimizers.adam(1e-2))]
    ),
    "torchopt": torchopt.adam(1e-2),
}
PATTERNS = {
    "unstructured": {},
    "rows": {"pattern": sf.patterns.row_balanced()},
    "2:4": {"pattern": sf.patterns.nm(2, 4)},
    "blocks": {"pattern": sf.patterns.block((1, 2))},
    "columns": {"pattern": sf.patterns.channel(axis=1)},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_errors_fall_and_zeros_stay_with_every_optimizer(name):
    before = pruned()
    after = pruned(blockwise(OPTIMIZERS[name], epochs=30))
    for one, other in zip(before, after, strict=True):
        assert other.error < 0.9 * one.error
    state = after[-1].state
    assert zeros_stay(state, after[-1].state.masks)
    # the masks of the first block, which gets the same inputs
    assert torch.equal(state.masks["0.weight"], before[-1].state.masks["0.weight"])


@pytest.mark.parametrize("name", PATTERNS)
def test_zeros_stay_in_every_pattern(name):
    sparsity = None if name == "2:4" else 0.5

    def rule(stats):
        return sf.one_shot(sparsity, **PATTERNS[name])

    plain = pruned(rule=rule)
    done = pruned(blockwise(sf.optimizers.adam(1e-2), epochs=3), rule=rule)
    # masks of magnitudes do not depend on inputs
    assert zeros_stay(done[-1].state, plain[-1].state.masks)
    for path, weight in done[-1].state.params.items():
        assert not torch.equal(weight, plain[-1].state.params[path])


def test_a_block_learns_to_answer_as_its_dense_self_for_the_inputs_it_gets():
    model, x = net(), inputs()
    seen = []

    def recover(state, errors):
        params = sf.effective(state)
        seen.append([error(params) for error in errors(sf.recovery.mean_square)])
        return state

    done = pruned(recover, model, x)
    for place, found, record in zip((0, 2, 4), seen, done, strict=True):
        pruned_before = sf.modules.bake(model, done[-1].state)[:place]
        for chunk, error in zip(x.split(16), found, strict=True):
            own = pruned_before(chunk)
            dense = model[place](own)
            answer = sf.modules.bake(model, record.state)[place](own)
            torch.testing.assert_close(error, (answer - dense).square().mean())
    plain = pruned(None, model, x)
    assert sf.checkpoint.tree_equal(done[-1].state, plain[-1].state)
    assert [one.error for one in done] == [one.error for one in plain]


def test_the_next_block_gets_what_the_trained_block_returns():
    model, x = net(), inputs()
    stats = {}

    def noted(found):
        stats.update(found)
        return prune(found)

    state = pruned(blockwise(sf.optimizers.adam(1e-2)), model, x, noted)[-1].state
    made = sf.modules.bake(model, state)
    for place in (2, 4):
        expected = made[:place](x).double().square().sum(0)
        torch.testing.assert_close(
            stats[f"{place}.weight"]["square"], expected, rtol=1e-4, atol=1e-6
        )


def test_from_dense_inputs_each_block_learns_by_itself():
    model, x = net(), inputs()
    recover = blockwise(sf.optimizers.adam(1e-2), epochs=5)
    whole = pruned(recover, model, x, inputs_from="dense")[-1].state
    hidden = model[:2](x).detach()
    alone = in_order(
        nn.Sequential(model[2]), None, ["0.*"], prune, hidden,
        of="square", chunk_size=16, recover=recover,
    )  # fmt: skip
    torch.testing.assert_close(whole.params["2.weight"], alone.params["0.weight"])


def test_in_order_gives_the_same_without_a_bar():
    recover = blockwise(sf.optimizers.adam(1e-2), epochs=2)
    records = pruned(recover)
    options = {"of": "square", "chunk_size": 16}
    state = in_order(net(), None, BLOCKS, prune, inputs(), recover=recover, **options)
    assert sf.checkpoint.tree_equal(state, records[-1].state)
    state = in_order(
        net(), None, BLOCKS, prune, inputs(), recover=recover, offload="disk", **options
    )
    assert sf.checkpoint.tree_equal(state, records[-1].state)


def test_weights_of_any_method_are_recovered():
    # what another method pruned: `rewrite` gives its weights, and the dense model's
    # answers are learned
    model, x = net(), inputs()
    start = pruned(None, model, x)[-1].state

    def known(path, weight, mask, step):
        return start.params[path], start.masks[path]

    done = pruned(
        blockwise(sf.optimizers.adam(1e-2), epochs=20),
        model,
        x,
        lambda stats: sf.rewrite(known, when=sf.at([0])),
        of="count",
    )
    assert zeros_stay(done[-1].state, start.masks)
    assert done[0].error < 0.9 * pruned(None, model, x)[0].error


def test_epochs_of_none_change_nothing():
    plain = pruned()[-1].state
    state = pruned(blockwise(sf.optimizers.adam(1e-2), epochs=0))[-1].state
    assert sf.checkpoint.tree_equal(state, plain)


def test_another_loss():
    def doubled(student, teacher, tokens):
        return 2 * sf.recovery.mean_square(student, teacher, tokens)

    sgd = sf.optimizers.sgd
    one = pruned(blockwise(sgd(0.02), loss=doubled))[-1].state
    other = pruned(blockwise(sgd(0.04)))[-1].state
    for path, weight in one.params.items():
        torch.testing.assert_close(weight, other.params[path])


def test_the_module_and_the_inputs_stay_as_they_are():
    model, x = net(), inputs()
    before = {path: leaf.clone() for path, leaf in model.state_dict().items()}
    pruned(blockwise(sf.optimizers.adam(1e-2)), model, x)
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), before)
    assert torch.equal(x, inputs())
    assert all(p.grad is None for p in model.parameters())
    assert not any(part._forward_hooks for part in model.modules())


def llama_blocks(model):
    return [f"model.layers.{i}.*" for i in range(model.config.num_hidden_layers)]


def test_layers_of_transformers():
    torch.manual_seed(0)
    model = tiny_lms.llama().eval()
    options = {"of": "square", "chunk_size": 2}
    call = {"input_ids": tiny_lms.WORDS}
    recover = blockwise(sf.optimizers.adam(3e-3), epochs=20)
    blocks = llama_blocks(model)
    plain = list(by_block(model, None, blocks, prune, call, **options))
    options["recover"] = recover
    trained = list(by_block(model, None, blocks, prune, call, **options))
    for one, other in zip(plain, trained, strict=True):
        assert other.error < 0.9 * one.error
    state = trained[-1].state
    assert zeros_stay(state, state.masks)
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(state.params[norm], model.get_parameter(norm))
    for path in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(state.params[path], model.get_parameter(path))


def test_halves_of_a_layer_are_trained_together_at_its_end():
    torch.manual_seed(0)
    model = tiny_lms.llama(layers=1).eval()
    halves = [f"model.layers.0.{half}.*" for half in ("self_attn", "mlp")]
    calls = []

    def recover(state, errors):
        calls.append({path for path, mask in state.masks.items() if mask.ndim})
        return blockwise(sf.optimizers.adam(3e-3), epochs=2)(state, errors)

    call = {"input_ids": tiny_lms.WORDS}
    first, last = by_block(
        model, None, halves, prune, call, of="square", recover=recover
    )
    assert len(calls) == 1 and len(calls[0]) == 7
    down = "model.layers.0.mlp.down_proj.weight"
    query = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first.state.params[down], model.get_parameter(down))
    assert not torch.equal(first.state.params[query], last.state.params[query])


def test_padding_is_not_learned():
    torch.manual_seed(0)
    model = tiny_lms.llama(layers=2).eval()
    tokens = torch.ones_like(tiny_lms.WORDS).bool()
    tokens[:3, 6:] = False
    counts = []

    def loss(student, teacher, counted):
        counts.append(counted)
        return sf.recovery.mean_square(student, teacher, counted)

    call = {"input_ids": tiny_lms.WORDS, "attention_mask": tokens.long()}
    recover = blockwise(sf.optimizers.adam(1e-3), loss=loss)
    options = {"of": "square", "chunk_size": 3, "tokens": tokens, "recover": recover}
    in_order(model, None, llama_blocks(model), prune, call, **options)
    assert len(counts) == 4
    assert torch.equal(torch.cat(counts[:2]), tokens)


def test_from_folder_to_folder(tmp_path):
    torch.manual_seed(0)
    model = tiny_lms.llama().eval()
    model.save_pretrained(tmp_path / "dense")
    recover = blockwise(sf.optimizers.adam(3e-3), epochs=3)
    errors = sf.calibration.stream(
        tmp_path / "dense", prune, tiny_lms.BATCHES, tmp_path / "out",
        of="square", recover=recover,
    )  # fmt: skip
    records = list(
        by_block(
            model, None, llama_blocks(model), prune, {"input_ids": tiny_lms.WORDS},
            of="square", chunk_size=2, recover=recover,
        )
    )  # fmt: skip
    made = type(model).from_pretrained(tmp_path / "out")
    for path, weight in sf.effective(records[-1].state).items():
        assert torch.equal(made.get_parameter(path), weight), path
    assert list(errors.values()) == [one.error for one in records]


def test_what_is_held_is_one_layer(tmp_path):
    # In memory: no outputs of the dense model but those of the layer that learns.
    model, held = net(), []

    def recover(state, errors):
        held.append(sorted(state.params))
        return state

    pruned(recover, model)
    assert held == [[f"{i}.bias", f"{i}.weight"] for i in (0, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [1e-4, 3e-3])
def test_blocks_of_16_bits_train_in_float32_and_are_rounded_once(dtype, rate):
    model = net().to(dtype)
    x = inputs().to(dtype)
    before = pruned(None, model, x)
    after = pruned(blockwise(sf.optimizers.adam(rate), epochs=20), model, x)
    wide = pruned(
        blockwise(sf.optimizers.adam(rate), epochs=20), model.float(), x.float()
    )
    for one, other, exact in zip(before, after, wide, strict=True):
        assert other.error < one.error
        assert other.error == pytest.approx(exact.error, rel=0.1)
    state = after[-1].state
    assert zeros_stay(state, state.masks)
    assert {leaf.dtype for leaf in state.params.values()} == {dtype}


def test_gradients_smaller_than_float16_has_reach_the_weights():
    # Of a mean over many outputs.
    def tiny(student, teacher, tokens):
        return 1e-9 * sf.recovery.mean_square(student, teacher, tokens)

    model = net().to(torch.float16)
    x = inputs().to(torch.float16)
    before = pruned(None, model, x)
    adam = sf.optimizers.adam(3e-3, eps=1e-20)
    after = pruned(blockwise(adam, epochs=20, loss=tiny), model, x)
    for one, other in zip(before, after, strict=True):
        assert other.error < 0.9 * one.error


def test_buffers_of_16_bits_are_widened_and_left_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16)).half().eval()

    def error(recover):
        layer = nn.Sequential(model)
        options = {"of": "square", "recover": recover}
        x = inputs().half()
        [block] = by_block(layer, None, ["0.*"], prune, x, **options)
        return block.error

    recover = blockwise(sf.optimizers.adam(1e-2), epochs=20)
    assert error(recover) < 0.9 * error(None)
    assert model[1].running_var.dtype == torch.float16


def test_steps_smaller_than_16_bits_tell_apart_add_up():
    def recover(epochs):
        adam = sf.optimizers.adam(1e-5)
        state = sf.dense().init({"w": torch.ones(2, dtype=torch.bfloat16)})

        def errors(loss):
            return iter([lambda params: params["w"].float().sum()])

        return blockwise(adam, epochs=epochs)(state, errors).params["w"]

    assert recover(10).equal(torch.ones(2, dtype=torch.bfloat16))
    expected = torch.tensor(1 - 1000 * 1e-5).bfloat16()
    assert recover(1000).equal(expected.expand(2))


# ---- bad input -----------------------------------------------------------------------


def refused(kind, text, call, *args, **kwargs):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call(*args, **kwargs)


def test_arguments_that_are_none():
    adam = sf.optimizers.adam(1e-2)
    text = "blockwise: expected epochs >= 0, got -1"
    refused(ValueError, text, blockwise, adam, epochs=-1)
    text = "blockwise: expected epochs to be an int, got float"
    refused(TypeError, text, blockwise, adam, epochs=1.5)
    with pytest.raises(TypeError, match="^expected loss to be a function of"):
        blockwise(adam, loss=torch.nn.functional.relu)
    with pytest.raises(TypeError, match="optimizer"):
        blockwise(1e-2)


MEND = (
    "lower the rate of the optimizer, or give a model of a wider dtype, such as "
    "model.float()"
)


@pytest.mark.parametrize("run", [in_order, by_block])
def test_training_that_diverges(run):
    recover = blockwise(sf.optimizers.sgd(1e6), epochs=30)
    text = (
        "blockwise: expected finite weights after training, got NaN or infinity at "
        f"'4.bias', '4.weight': {MEND}"
    )

    def last(model):
        options = {"of": "square", "chunk_size": 16, "recover": recover}
        return run(model, None, ["4.*"], prune, inputs(), **options)

    refused(ValueError, text, lambda: list(last(net())))


def one_leaf(dtype, error, optimizer):
    state = sf.dense().init({"w": torch.ones(2, dtype=dtype)})
    return blockwise(optimizer)(state, lambda loss: iter([error]))


def test_weights_that_fit_float32_alone():
    text = (
        "blockwise: expected finite weights after training, got NaN or infinity at "
        f"'w', as they do not fit torch.float16: {MEND}"
    )

    def error(params):
        return params["w"].float().sum()

    sgd = sf.optimizers.sgd(1e6)
    refused(ValueError, text, one_leaf, torch.float16, error, sgd)


def test_a_loss_that_is_not_finite_while_its_gradient_is():
    text = (
        "blockwise: expected a finite loss at every step, got NaN or infinity for the "
        f"layer of 'w': {MEND}"
    )

    def error(params):
        return params["w"].sum() + torch.tensor(torch.inf)

    sgd = sf.optimizers.sgd(1.0)
    refused(ValueError, text, one_leaf, torch.float32, error, sgd)


def test_what_recover_gives_must_be_a_state_of_the_layer():
    text = "in_order: expected recover to give a State, got dict"
    refused(TypeError, text, pruned, lambda state, errors: state.params)

    def wider(state, errors):
        params = {path: torch.zeros(2, 2) for path in state.params}
        return state._replace(params=params)

    with pytest.raises(ValueError, match="^expected the params that recover gives"):
        pruned(wider)
    with pytest.raises(TypeError, match=r"^expected recover to be a function of"):
        pruned(sf.optimizers.adam(1e-2))
    with pytest.raises(TypeError, match="got blockwise itself; call it"):
        pruned(blockwise)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (sf.recovery.mean_square, "student, teacher"),
        (functools.partial(sf.recovery.relations, heads=2), "student, teacher"),
        (nn.functional.mse_loss, "input, target"),
    ],
)
def test_a_loss_is_no_recovery(loss, names):
    text = (
        f"expected recover to be a function of (state, errors), got a loss of ({names}"
        "): write recover=sf.recovery.blockwise(optimizer, loss=...)"
    )
    refused(TypeError, text, pruned, loss)


def test_a_model_that_cannot_run_layer_by_layer():
    class Twice(nn.Sequential):
        def forward(self, x):
            return self[4](self[2](self[2](self[0](x))))

    with pytest.raises(ValueError, match=r"one by one with recover, but .*: leave"):
        pruned(blockwise(sf.optimizers.adam(1e-2)), Twice(*net()))


def test_layers_that_share_a_leaf():
    model = net()
    model[2].bias = model[0].bias
    text = (
        "in_order: expected layers with leaves of their own with recover, but "
        "'0.bias' in '0' is also '2.bias': leave recover out, and train the whole "
        "model afterwards"
    )
    refused(ValueError, text, pruned, blockwise(sf.optimizers.adam(1e-2)), model)
    assert len(pruned(None, model)) == 3


def test_several_processes(tmp_path, monkeypatch):
    module = importlib.import_module("sparsefn.posttraining.calibration.folders.stream")
    monkeypatch.setattr(module, "place", lambda: (0, 2))
    text = (
        "stream: expected one process with recover, got 2: each would train on batches "
        "of its own"
    )
    recover = blockwise(sf.optimizers.adam(1e-2))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        sf.calibration.stream(
            tmp_path, prune, tiny_lms.BATCHES, tmp_path / "out", recover=recover
        )


def test_a_layer_that_returns_no_floats():
    text = (
        "in_order: expected a layer that returns a floating-point tensor with recover, "
        "got tuple"
    )
    refused(ValueError, text, first_floats, (torch.arange(2),))
