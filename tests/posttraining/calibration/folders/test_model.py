"""The parts of a folder's model, and the blocks and leaves in them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from posttraining.calibration import tiny_lms
from posttraining.calibration.tiny_lms import weights_in
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules import module as torch_module

from sparsefn.nn.checkpoint.folders import StoredTensor, stored_in
from sparsefn.posttraining.calibration.folders.model import (
    OUTSIDE,
    check_part,
    empty_model,
    finish,
    leaves_in,
    open_folder,
    read_leaves,
    write_part,
)

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


def opened(path, make, blocks=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    tensors = dict(make().named_parameters())
    save_file(tensors, path / "model.safetensors")
    return open_folder(path, blocks, make, CPU)


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
    found = open_folder(folder, None, None, CPU)
    count = 2 if make is tiny_lms.t5 else 3
    assert (
        found.order
        == [f"{path}.{i}" for path in lists for i in range(count)]
        == list(found.blocks)
    )
    assert list(found.leaves) == [OUTSIDE, *found.order]
    names = [leaf.names[0] for leaves in found.leaves.values() for leaf in leaves]
    assert sorted(names) == sorted(
        name for name, _ in found.model.module.named_parameters()
    )
    for path, [(glob, chosen)] in found.blocks.items():
        assert (
            glob == f"{path}.*"
            and chosen
            and all(name.startswith(f"{path}.") for name in chosen)
        )
    weights, _ = found.load(found.order[1], CPU)
    assert {*weights} == {leaf.names[0] for leaf in found.leaves[found.order[1]]}
    outside = found.weights_outside_parts(CPU)
    assert {name for name, x in outside.items() if not x.is_meta} == {
        leaf.names[0] for leaf in found.leaves[OUTSIDE]
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

    found = opened(tmp_path, Experts)
    assert found.order == ["layers.0", "layers.1"]
    found = opened(
        tmp_path, Experts, ["layers.1.experts.0.*", ["layers.1.experts.1.*"]]
    )
    assert found.blocks == {
        "layers.1": [
            ("layers.1.experts.0.*", ["layers.1.experts.0.up.weight"]),
            (["layers.1.experts.1.*"], ["layers.1.experts.1.up.weight"]),
        ]
    }
    assert found.order == ["layers.0", "layers.1"]  # the first runs as it is


def test_blocks_that_are_not_in_one_layer_are_told(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"be in one layer of a list \('layers'\), but the matrices of "
        r"'layers.\*' are",
    ):
        opened(tmp_path, Model, ["layers.*"])
    with pytest.raises(
        ValueError, match=r"but the matrices of 'heads.0.weight' are 'heads.0.weight'"
    ):
        opened(tmp_path, Model, ["heads.0.weight"])
    with pytest.raises(
        ValueError, match=r"but the matrices of 'heads.0.bias' are nothing"
    ):
        opened(tmp_path, Model, ["heads.0.bias"])
    with pytest.raises(ValueError, match="blocks"):
        opened(tmp_path, Model, ["layer.*"])
    with pytest.raises(
        TypeError,
        match=r"expected blocks to be a sequence, with an entry a block, got "
        r"'layers.0.\*'",
    ):
        opened(tmp_path, Model, "layers.0.*")
    with pytest.raises(
        ValueError,
        match=r"which data passes them, but 'layers.2.\*' is before 'layers.0.\*'",
    ):
        opened(tmp_path, Model, ["layers.1.*", "layers.2.*", "layers.0.*"])
    with pytest.raises(
        ValueError,
        match="expected a model with a list of layers, but the Linear has none",
    ):
        opened(tmp_path, lambda: nn.Linear(2, 2))


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
        opened(tmp_path, Shared)

    class Outside(Model):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(4, 4, bias=False)
            self.embed.weight = self.layers[1].up.weight

    with pytest.raises(
        ValueError, match="'layers.1.up.weight', 'embed.weight' are one tensor"
    ):
        opened(tmp_path, Outside)


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
        open_folder(tmp_path / "experts", None, None, CPU)
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    assert open_folder(tmp_path / "joined", None, None, CPU).order == ["model.layers.0"]


transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path):
    return tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama")


def edited(folder, **changes):
    """The folder with some tensors changed, left out (None) or added, in one file."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def leaves_of_folder(folder, make=None):
    model = empty_model(folder, make, torch.float32)
    return leaves_in(model, stored_in("stream", folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [tiny_lms.llama, tiny_lms.gemma, tiny_lms.gpt2, tiny_lms.opt, tiny_lms.t5]
)
def test_it_is_the_model_that_from_pretrained_makes(tmp_path, make, dtype):
    folder = tiny_lms.folder_of(make, tmp_path / "model", dtype)
    whole = type(make()).from_pretrained(folder)
    random = torch.get_rng_state()
    model = empty_model(folder, None, torch.float32)
    assert (
        torch.equal(torch.get_rng_state(), random)
        and not torch_module._global_parameter_registration_hooks
    )
    assert (
        type(model) is type(whole)
        and not model.training
        and all(p.is_meta for p in model.parameters())
    )
    stored = stored_in("stream", folder)
    values, _ = read_leaves(folder, stored, leaves_in(model, stored))
    expected, buffers = whole.state_dict(), dict(whole.named_buffers())
    assert {*values} == {name for name, _ in whole.named_parameters()} | {
        name for name in expected if name in buffers
    }
    assert all(
        torch.equal(x, expected[name]) and x.dtype == expected[name].dtype
        for name, x in values.items()
    )
    own = dict(model.named_buffers())
    assert own.keys() == buffers.keys()
    assert all(
        torch.equal(x, buffers[name]) and x.dtype == buffers[name].dtype
        for name, x in own.items()
    )


def test_what_16_bits_are_too_few_for_stays_in_float32(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.t5, tmp_path / "t5", torch.float16)
    whole, stored = (
        type(tiny_lms.t5()).from_pretrained(folder),
        stored_in("stream", folder),
    )
    values, _ = read_leaves(
        folder, stored, leaves_in(empty_model(folder, None, torch.float32), stored)
    )
    dtypes = {name: param.dtype for name, param in whole.named_parameters()}
    assert {name: x.dtype for name, x in values.items()} == dtypes
    assert [*dtypes.values()].count(torch.float32) == 4  # `wo` of each layer


def test_a_parameter_under_two_names_is_one(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(2, 2))
            self.a, self.b, self.none = weight, weight, None
            self.register_parameter("other", None)
            self.c = nn.Linear(2, 2, bias=False)
            self.c.weight = weight

    model = empty_model(tmp_path, Tied, torch.float32)
    assert (
        [name for name, _ in model.named_parameters()] == ["a"]
        and model.a is model.c.weight
        and model.a.is_meta
    )
    (leaf,) = leaves_in(model, {"b": StoredTensor("f", (2, 2), "F32")})
    assert leaf.names == ("a", "b", "c.weight") and leaf.stored == ("b",)


def test_another_thread_makes_its_models_as_ever(tmp_path):
    def make():
        with ThreadPoolExecutor() as pool:
            others.append(pool.submit(nn.Linear, 2, 2).result())
        return nn.Linear(2, 2)

    others = []
    assert (
        empty_model(tmp_path, make, torch.float32).weight.is_meta
        and not others[0].weight.is_meta
    )


def test_the_dtype_is_that_of_the_config_or_else_of_the_files(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert (
        next(empty_model(folder, None, torch.bfloat16).parameters()).dtype
        == torch.bfloat16
    )
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    model, stored = (
        empty_model(folder, None, torch.bfloat16),
        stored_in("stream", folder),
    )
    values, _ = read_leaves(folder, stored, leaves_in(model, stored))
    assert all(x.dtype == torch.float32 for x in values.values())


def test_what_makes_no_model_is_told(folder):
    with pytest.raises(
        TypeError, match=r"expected make\(\) to give a module, got NoneType"
    ):
        empty_model(folder, lambda: None, torch.float32)
    with (
        torch.device("meta"),
        pytest.raises(
            ValueError, match="buffers in memory, but on meta are 'running_mean', "
        ),
    ):
        empty_model(folder, lambda: nn.BatchNorm1d(2), torch.float32)
    config = json.loads((folder / "config.json").read_text())
    for named in ("NoSuchModel", "__name__"):
        (folder / "config.json").write_text(
            json.dumps(config | {"architectures": [named]})
        )
        with pytest.raises(
            ValueError,
            match=f"name a class of transformers, got '{named}': stream and layer_sc",
        ):
            empty_model(folder, None, torch.float32)


PACKED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"load_in_4bit": True}, "quantization_config"),
        (PACKED | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
        (PACKED | {"format": "pack-quantized"}, "pack-quantized"),
        (
            PACKED | {"format": "dense", "config_groups": {"group_0": {}}},
            "compressed-tensors",
        ),
    ],
)
def test_weights_that_are_no_numbers_are_told(folder, said, how):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": said})
    )
    text = (
        f"has a quantization_config, by which they are stored as '{how}': load the "
        "model, dequantize or decompress it"
    )
    with pytest.raises(ValueError, match=text):
        empty_model(folder, None, torch.float32)


@pytest.mark.parametrize(
    "said", [[1], "gptq", {"quant_method": "a", "sparsity_config": [1]}]
)
def test_a_quantization_config_of_another_form(folder, said):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": said})
    )
    with pytest.raises(ValueError, match="and sparsity_config in it, to be objects, "):
        empty_model(folder, None, torch.float32)


def test_missing_and_unknown_tensors_are_told(folder):
    edited(folder, **{"model.norm.weight": None, "model.extra": torch.ones(1)})
    with pytest.raises(
        ValueError,
        match="missing are 'model.norm.weight', and unknown 'model.extra': where trans",
    ):
        leaves_of_folder(folder)
    edited(folder, **{"model.norm.weight": torch.ones(3), "model.extra": None})
    with pytest.raises(
        ValueError,
        match=r"expected a tensor of shape \(32,\) at 'model.norm.weight', got \(3,\)",
    ):
        leaves_of_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_of_8_bits_are_refused(folder, dtype):
    edited(folder, **{"model.norm.weight": torch.ones(32).to(dtype)})
    with pytest.raises(
        ValueError,
        match="expected floats of 16 bits or more at 'model.norm.weight', got .*8.*: "
        "such",
    ):
        leaves_of_folder(folder)


def test_a_folder_of_the_base_serves_the_model_and_old_names_are_passed_over(folder):
    tensors = {
        name: x
        for file in folder.glob("*.safetensors")
        for name, x in load_file(file).items()
    }
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    leaves = leaves_of_folder(edited(folder, **old), lambda: with_old(tiny_lms.llama()))
    assert len(leaves) == len(tensors)
    base = dict.fromkeys(tensors) | {
        name.removeprefix("model."): x for name, x in tensors.items()
    }
    edited(folder, **base, **dict.fromkeys(old))
    assert {leaf.names[0]: leaf.stored[0] for leaf in leaves_of_folder(folder)} == {
        n: n.removeprefix("model.") for n in tensors
    }


def with_old(model):
    model._keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]
    return model


def test_tied_leaves_may_be_stored_twice_if_they_are_equal(tmp_path):
    folder = tiny_lms.folder_of(
        tiny_lms.llama, tmp_path / "tied", tie_word_embeddings=True
    )
    embedding = {
        n: x for f in folder.glob("*.safetensors") for n, x in load_file(f).items()
    }["model.embed_tokens.weight"]
    edited(folder, **{"lm_head.weight": embedding.clone()})
    model, stored = (
        empty_model(folder, None, torch.float32),
        stored_in("stream", folder),
    )
    leaf = next(leaf for leaf in leaves_in(model, stored) if len(leaf.names) > 1)
    assert leaf.names == leaf.stored == ("model.embed_tokens.weight", "lm_head.weight")
    values, before = read_leaves(folder, stored, [leaf])
    assert (
        torch.equal(values["model.embed_tokens.weight"], embedding) and len(values) == 1
    )
    edited(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(
        ValueError,
        match="expected tied tensors to be equal, got others at "
        "'model.embed_tokens.weight', 'lm_",
    ):
        read_leaves(folder, stored_in("stream", folder), [leaf])
    edited(
        folder,
        **{
            "lm_head.weight": None,
            "model.embed_tokens.weight": embedding * float("nan"),
        },
    )
    leaf = leaf._replace(stored=leaf.stored[:1])
    assert read_leaves(folder, stored_in("stream", folder), [leaf])[1] != before


def test_a_digest_sees_every_bit(folder):
    model, stored = (
        empty_model(folder, None, torch.float32),
        stored_in("stream", folder),
    )
    leaves = leaves_in(model, stored)[:3]
    _, before = read_leaves(folder, stored, leaves)
    assert read_leaves(folder, stored, leaves[::-1])[1] == before
    edited(folder)
    assert read_leaves(folder, stored_in("stream", folder), leaves)[1] == before, (
        "the files that tensors are in do not matter"
    )
    changed = read_leaves(folder, stored_in("stream", folder), leaves)[0][
        leaves[1].names[0]
    ].clone()
    changed.view(torch.int32)[0] ^= 1
    edited(folder, **{leaves[1].stored[0]: changed})
    assert read_leaves(folder, stored_in("stream", folder), leaves)[1] != before


CPU = torch.device("cpu")


@pytest.fixture
def found(tmp_path):
    folder = tiny_lms.folder_of(
        tiny_lms.llama, tmp_path / "llama", layers=2, tie_word_embeddings=True
    )
    for name, text in [
        ("tokenizer.json", "{}"),
        ("pytorch_model.bin", "x"),
        (".hidden", "x"),
        ("README.md", "words"),
    ]:
        (folder / name).write_text(text)
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return open_folder(folder, None, None, CPU)


def test_it_is_a_folder_of_the_model(found, tmp_path):
    out = tmp_path / "out"
    (out / ".stream" / "0").mkdir(parents=True)
    (out / ".stream" / "0" / "outputs-0-0.pt").write_text("x")
    for path in found.leaves:
        write_part(found, out, path, found.load(path, CPU)[0])
    finish(found, out)
    shards = [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003")]
    assert (
        out / "additional_chat_templates" / "tools.jinja"
    ).read_text() == "{{ tools }}"
    others = [
        "README.md",
        "additional_chat_templates",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert sorted(os.listdir(out)) == sorted([*others, *shards])
    old, new = weights_in(found.path), weights_in(out)
    assert old.keys() == new.keys() and all(
        torch.equal(new[name], x) for name, x in old.items()
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == old.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in old.values())
    for shard in shards:
        with safe_open(out / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert {*file.keys()} == {
                name for name, own in index["weight_map"].items() if own == shard
            }
    tiny_lms.llama().from_pretrained(out)


def test_a_part_with_other_bits_is_told(found, tmp_path):
    weights, _ = found.load("model.layers.0", CPU)
    write_part(found, tmp_path, "model.layers.0", weights)
    check_part(
        found,
        tmp_path,
        "model.layers.0",
        {name: x.clone() for name, x in weights.items()},
    )
    name = "model.layers.0.mlp.up_proj.weight"
    other = weights[name].clone()
    other[0, 0] = -other[0, 0]
    with pytest.raises(
        ValueError, match=f"but '{name}' comes out otherwise: go on with the same prune"
    ):
        check_part(found, tmp_path, "model.layers.0", weights | {name: other})
    write_part(found, tmp_path, OUTSIDE, found.load(OUTSIDE, CPU)[0])
    assert (tmp_path / "model-00001-of-00003.safetensors").exists()
