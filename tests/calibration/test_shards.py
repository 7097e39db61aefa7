"""The folder that a run makes."""

import json
import os

import pytest
import torch
from calibration import tiny_lms
from calibration.tiny_lms import weights_in
from safetensors import safe_open

from sparsefn.calibration.plan import OUTSIDE, planned
from sparsefn.calibration.shards import check_part, finish, write_part

CPU = torch.device("cpu")


@pytest.fixture
def plan(tmp_path):
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
    return planned(folder, None, None, CPU)


def test_it_is_a_folder_of_the_model(plan, tmp_path):
    out = tmp_path / "out"
    (out / ".stream" / "0").mkdir(parents=True)
    (out / ".stream" / "0" / "outputs-0-0.pt").write_text("x")
    for path in plan.leaves:
        write_part(plan, out, path, plan.load(path, CPU)[0])
    finish(plan, out)
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
    old, new = weights_in(plan.folder), weights_in(out)
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


def test_a_part_with_other_bits_is_told(plan, tmp_path):
    weights, _ = plan.load("model.layers.0", CPU)
    write_part(plan, tmp_path, "model.layers.0", weights)
    check_part(
        plan,
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
        check_part(plan, tmp_path, "model.layers.0", weights | {name: other})
    write_part(plan, tmp_path, OUTSIDE, plan.load(OUTSIDE, CPU)[0])
    assert (tmp_path / "model-00001-of-00003.safetensors").exists()
