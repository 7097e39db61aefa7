"""Folders without some layers: what is left is as it was, whatever happens on the
way.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from nn.distributed.harness import on_ranks
from posttraining.calibration import tiny_lms
from posttraining.calibration.tiny_lms import (
    BATCHES,
    WORDS,
    differing,
    ending_at,
    files,
    wanda,
    weights_in,
)
from safetensors.torch import save_file

import sparsefn as sf

LAYERS = {
    "llama": "model.layers",
    "gemma": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "neox": "gpt_neox.layers",
    "qwen_moe": "model.layers",
}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def folder(tmp_path):
    return tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama")


def cut_by_hand(model, path, kept):
    """The model with a shorter list of layers, which know their new places."""
    layers = [model.get_submodule(path)[i] for i in kept]
    model.set_submodule(path, torch.nn.ModuleList(layers))
    for i, layer in enumerate(layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = i
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    return model


def generated(model):
    mask = torch.ones_like(WORDS)
    with torch.no_grad():
        return model.generate(WORDS, attention_mask=mask, pad_token_id=0, **GREEDY)


@pytest.mark.deep(but=["gpt2-*"])
@pytest.mark.parametrize("gone", [[0], [1], [1, 2]])
@pytest.mark.parametrize(
    "make",
    [
        tiny_lms.llama,
        tiny_lms.gemma,
        tiny_lms.gpt2,
        tiny_lms.opt,
        tiny_lms.neox,
        tiny_lms.qwen_moe,
    ],
)
def test_it_is_the_model_without_the_layers(tmp_path, make, gone):
    folder = tiny_lms.folder_of(make, tmp_path / "model")
    (folder / "notes.txt").write_text("mine")
    path = LAYERS[make.__name__]
    total = 4 if make is tiny_lms.qwen_moe else 3
    kept = [i for i in range(total) if i not in gone]
    before, random = files(folder), torch.get_rng_state()
    out = tmp_path / "out"
    names = sf.calibration.drop_layers(folder, [f"{path}.{i}" for i in gone], out)
    assert torch.equal(torch.get_rng_state(), random) and files(folder) == before
    old, new = weights_in(folder), weights_in(out)
    renamed = {names[name]: x for name, x in old.items() if names[name] is not None}
    assert {name for name in old if names[name] is None} == {
        name for name in old if name.startswith(tuple(f"{path}.{i}." for i in gone))
    }
    assert renamed.keys() == new.keys()
    assert all(torch.equal(x, new[name]) for name, x in renamed.items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == new.keys()
    size = sum(x.nbytes for x in new.values())
    assert index["metadata"]["total_size"] == size
    for name in ("generation_config.json", "notes.txt"):
        assert (out / name).read_bytes() == before[name]
    kind = type(make())
    wanted = cut_by_hand(kind.from_pretrained(folder).eval(), path, kept)
    small = kind.from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(small(WORDS).logits, wanted(WORDS).logits)
    assert torch.equal(generated(small), generated(wanted))


@pytest.mark.deep(but=["llama"])
@pytest.mark.parametrize("make", [tiny_lms.llama, tiny_lms.gpt2])
def test_it_is_the_model_that_shrink_makes(tmp_path, make):
    folder = tiny_lms.folder_of(make, tmp_path / "model")
    model = type(make()).from_pretrained(folder).eval()
    scores = sf.calibration.layer_scores(folder, BATCHES)
    gone = scores.lowest(0.4)  # 1.2 of 3
    assert len(gone) == 1
    example = {"input_ids": WORDS, "use_cache": False}
    layers = sf.shrinking.layers(model, example, by="module")
    masks = layers.masks([scores.layers.index(gone[0])])
    state = sf.State(sf.modules.params_of(model), masks)
    wanted = sf.shrink(model, state, example, groups=layers)
    sf.calibration.drop_layers(folder, gone, tmp_path / "out")
    small = type(model).from_pretrained(tmp_path / "out").eval()
    found, expected = small.state_dict(), wanted.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert torch.equal(generated(small), generated(wanted))


@pytest.mark.deep
def test_encoder_and_decoder(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.t5, tmp_path / "t5")
    gone = ["decoder.block.1", "encoder.block.1"]
    sf.calibration.drop_layers(folder, gone, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_layers"], config["num_decoder_layers"]) == (1, 1)
    small = tiny_lms.t5().from_pretrained(tmp_path / "out")
    assert len(small.encoder.block) == len(small.decoder.block) == 1
    # the first block of each has the table of relative places
    with pytest.raises(
        ValueError, match=r"'encoder\.block\.0\..*\.relative_attention_bias' is new"
    ):
        sf.calibration.drop_layers(folder, ["encoder.block.0"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_is_left_is_pruned_by_stream(folder, tmp_path):
    gone = ["model.layers.1"]
    sf.calibration.drop_layers(folder, gone, tmp_path / "short")
    errors = sf.calibration.stream(
        tmp_path / "short", wanda, BATCHES, tmp_path / "out", of="square"
    )
    assert list(errors) == ["model.layers.0.*", "model.layers.1.*"]
    kind = type(tiny_lms.llama())
    whole = kind.from_pretrained(folder).eval()
    cut = cut_by_hand(whole, "model.layers", [0, 2])
    state = sf.calibration.in_order(
        cut, None, list(errors), wanda, {"input_ids": WORDS}, chunk_size=2, of="square"
    )
    found = sf.modules.params_of(kind.from_pretrained(tmp_path / "out"))
    wanted = sf.effective(state)
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())


def test_a_folder_of_the_base_of_a_model(tmp_path):
    torch.manual_seed(0)
    model = tiny_lms.gpt2()
    model.transformer.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    names = sf.calibration.drop_layers(
        tmp_path / "base", ["transformer.h.0"], tmp_path / "out"
    )
    assert names["transformer.h.2.ln_1.weight"] == "transformer.h.1.ln_1.weight"
    old, new = weights_in(tmp_path / "base"), weights_in(tmp_path / "out")
    assert torch.equal(old["h.2.mlp.c_fc.weight"], new["h.1.mlp.c_fc.weight"])
    assert "h.2.mlp.c_fc.weight" not in new and len(new) < len(old)
    small = type(model).from_pretrained(tmp_path / "out")
    weight = small.transformer.h[1].mlp.c_fc.weight
    assert torch.equal(weight, model.transformer.h[2].mlp.c_fc.weight)


def test_bfloat16_and_one_file(tmp_path):
    model = tiny_lms.llama().bfloat16()
    model.save_pretrained(tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").exists()
    sf.calibration.drop_layers(tmp_path / "one", ["model.layers.0"], tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    new = weights_in(tmp_path / "out")
    assert {x.dtype for x in new.values()} == {torch.bfloat16}
    small = type(model).from_pretrained(tmp_path / "out")
    old = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(small.model.layers[0].mlp.up_proj.weight, old)


# ---- killed --------------------------------------------------------------------------


def test_killed_at_any_file_it_goes_on_with_the_same_bits(folder, tmp_path):
    gone = ["model.layers.0"]
    sf.calibration.drop_layers(folder, gone, tmp_path / "whole")
    number = 0
    while True:
        out = tmp_path / f"out{number}"
        try:
            with ending_at(number):
                sf.calibration.drop_layers(folder, gone, out)
        except KeyboardInterrupt:
            if out.exists():  # nothing takes it for a model
                with pytest.raises(ValueError, match="expected config.json and model"):
                    sf.calibration.drop_layers(out, gone, tmp_path / "no")
                with pytest.raises((OSError, ValueError)):
                    transformers.AutoModelForCausalLM.from_pretrained(out)
            sf.calibration.drop_layers(folder, gone, out)
            assert differing(out, tmp_path / "whole") == {}
            shutil.rmtree(out)
            number += 1
        else:
            break
    # the journal, three files with their lines in it, three other files, the index
    assert number >= 10
    assert differing(out, tmp_path / "whole") == {}


def test_what_is_there_is_looked_at(folder, tmp_path):
    gone = ["model.layers.0"]
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), ending_at(5):
        sf.calibration.drop_layers(folder, gone, out)

    def told(text, layers=gone):
        with pytest.raises(ValueError, match=f"^drop_layers: {text}"):
            sf.calibration.drop_layers(folder, layers, out)

    told(
        "expected the run that was killed in '.*out', but of another run were its lay",
        ["model.layers.1"],
    )
    with pytest.raises(
        ValueError, match="^stream: expected the run that was killed in '.*out', but of"
    ):
        sf.calibration.stream(folder, wanda, BATCHES, out)
    file = next(
        path
        for path in sorted(folder.glob("*.safetensors"))
        if "model.embed_tokens.weight" in weights_in_file(path)
    )
    before = file.read_bytes()
    weights = weights_in_file(file)
    save_file({name: x + 1 for name, x in weights.items()}, file, {"format": "pt"})
    told("expected the run that was killed in '.*out', but the weights of 'the embedd")
    file.write_bytes(before)
    sf.calibration.drop_layers(folder, gone, out)
    told("expected '.*out' to be new or a run that was killed, got 'config.json', ")


def weights_in_file(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_a_full_disk_is_told(folder, tmp_path):
    with (
        pytest.raises(
            OSError,
            match="^drop_layers: '.*' could not be written: .* make room, and the same",
        ),
        ending_at(3, OSError("No space left on device")),
    ):
        sf.calibration.drop_layers(folder, ["model.layers.0"], tmp_path / "out")
    sf.calibration.drop_layers(folder, ["model.layers.0"], tmp_path / "out")


# ---- bad input -----------------------------------------------------------------------


def test_bad_input(folder, tmp_path):
    def told(text, layers=("model.layers.1",), error=ValueError, at=folder, out=None):
        with pytest.raises(error, match=f"^drop_layers: {text}"):
            sf.calibration.drop_layers(at, layers, out or tmp_path / "out")
        assert not (tmp_path / "out").exists()

    every = [f"model.layers.{i}" for i in range(3)]
    told("expected one layer of 'model.layers' to stay, but all of its 3 go", every)
    told("expected a layer to drop, got none", [])
    told(
        r"expected layers of 'model\.layers\.0', .*, got 'model\.layers\.3'",
        ["model.layers.3"],
    )
    told(r"expected paths of layers, as 'model\.layers\.0', got 1", [1], TypeError)
    told(
        r"expected layers to be a sequence of paths, as \['model\.layers\.3'\], got 'm",
        "model.layers.1",
        TypeError,
    )
    told("expected another folder to write to, got '.*' twice", out=folder)
    told("expected the folder of a model, got '.*', which is", at=tmp_path / "none")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    told("expected '.*full' to be new or a run that was killed, got 'notes", out=full)
    assert os.listdir(full) == ["notes.txt"]
    half = shutil.copytree(folder, tmp_path / "half")
    (half / "model.safetensors.index.json").unlink()
    told("expected config.json and model.safetensors or", at=half)
    other = shutil.copytree(folder, tmp_path / "other")
    for named in (None, ["MyLlama"]):
        edit(other, architectures=named)
        told(
            "expected config.json to name a class of transformers, which makes the mode"
            f"l with fewer layers, got {named[0] if named else None!r}: remove the",
            at=other,
        )


def test_files_of_another_form(folder, tmp_path):
    def told(text, **files):
        changed = shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True)
        for name, held in files.items():
            (changed / NAMES[name]).write_text(json.dumps(held))
        with pytest.raises(ValueError, match=f"^drop_layers: expected {text}"):
            sf.calibration.drop_layers(changed, ["model.layers.1"], tmp_path / "out")

    told(r"'.*index.json' to hold an object of JSON, .*, got \[\]: write", index=[])
    told("the weight_map of '.*index.json' to be an obj", index={"weight_map": [1]})
    told("'.*config.json' to hold an object of JSON, .*, got .1.: write", config=[1])
    config = json.loads((folder / "config.json").read_text())
    told("quantization_config in", config={**config, "quantization_config": [1]})


NAMES = {"index": "model.safetensors.index.json", "config": "config.json"}


def edit(folder, **changes):
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Plain(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(2, 2)
        self.post_init()


def test_a_class_without_a_list_of_layers_is_told(tmp_path, monkeypatch):
    # it takes its own place there once more of it is loaded
    module = sys.modules["transformers"]
    monkeypatch.setattr(module, "Plain", Plain, raising=False)
    Plain(transformers.LlamaConfig()).save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ValueError,
        match="^drop_layers: expected a model with a list of layers, but the Plain has",
    ):
        sf.calibration.drop_layers(tmp_path / "plain", ["layers.0"], tmp_path / "out")


def test_layers_that_no_config_can_say_are_refused(tmp_path):
    def alternating():
        model = tiny_lms.qwen_moe()
        config = model.config
        config.mlp_only_layers = []
        config.decoder_sparse_step = 2
        return type(model)(config)

    folder = tiny_lms.folder_of(alternating, tmp_path / "model")
    with pytest.raises(
        ValueError,
        match=r"^drop_layers: expected a config.json that can say which layers of 'mod"
        r"el\.layers' stay, but for \[0, 2, 3\] of 4 none was found that makes the Q",
    ):
        sf.calibration.drop_layers(folder, ["model.layers.1"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # two of each kind in turn are sayable
    sf.calibration.drop_layers(
        folder, ["model.layers.1", "model.layers.2"], tmp_path / "out"
    )


def cases(folder, place):
    gone = ["model.layers.0"]

    def one_folder():
        names = sf.calibration.drop_layers(folder, gone, place / "shared")
        assert names["model.layers.1.mlp.up_proj.weight"].startswith("model.layers.0.")
        assert (place / "shared" / "config.json").exists()

    def an_error_is_on_all():
        with pytest.raises(
            (ValueError, RuntimeError), match="to be new or a run that was killed"
        ):
            sf.calibration.drop_layers(folder, gone, place / "shared")

    yield "one folder", one_folder
    yield "an error is on all", an_error_is_on_all


@pytest.mark.deep
def test_one_of_several_processes_writes(folder, tmp_path):
    on_ranks(2, cases, folder, tmp_path)
    sf.calibration.drop_layers(folder, ["model.layers.0"], tmp_path / "alone")
    assert differing(tmp_path / "shared", tmp_path / "alone") == {}
