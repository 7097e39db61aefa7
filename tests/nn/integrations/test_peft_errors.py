"""What keep_zeros refuses, naming the layer, and what is noticed later."""

import copy

import pytest
import torch
from torch import nn

import sparsefn as sf

peft = pytest.importorskip("peft")
from tests.nn.integrations.lora_nets import (  # noqa: E402
    NAMES,
    Net,
    X,
    config,
    llama,
    pruned,
    train,
    wrapped,
)

keep_zeros = sf.integrations.peft.keep_zeros


def refused(model, text, error=ValueError):
    def marks():
        layers = {
            name: type(m.lora_variant)
            for name, m in model.named_modules()
            if hasattr(m, "lora_variant")
        }
        return layers, [name for name, _ in model.named_buffers() if "sparsefn" in name]

    before = marks()
    with pytest.raises(error, match=text):
        keep_zeros(model)
    assert before == marks()


def test_models_without_lora():
    refused(
        pruned(),
        "keep_zeros: expected LoRA of peft.get_peft_model, got a Net without it",
        TypeError,
    )
    with pytest.raises(TypeError, match="keep_zeros: expected a peft model, got dict"):
        keep_zeros({})
    ia3 = peft.IA3Config(target_modules=["up"], feedforward_modules=[])
    text = (
        "base_model.model.up': expected LoRA of a linear .* not quantised, got "
        "peft.tuners.ia3.layer.Linear of torch.fl"
    )
    refused(peft.get_peft_model(pruned(), ia3), text)


def test_a_base_without_zeros():
    text = (
        "keep_zeros: expected zeros beneath the adapters, got none: prune before they "
        "are added"
    )
    refused(peft.get_peft_model(Net(), config()), text)


def test_starts_that_rewrite_the_base():
    # OLoRA leaves a few zeros in this layer, by chance.
    with torch.random.fork_rng():
        for start in ("olora", "OLoRA", "pissa", "pissa_niter_2"):
            model = peft.get_peft_model(
                pruned(), config(target_modules=["up"], init_lora_weights=start)
            )
            text = (
                "keep_zeros: expected init_lora_weights that keep zeros, such as "
                f"True, got '{start}'"
            )
            refused(model, text)
            late = wrapped(target_modules=["down"])
            weight = late.base_model.model.up.weight.clone()
            with pytest.raises(ValueError, match=text):
                late.add_adapter(
                    "late", config(target_modules=["up"], init_lora_weights=start)
                )
            assert torch.equal(late.base_model.model.up.weight, weight) and list(
                late.peft_config
            ) == ["default"]


@pytest.mark.parametrize("start", ["corda", "loftq", "lora_ga"])
def test_starts_that_need_more_than_the_model_are_known_by_their_config(start):
    model = peft.get_peft_model(pruned(), config())
    model.peft_config["default"].init_lora_weights = start
    refused(model, f"that keep zeros, such as True, got '{start}'")


@pytest.mark.filterwarnings("ignore:.*eva.*")
@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_starts_that_leave_the_base_as_it_is(start):
    base = pruned()
    model = wrapped(
        copy.deepcopy(base), r=2, target_modules=["up", "down"], init_lora_weights=start
    )
    for name in ("up", "down"):
        assert torch.equal(
            getattr(model.base_model.model, name).base_layer.weight,
            getattr(base, name).weight,
        )


def test_merged_adapters():
    model = peft.get_peft_model(pruned(), config())
    model.merge_adapter()
    refused(
        model,
        r"'base_model.model.conv': its adapters are merged: call unmerge_adapter\(\) "
        r"first",
    )
    filled = peft.get_peft_model(pruned(), config(init_lora_weights=False))
    filled.merge_adapter()  # no zero is left
    refused(
        filled,
        r"'base_model.model.conv': its adapters are merged: call unmerge_adapter\(\) "
        r"first",
    )
    filled.unmerge_adapter()
    assert keep_zeros(filled) is filled


def test_variants_of_lora():
    dora = config(target_modules=["up"], use_dora=True)
    refused(
        peft.get_peft_model(pruned(), dora),
        "expected plain LoRA, got the DoraLinearVariant 'default'",
    )


@pytest.mark.parametrize("seen", ["up", "down"])
@pytest.mark.parametrize(
    ("late", "text"),
    [
        (
            config(target_modules=["up"], use_dora=True),
            "model.up': expected plain LoRA, got the DoraLinearVariant 'late'",
        ),
        (
            config(target_modules=["up"], modules_to_save=["conv"]),
            "conv.original_module.weight': it trains whole",
        ),
    ],
    ids=["DoRA", "modules_to_save"],
)
def test_adapters_of_later_that_lose_zeros_are_refused_and_leave_nothing(
    seen, late, text
):
    base = pruned()
    model = train(wrapped(copy.deepcopy(base), target_modules=[seen]))
    out = model(X)
    with pytest.raises(ValueError, match=text):
        model.add_adapter("late", late)
    assert list(model.peft_config) == ["default"] and model.active_adapters == [
        "default"
    ]
    assert not [name for name, _ in model.named_parameters() if "late" in name]
    assert torch.equal(model(X), out)
    # the name is free
    model.add_adapter("late", config(target_modules=["up"], init_lora_weights=False))
    merged = model.merge_and_unload(adapter_names=["default", "late"])
    assert all(
        torch.equal(getattr(merged, name).weight == 0, getattr(base, name).weight == 0)
        for name in NAMES
    )


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_layers_that_something_else_has_wrapped_are_noticed_when_they_are_merged():
    model = wrapped(target_modules=["up"])
    peft.inject_adapter_in_model(
        config(target_modules=["down"]), model.base_model.model, "late"
    )
    text = (
        r"^merge: expected the zeros that keep_zeros saw, got others in 'model.down': "
        r"call it again$"
    )
    with pytest.raises(RuntimeError, match=text):
        model.merge_adapter()
    assert not model.base_model.model.up.merged
    keep_zeros(model)
    peft.inject_adapter_in_model(
        config(target_modules=["conv"], use_dora=True), model.base_model.model, "later"
    )
    with pytest.raises(
        ValueError, match="expected plain LoRA, got the DoraConv2dVariant 'later'"
    ):
        model.merge_adapter()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_of_transformers_itself():
    base = llama()
    algorithm = sf.static(0.5, init="magnitude", where="*_proj.weight")
    model = sf.modules.bake(base, algorithm.init(sf.modules.params_of(base)))
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    keep_zeros(model)
    model.add_adapter(
        peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False), "late"
    )
    layer = model.model.layers[0].self_attn.v_proj
    assert type(layer.lora_variant) is dict  # nothing tells of it
    assert (
        type(keep_zeros(model).model.layers[0].self_attn.v_proj.lora_variant)
        is not dict
    )
    zeros = layer.base_layer.weight == 0
    layer.merge(adapter_names=["late"])
    assert torch.equal(layer.base_layer.weight == 0, zeros)
    layer.unmerge()
    model.add_adapter(
        peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "later"
    )
    refused(
        model,
        "'model.layers.0.self_attn.q_proj': expected plain LoRA, got the "
        "DoraLinearVariant 'later'",
    )


def test_layers_that_are_not_known():
    embedding, grouped = (
        nn.Sequential(nn.Embedding(6, 4)),
        nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)),
    )
    with torch.no_grad():
        embedding[0].weight[0, 0] = grouped[0].weight[0] = 0.0
    text = (
        "model.0': expected LoRA of .* got peft.tuners.lora.layer.Embedding of "
        "torch.float32"
    )
    refused(peft.get_peft_model(embedding, config(target_modules=["0"])), text)
    whole = pruned()
    whole.up.weight = nn.Parameter(
        (100 * whole.up.weight).to(torch.int8), requires_grad=False
    )
    model = peft.get_peft_model(
        whole, config(target_modules=["up"]), autocast_adapter_dtype=False
    )
    refused(model, "not quantised, got peft.tuners.lora.layer.Linear of torch.int8")
    with pytest.warns(UserWarning, match="groups > 1"):
        model = peft.get_peft_model(grouped, config(r=2, target_modules=["0"]))
    refused(model, "'base_model.model.0': peft cannot merge a convolution of 2 groups")


def test_a_bias_of_lora_without_one_of_the_base():
    base = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        base[0].weight[0] = 0.0
    with pytest.warns(UserWarning, match="has no bias"):
        model = peft.get_peft_model(base, config(target_modules=["0"], lora_bias=True))
    refused(
        model, "expected a base with a bias for the lora_bias of 'default', got none"
    )


def test_weights_that_train_whole():
    base = pruned(where="*.weight")
    model = peft.get_peft_model(base, config(modules_to_save=["head"]))
    refused(
        model,
        "'base_model.model.head.original_module.weight': it trains whole, with 30: "
        "freeze it or leave it out of mod",
    )
    dense = pruned()
    with torch.no_grad():
        nn.init.zeros_(dense.head.weight)  # a start, not a mask
    keep_zeros(peft.get_peft_model(pruned(), config(modules_to_save=["head"])))
    keep_zeros(peft.get_peft_model(dense, config(modules_to_save=["head"])))
    model = peft.get_peft_model(pruned(), config(target_modules=["up"]))
    model.base_model.model.down.requires_grad_(True)
    refused(
        model, "'base_model.model.down.weight': it trains whole, with 120: freeze it"
    )


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_the_head_of_a_language_model_is_no_exception():
    where = ["lm_head.weight", "model.embed_tokens.weight", "*q_proj.weight"]
    for name, zeros in (("lm_head", 160), ("embed_tokens", 160)):
        base = llama()
        algorithm = sf.static(0.5, init="magnitude", where=where)
        base = sf.modules.bake(base, algorithm.init(sf.modules.params_of(base)))
        model = peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
        )
        refused(
            model,
            f"{name}.original_module.weight': it trains whole, with {zeros}: freeze "
            "it or leave it out",
        )


def test_a_few_zeros_of_rounding_may_train_whole():
    base = pruned(where="up.weight")
    base.down = nn.Linear(20, 12)
    with torch.no_grad():
        base.down.weight[0, :2] = 0.0  # of 240
    keep_zeros(
        peft.get_peft_model(
            base, config(target_modules=["up"], modules_to_save=["down"])
        )
    )


def test_copies_that_do_not_train_now(tmp_path):
    base = pruned(where="*.weight")
    model = peft.get_peft_model(copy.deepcopy(base), config())
    model.add_adapter("late", config(modules_to_save=["head"]))
    text = (
        "'base_model.model.head.original_module.weight': it trains whole, with 30: "
        "freeze it or leave it out of modules"
    )
    refused(model, text)
    model.set_adapter("late")
    # as training fills it
    nn.init.ones_(model.base_model.model.head.modules_to_save["late"].weight)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "late")
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert (loaded.base_model.model.head.modules_to_save["default"].weight != 0).all()
    refused(loaded, text)
    with pytest.warns(UserWarning, match="Adapter late was active"):
        model.delete_adapter("late")
    assert keep_zeros(model) is model
    with pytest.raises(
        ValueError,
        match=r"'model.head.original_module.weight': it trains whole, with 30: freeze "
        r"it",
    ):
        model.load_adapter(tmp_path / "late", "again")
    assert list(model.peft_config) == ["default"]


@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = peft.get_peft_model(pruned(), config())
        layer = model.base_model.model.up.base_layer
        layer.weight = nn.Parameter(
            distribute_tensor(
                layer.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)]
            )
        )
        refused(
            model,
            "keep_zeros: expected plain tensors, got a DTensor at "
            "'base_model.model.up.weight'",
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("where", ["up", "down"])
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_other_zeros_beneath_are_noticed_before_they_are_merged(where, merge):
    model = train(wrapped(pruned(where="up.weight")))  # down is dense
    layer = getattr(model.base_model.model, where).base_layer
    with torch.no_grad():
        layer.weight[:, :2] = 0.0
    text = (
        "^merge: expected the zeros that keep_zeros saw, got others in "
        f"'model.{where}': call it again$"
    )
    with pytest.raises(RuntimeError, match=text):
        getattr(model, merge)()
    zeros = layer.weight == 0
    assert zeros[:, :2].all() and not model.base_model.model.up.merged
    getattr(keep_zeros(model), merge)()
    assert torch.equal(layer.weight == 0, zeros)


def test_lost_zeros_beneath_are_noticed_before_they_are_merged():
    model = train(wrapped())
    with torch.no_grad():
        model.base_model.model.up.base_layer.weight.fill_(1.0)
    with pytest.raises(
        RuntimeError,
        match="merge: expected the zeros that keep_zeros saw, got others in 'model.up'",
    ):
        model.merge_and_unload()


def test_the_trap_of_attach_is_an_error_that_names_it():
    model = peft.get_peft_model(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))),
        config(r=1, target_modules=["0"]),
    )
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(
        ValueError,
        match=r"lora_B.*which are all zero .* sf.integrations.peft.keep_zeros\(model\)",
    ):
        sf.attach(sf.static(None, init="from_zeros"), model, optimizer)


class Experts(nn.Module):
    """Two experts in leaves of three dimensions, and their biases."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(2, 6, 4)),
            nn.Parameter(torch.randn(2, 4, 6)),
        )
        self.bias = nn.Parameter(torch.zeros(2, 6))

    def forward(self, x):
        hidden = torch.relu(
            torch.einsum("eoi,bi->ebo", self.up, x) + self.bias[:, None]
        )
        return torch.einsum("eoi,ebi->bo", self.down, hidden)


class Mixture(nn.Module):
    def __init__(self, zeros):
        super().__init__()
        self.first, self.experts = nn.Linear(4, 4), Experts()
        with torch.no_grad():
            for name in zeros:
                param = self.get_parameter(name)
                param.mul_(torch.arange(param.numel()).reshape(param.shape) % 2)

    def forward(self, x):
        return self.experts(self.first(x))


@pytest.mark.parametrize("target", ["experts.up", "experts.down"])
def test_parameters_that_are_adapted_by_name(target):
    options = {
        "target_modules": ["first"],
        "target_parameters": ["experts.up", "experts.down"],
    }
    model = peft.get_peft_model(Mixture(["first.weight", target]), config(**options))
    text = (
        f"cannot keep the zeros of '.*{target[8:]}': target_parameters adapts it .* "
        "leave it out of target_parameters"
    )
    refused(model, text)
    # Zeros of parameters that no adapter changes stay, and dense ones may change.
    others = {"experts.up", "experts.down"} - {target}
    torch.manual_seed(0)
    base = Mixture(["first.weight", target])
    before = {name: param.detach().clone() for name, param in base.named_parameters()}
    changing = {"target_parameters": [*others], "init_lora_weights": False}
    model = keep_zeros(
        peft.get_peft_model(base, config(target_modules=["first"], **changing))
    )
    merged = model.merge_and_unload()
    assert torch.equal(merged.first.weight == 0, before["first.weight"] == 0)
    assert torch.equal(merged.get_parameter(target), before[target])
    assert not any(
        torch.equal(merged.get_parameter(name), before[name])
        for name in ("first.weight", *others)
    )
