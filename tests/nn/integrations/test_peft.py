"""LoRA of peft on pruned models: every zero stays, whatever peft does with its
adapters.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import sparsefn as sf

peft = pytest.importorskip("peft")
from tests.nn.integrations.lora_nets import NAMES, X, config, pruned, train, wrapped  # noqa: E402

keep_zeros = sf.integrations.peft.keep_zeros

# transformers says it of its own wrapper, which peft calls.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def zeros(model):
    return {
        name: parameter == 0
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
    }


def same_zeros(model, other):
    a, b = zeros(model), zeros(other)
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_merged_has_the_zeros_of_the_base_and_the_outputs_of_the_trained_model(
    safe, dropout
):
    base = pruned()
    model = train(wrapped(copy.deepcopy(base), lora_dropout=dropout))
    out = model(X)
    assert (out - base(X)).abs().max() > 0.1
    merged = model.merge_and_unload(safe_merge=safe)
    assert same_zeros(merged, base) and type(merged.up) is nn.Linear
    assert (
        dict(merged.named_buffers()) == {}
        and merged.state_dict().keys() == base.state_dict().keys()
    )
    torch.testing.assert_close(merged(X), out, rtol=1e-5, atol=1e-5)
    careless = peft.get_peft_model(
        copy.deepcopy(base), config(init_lora_weights=False)
    ).merge_and_unload()
    assert not same_zeros(careless, base)


def test_slopes_of_a_and_b_are_those_of_the_merged_weight():
    model = wrapped(init_lora_weights=False)
    layer = model.base_model.model.up
    x, grad = torch.randn(7, 96), torch.randn(7, 20)
    layer(x).backward(grad)
    kept = torch.where(layer.get_base_layer().weight != 0, grad.T @ x, 0.0)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(a.grad, 2 * b.detach().T @ kept, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(b.grad, 2 * kept @ a.detach().T, rtol=1e-4, atol=1e-4)


def test_merging_and_unmerging_in_place():
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    out = model(X)
    model.merge_adapter()
    assert all(
        torch.equal(
            getattr(model.base_model.model, n).base_layer.weight == 0,
            zeros(base)[f"{n}.weight"],
        )
        for n in NAMES
    )
    torch.testing.assert_close(model(X), out, rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    for name in NAMES:
        weight = getattr(model.base_model.model, name).base_layer.weight
        torch.testing.assert_close(
            weight, getattr(base, name).weight, rtol=1e-5, atol=1e-6
        )
    with model.disable_adapter():
        torch.testing.assert_close(model(X), base(X), rtol=1e-5, atol=1e-5)
    assert same_zeros(model.unload(), base)


def test_adapters_of_later_and_their_mixtures():
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    model.add_adapter("second", config(init_lora_weights=False))
    model.add_weighted_adapter(
        ["default", "second"], [0.5, 0.25], "mixed", combination_type="linear"
    )
    for names in ("second", "mixed"):
        model.set_adapter(names)
        one = copy.deepcopy(model).eval()
        out = one(X)
        merged = one.merge_and_unload()
        assert same_zeros(merged, base)
        torch.testing.assert_close(merged(X), out, rtol=1e-4, atol=1e-4)
    both = copy.deepcopy(model).merge_and_unload(adapter_names=["default", "second"])
    assert same_zeros(both, base)
    model.delete_adapter("second")
    assert same_zeros(model.merge_and_unload(), base)


def test_adapters_of_later_on_other_layers(tmp_path):
    base = pruned()
    saved = train(
        peft.get_peft_model(
            copy.deepcopy(base), config(target_modules=["down", "conv"])
        )
    )
    saved.save_pretrained(tmp_path)
    first = wrapped(copy.deepcopy(base), target_modules=["up"], init_lora_weights=False)
    for model in (
        first,
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
        keep_zeros(first),
    ):
        name = f"of {len(model.peft_config)}"  # the last is the first once more
        model.add_adapter(
            name, config(target_modules=["down", "conv"], init_lora_weights=False)
        )
        model.load_adapter(tmp_path, f"loaded {name}")
        for adapter in (name, f"loaded {name}"):
            model.set_adapter(adapter)
            one = copy.deepcopy(train(model))
            out = one(X)
            merged = one.merge_and_unload()
            assert same_zeros(merged, base) and not torch.equal(
                merged.down.weight, base.down.weight
            )
            torch.testing.assert_close(merged(X), out, rtol=1e-4, atol=1e-4)
    assert list(first.peft_config) == [
        "default",
        "of 1",
        "loaded of 1",
        "of 3",
        "loaded of 3",
    ]


@pytest.mark.filterwarnings("ignore:Already following adapters were merged")
def test_an_adapter_is_merged_onto_another():
    base = pruned()
    model = wrapped(copy.deepcopy(base), target_modules=["up"], init_lora_weights=False)
    model.add_adapter("late", config(init_lora_weights=False))
    model.merge_adapter()
    model.merge_adapter(["late"])
    for name in NAMES:
        weight = getattr(model.base_model.model, name).base_layer.weight
        assert torch.equal(weight == 0, getattr(base, name).weight == 0)
        assert not torch.allclose(weight, getattr(base, name).weight, atol=1e-3)
    model.unmerge_adapter()
    for name in NAMES:
        weight = getattr(model.base_model.model, name).base_layer.weight
        torch.testing.assert_close(
            weight, getattr(base, name).weight, rtol=1e-5, atol=1e-6
        )
    assert same_zeros(model.merge_and_unload(adapter_names=["default", "late"]), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("safe", [False, True])
def test_a_weight_and_an_update_that_cancel_out_leave_no_zero(dtype, safe):
    base = pruned().to(dtype)
    model = wrapped(
        copy.deepcopy(base),
        target_modules=["up"],
        r=1,
        lora_alpha=1,
        init_lora_weights=False,
    )
    layer = model.base_model.model.up
    with torch.no_grad():  # the update is minus the first row
        layer.lora_B["default"].weight.zero_()[0] = -1.0
        layer.lora_A["default"].weight.copy_(base.up.weight[:1])
    for _ in range(2):
        model.merge_adapter(safe_merge=safe)
        assert layer.base_layer.weight[0].abs().max() == torch.finfo(dtype).tiny
        assert torch.equal(layer.base_layer.weight == 0, base.up.weight == 0)
        model.unmerge_adapter()
        torch.testing.assert_close(
            layer.base_layer.weight, base.up.weight, atol=1e-4, rtol=0.0
        )
    assert same_zeros(model.merge_and_unload(), base)


def test_a_batch_of_several_adapters():
    torch.manual_seed(0)
    base = pruned(where="[ud]*.weight")
    model = peft.get_peft_model(
        base, config(target_modules=["up", "down"], init_lora_weights=False)
    )
    model.add_adapter(
        "second", config(target_modules=["up", "down"], init_lora_weights=False)
    )
    keep_zeros(model).eval()
    alone = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        alone[name] = model(X)
    names = ["default", "second", "__base__"] * 2 + ["second", "default"]
    out = model(X, adapter_names=names)
    with model.disable_adapter():
        alone["__base__"] = model(X)
    torch.testing.assert_close(
        out,
        torch.stack([alone[name][i] for i, name in enumerate(names)]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_saved_adapters_are_peft_s_own(tmp_path):
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    # peft's own sum, without the mask
    assert not torch.allclose(again(X), model(X), atol=1e-3)
    assert torch.equal(keep_zeros(again)(X), model(X))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert not any("sparsefn" in name for name in model.state_dict())


def test_transposed_weights_and_half_precision():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=20,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=None,
        )
    )
    where = sf.modules.weights_of(gpt2, skip=["lm_head"])
    algorithm = sf.static(0.5, init="magnitude", where=where)
    base = (
        sf.modules.bake(gpt2, algorithm.init(sf.modules.params_of(gpt2)))
        .to(torch.bfloat16)
        .eval()
    )
    lora = peft.LoraConfig(
        r=4,
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = keep_zeros(peft.get_peft_model(copy.deepcopy(base), lora)).eval()
    ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    out = model(input_ids=ids).logits
    merged = model.merge_and_unload()
    assert same_zeros(merged, base) and merged.dtype == torch.bfloat16
    torch.testing.assert_close(merged(input_ids=ids).logits, out, rtol=0.05, atol=0.02)
    assert (out - base(input_ids=ids).logits).abs().max() > 0.2


def test_layers_without_zeros_are_left_alone():
    model = wrapped(pruned(where="up.weight"))
    inner = model.base_model.model
    assert type(inner.down.lora_variant) is dict and not dict(
        inner.down.named_buffers()
    )
    assert type(inner.up.lora_variant) is not dict


def test_it_may_be_called_twice_copied_pickled_and_compiled():
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    out = model(X)
    assert keep_zeros(model) is model and torch.equal(model(X), out)
    assert torch.equal(copy.deepcopy(model)(X), out)
    layer = model.base_model.model.up
    assert torch.equal(
        pickle.loads(pickle.dumps(layer))(X.flatten(1).repeat(1, 2)),
        layer(X.flatten(1).repeat(1, 2)),
    )
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), out)
    assert same_zeros(copy.deepcopy(model).merge_and_unload(), base)


def test_a_bias_of_lora_is_merged_too():
    base = pruned()
    model = train(wrapped(copy.deepcopy(base), lora_bias=True))
    out = model(X)
    merged = model.merge_and_unload()
    assert same_zeros(merged, base) and not torch.equal(merged.up.bias, base.up.bias)
    torch.testing.assert_close(merged(X), out, rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_in_an_embedding_are_padding():
    base = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 3))
    with torch.no_grad():
        base[1].weight[0, :2] = 0.0
    model = keep_zeros(
        peft.get_peft_model(copy.deepcopy(base), config(target_modules=["0", "1"]))
    )
    assert same_zeros(model.merge_and_unload(), base)
