"""What keep_zeros refuses, naming the layer, and what is noticed later."""

import pytest
import torch
from torch import nn

import sparsefn as sf

peft = pytest.importorskip("peft")
from tests.integrations.lora_nets import Net, config, pruned, train, wrapped  # noqa: E402

keep_zeros = sf.integrations.peft.keep_zeros


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


@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = peft.get_peft_model(pruned(), config())
        layer = model.base_model.model.up.base_layer
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)]))
        refused(model, "keep_zeros: expected plain tensors, got a DTensor at 'base_model.model.up.weight'")
    finally:
        dist.destroy_process_group()


def test_other_weights_beneath_are_noticed_when_they_are_merged():
    model = train(wrapped())
    with torch.no_grad():
        model.base_model.model.up.base_layer.weight.fill_(1.0)
    with pytest.raises(RuntimeError, match="merge: a layer's base has other zeros than when keep_zeros was called"):
        model.merge_and_unload()


def test_the_trap_of_attach_is_an_error_that_names_it():
    model = peft.get_peft_model(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), config(r=1, target_modules=["0"])
    )
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match=r"lora_B.*which are all zero .* sf.integrations.peft.keep_zeros\(model\)"):
        sf.attach(sf.static(None, init="from_zeros"), model, optimizer)
