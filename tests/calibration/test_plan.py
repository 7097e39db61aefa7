"""The parts of a folder's model, and the blocks and leaves in them."""

import pytest
import torch
import transformers
from calibration import tiny_lms
from safetensors.torch import save_file
from torch import nn

from sparsefn.calibration.plan import OUTSIDE, planned

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        if weight is not None:
            self.up.weight = weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))


def plan_of(path, make, blocks=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    tensors = dict(make().named_parameters())
    save_file(tensors, path / "model.safetensors")
    return planned(path, blocks, make, CPU)


@pytest.mark.parametrize(
    ("make", "lists"),
    [
        (tiny_lms.llama, ["model.layers"]),
        (tiny_lms.gpt2, ["transformer.h"]),
        (tiny_lms.opt, ["model.decoder.layers"]),
        (tiny_lms.t5, ["encoder.block", "decoder.block"]),
    ],
)
def test_the_layers_are_the_parts_and_every_leaf_is_in_one(tmp_path, make, lists):
    folder = tiny_lms.folder_of(make, tmp_path / "model")
    plan = planned(folder, None, None, CPU)
    count = 2 if make is tiny_lms.t5 else 3
    assert (
        plan.order
        == [f"{path}.{i}" for path in lists for i in range(count)]
        == list(plan.blocks)
    )
    assert list(plan.leaves) == [OUTSIDE, *plan.order]
    names = [leaf.names[0] for leaves in plan.leaves.values() for leaf in leaves]
    assert sorted(names) == sorted(name for name, _ in plan.model.named_parameters())
    for path, [(glob, chosen)] in plan.blocks.items():
        assert (
            glob == f"{path}.*"
            and chosen
            and all(name.startswith(f"{path}.") for name in chosen)
        )
    weights, _ = plan.load(plan.order[1], CPU)
    assert {*weights} == {leaf.names[0] for leaf in plan.leaves[plan.order[1]]}
    outside = plan.outside(CPU)
    assert {name for name, x in outside.items() if not x.is_meta} == {
        leaf.names[0] for leaf in plan.leaves[OUTSIDE]
    }


def test_experts_are_inside_of_layers_and_plain_heads_are_no_layers(tmp_path):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Layer() for _ in range(2))

    class Experts(Model):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Routed() for _ in range(2))

    plan = plan_of(tmp_path, Experts)
    assert plan.order == ["layers.0", "layers.1"]
    plan = plan_of(
        tmp_path, Experts, ["layers.1.experts.0.*", ["layers.1.experts.1.*"]]
    )
    assert plan.blocks == {
        "layers.1": [
            ("layers.1.experts.0.*", ["layers.1.experts.0.up.weight"]),
            (["layers.1.experts.1.*"], ["layers.1.experts.1.up.weight"]),
        ]
    }
    assert plan.order == ["layers.0", "layers.1"]  # the first runs as it is


def test_blocks_that_are_not_in_one_layer_are_told(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"be in one layer of a list \('layers'\), but the matrices of "
        r"'layers.\*' are",
    ):
        plan_of(tmp_path, Model, ["layers.*"])
    with pytest.raises(
        ValueError, match=r"but the matrices of 'heads.0.weight' are 'heads.0.weight'"
    ):
        plan_of(tmp_path, Model, ["heads.0.weight"])
    with pytest.raises(
        ValueError, match=r"but the matrices of 'heads.0.bias' are nothing"
    ):
        plan_of(tmp_path, Model, ["heads.0.bias"])
    with pytest.raises(ValueError, match="blocks"):
        plan_of(tmp_path, Model, ["layer.*"])
    with pytest.raises(
        TypeError,
        match=r"expected blocks to be a sequence, with an entry a block, got "
        r"'layers.0.\*'",
    ):
        plan_of(tmp_path, Model, "layers.0.*")
    with pytest.raises(
        ValueError,
        match=r"which data passes them, but 'layers.2.\*' is before 'layers.0.\*'",
    ):
        plan_of(tmp_path, Model, ["layers.1.*", "layers.2.*", "layers.0.*"])
    with pytest.raises(
        ValueError,
        match="expected a model with a list of layers, but the Linear has none",
    ):
        plan_of(tmp_path, lambda: nn.Linear(2, 2))


def test_leaves_that_layers_share_are_told(tmp_path):
    class Shared(Model):
        def __init__(self):
            super().__init__()
            self.layers[2].up.weight = self.layers[0].up.weight

    with pytest.raises(
        ValueError,
        match="'layers.0.up.weight', 'layers.2.up.weight' are one tensor: prune the "
        "model in",
    ):
        plan_of(tmp_path, Shared)

    class Outside(Model):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4, bias=False)
            self.embed.weight = self.layers[1].up.weight

    with pytest.raises(
        ValueError, match="'layers.1.up.weight', 'embed.weight' are one tensor"
    ):
        plan_of(tmp_path, Outside)


def test_files_of_experts_that_transformers_joins_are_told(tmp_path):
    sizes = tiny_lms.SIZES | {
        "num_local_experts": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    model.save_pretrained(tmp_path / "experts")
    with pytest.raises(
        ValueError,
        match="missing are 'model.layers.0.mlp.gate.weight', "
        ".*save_original_format=False",
    ):
        planned(tmp_path / "experts", None, None, CPU)
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    assert planned(tmp_path / "joined", None, None, CPU).order == ["model.layers.0"]
