"""LoRA of peft on pruned models: every zero stays, whatever peft does with its adapters."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import sparsefn as sf

peft = pytest.importorskip("peft")
keep_zeros = sf.integrations.peft.keep_zeros

# transformers says it of its own wrapper, which peft calls.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class Net(nn.Module):
    """A convolution, two linear layers and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 6, 3, padding=1, dilation=1), nn.Linear(96, 20), nn.Linear(20, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x, **kwargs):
        x = self.conv(x).relu().flatten(1)
        return self.head(self.down(self.up(x, **kwargs).relu(), **kwargs).relu())


X = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
NAMES = ["conv", "up", "down"]


def pruned(sparsity=0.5, where="[!h]*.weight"):
    torch.manual_seed(0)
    model = Net()
    algorithm = sf.static(sparsity, init="magnitude", where=where)
    return sf.modules.bake(model, algorithm.init(sf.modules.params_of(model)))


def config(**options):
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": NAMES, **options})


def wrapped(base=None, **options):
    return keep_zeros(peft.get_peft_model(pruned() if base is None else base, config(**options)))


def train(model, steps=4):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    for _ in range(steps):
        nn.functional.cross_entropy(model(X), torch.arange(8) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def zeros(model):
    return {name: parameter == 0 for name, parameter in model.named_parameters() if parameter.ndim > 1}


def same_zeros(model, other):
    a, b = zeros(model), zeros(other)
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_merged_has_the_zeros_of_the_base_and_the_outputs_of_the_trained_model(safe, dropout):
    base = pruned()
    model = train(wrapped(copy.deepcopy(base), lora_dropout=dropout))
    out = model(X)
    assert (out - base(X)).abs().max() > 0.1
    merged = model.merge_and_unload(safe_merge=safe)
    assert same_zeros(merged, base) and type(merged.up) is nn.Linear
    assert dict(merged.named_buffers()) == {} and merged.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(merged(X), out, rtol=1e-5, atol=1e-5)
    careless = peft.get_peft_model(copy.deepcopy(base), config(init_lora_weights=False)).merge_and_unload()
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
        torch.equal(getattr(model.base_model.model, n).base_layer.weight == 0, zeros(base)[f"{n}.weight"])
        for n in NAMES
    )
    torch.testing.assert_close(model(X), out, rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    for name in NAMES:
        weight = getattr(model.base_model.model, name).base_layer.weight
        torch.testing.assert_close(weight, getattr(base, name).weight, rtol=1e-5, atol=1e-6)
    with model.disable_adapter():
        torch.testing.assert_close(model(X), base(X), rtol=1e-5, atol=1e-5)
    assert same_zeros(model.unload(), base)


def test_adapters_of_later_and_their_mixtures():
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    model.add_adapter("second", config(init_lora_weights=False))
    model.add_weighted_adapter(["default", "second"], [0.5, 0.25], "mixed", combination_type="linear")
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


def test_a_batch_of_several_adapters():
    torch.manual_seed(0)
    base = pruned(where="[ud]*.weight")
    model = peft.get_peft_model(base, config(target_modules=["up", "down"], init_lora_weights=False))
    model.add_adapter("second", config(target_modules=["up", "down"], init_lora_weights=False))
    keep_zeros(model).eval()
    alone = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        alone[name] = model(X)
    names = ["default", "second", "__base__"] * 2 + ["second", "default"]
    out = model(X, adapter_names=names)
    with model.disable_adapter():
        alone["__base__"] = model(X)
    torch.testing.assert_close(out, torch.stack([alone[name][i] for i, name in enumerate(names)]), rtol=1e-5, atol=1e-5)


def test_saved_adapters_are_peft_s_own(tmp_path):
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert not torch.allclose(again(X), model(X), atol=1e-3)  # peft's own sum, without the mask
    assert torch.equal(keep_zeros(again)(X), model(X))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert not any("sparsefn" in name for name in model.state_dict())


def test_transposed_weights_and_half_precision():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=None)
    )
    where = sf.modules.weights_of(gpt2, skip=["lm_head"])
    algorithm = sf.static(0.5, init="magnitude", where=where)
    base = sf.modules.bake(gpt2, algorithm.init(sf.modules.params_of(gpt2))).to(torch.bfloat16).eval()
    lora = peft.LoraConfig(
        r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM"
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
    assert type(inner.down.lora_variant) is dict and not dict(inner.down.named_buffers())
    assert type(inner.up.lora_variant) is not dict


def test_it_may_be_called_twice_copied_pickled_and_compiled():
    base = pruned()
    model = train(wrapped(copy.deepcopy(base)))
    out = model(X)
    assert keep_zeros(model) is model and torch.equal(model(X), out)
    assert torch.equal(copy.deepcopy(model)(X), out)
    layer = model.base_model.model.up
    assert torch.equal(pickle.loads(pickle.dumps(layer))(X.flatten(1).repeat(1, 2)), layer(X.flatten(1).repeat(1, 2)))
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
    model = keep_zeros(peft.get_peft_model(copy.deepcopy(base), config(target_modules=["0", "1"])))
    assert same_zeros(model.merge_and_unload(), base)


# ---- what it refuses ------------------------------------------------------------------------------


def refused(model, text, error=ValueError):
    before = {name: type(m.lora_variant) for name, m in model.named_modules() if hasattr(m, "lora_variant")}
    with pytest.raises(error, match=text):
        keep_zeros(model)
    assert before == {name: type(m.lora_variant) for name, m in model.named_modules() if hasattr(m, "lora_variant")}
    assert not [name for name, _ in model.named_buffers() if "sparsefn" in name]


def test_models_without_lora():
    refused(
        pruned(),
        "keep_zeros: expected a model with LoRA layers, as peft.get_peft_model returns it, got a Net",
        TypeError,
    )
    with pytest.raises(TypeError, match="keep_zeros: expected a peft model, got dict"):
        keep_zeros({})
    ia3 = peft.IA3Config(target_modules=["up"], feedforward_modules=[])
    refused(peft.get_peft_model(pruned(), ia3), "'base_model.model.up': expected LoRA of a linear layer .* got Linear")


def test_a_base_without_zeros():
    refused(peft.get_peft_model(Net(), config()), "expected zeros in the weights beneath the adapters, got none: prune")
    pissa = config(target_modules=["up"], init_lora_weights="pissa")
    refused(peft.get_peft_model(pruned(), pissa), "got none: prune the model before .* with an init_lora_weights that")


def test_merged_adapters():
    model = peft.get_peft_model(pruned(), config())
    model.merge_adapter()
    refused(model, r"'base_model.model.conv': its adapters are merged: call unmerge_adapter\(\) first")


def test_variants_of_lora():
    dora = config(target_modules=["up"], use_dora=True)
    refused(peft.get_peft_model(pruned(), dora), "expected plain LoRA, got the DoraLinearVariant 'default'")
    model = wrapped(target_modules=["up"])
    with pytest.raises(
        ValueError, match="expected adapters of plain LoRA, got the DoraLinearVariant 'late': the zeros"
    ):
        model.add_adapter("late", dora)


def test_layers_that_are_not_known():
    embedding, grouped = nn.Sequential(nn.Embedding(6, 4)), nn.Sequential(nn.Conv2d(4, 4, 1, groups=2))
    with torch.no_grad():
        embedding[0].weight[0, 0] = grouped[0].weight[0] = 0.0
    refused(peft.get_peft_model(embedding, config(target_modules=["0"])), "model.0': expected LoRA of .* got Embedding")
    with pytest.warns(UserWarning, match="groups > 1"):
        model = peft.get_peft_model(grouped, config(r=2, target_modules=["0"]))
    refused(model, "'base_model.model.0': peft cannot merge a convolution of 2 groups")


def test_a_bias_of_lora_without_one_of_the_base():
    base = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        base[0].weight[0] = 0.0
    with pytest.warns(UserWarning, match="has no bias"):
        model = peft.get_peft_model(base, config(target_modules=["0"], lora_bias=True))
    refused(model, "expected a base with a bias for lora_bias in 'default', got none")


def test_weights_that_train_whole():
    base = pruned(where="*.weight")
    model = peft.get_peft_model(base, config(modules_to_save=["head"]))
    refused(model, r"'base_model.model.head.modules_to_save.default.weight': it trains whole, and has 30: freeze it")
    keep_zeros(peft.get_peft_model(pruned(), config(modules_to_save=["head"])))  # dense


def test_other_weights_beneath_are_noticed_when_they_are_merged():
    model = train(wrapped())
    with torch.no_grad():
        model.base_model.model.up.base_layer.weight.fill_(1.0)
    with pytest.raises(
        RuntimeError, match="merge: the base of a layer has other zeros than when keep_zeros was called"
    ):
        model.merge_and_unload()


def test_the_trap_of_attach_is_an_error_that_names_it():
    model = peft.get_peft_model(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), config(r=1, target_modules=["0"])
    )
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match=r"lora_B.*which are all zero .* sf.integrations.peft.keep_zeros\(model\)"):
        sf.attach(sf.static(None, init="from_zeros"), model, optimizer)
