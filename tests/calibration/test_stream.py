"""Pruning from a folder to a folder: the bits of `in_order`, whatever happens on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from calibration import tiny_lms
from safetensors.torch import load_file

import sparsefn as sf

transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).parents[2]
WORDS = torch.randint(2, 64, (6, 10), generator=torch.Generator().manual_seed(1))
BATCHES = [{"input_ids": words} for words in WORDS.split(2)]
LAYERS = {"llama": "model.layers", "gemma": "model.layers", "gpt2": "transformer.h", "opt": "model.decoder.layers"}


def wanda(stats, axis=0, sparsity=0.5):
    return sf.methods.wanda(sparsity, stats, pattern=sf.patterns.row_balanced(axis), where=list(stats))


def sparsegpt(stats, axis=0):
    pattern = sf.patterns.nm(2, 4, axis=1 - axis)
    return sf.methods.sparsegpt(None, stats, pattern=pattern, block=16, where=list(stats))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights_in(folder):
    """All tensors of a folder, by name."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def same_weights(model, state, out):
    """Whether `from_pretrained` loads the effective weights of a state, bit for bit."""
    found, expected = sf.modules.params_of(type(model).from_pretrained(out)), sf.effective(state)
    return found.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.fixture
def folder(tmp_path):
    return tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prune", [wanda, sparsegpt])
@pytest.mark.parametrize("make", [tiny_lms.llama, tiny_lms.gemma, tiny_lms.gpt2, tiny_lms.opt])
def test_the_new_folder_has_the_bits_of_the_whole_model_in_order(tmp_path, make, prune, dtype):
    folder = tiny_lms.folder_of(make, tmp_path / "model", dtype)
    model, axis = type(make()).from_pretrained(folder), int(make is tiny_lms.gpt2)
    blocks = [f"{LAYERS[make.__name__]}.{i}.*" for i in range(3)]

    def pruner(stats):
        return prune(stats, axis)

    state = sf.calibration.in_order(model, None, blocks, pruner, {"input_ids": WORDS}, chunk_size=2)
    before, random = files(folder), torch.get_rng_state()
    errors = sf.calibration.stream(folder, pruner, BATCHES, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), random) and files(folder) == before
    assert list(errors) == blocks and all(0 < error < 1 for error in errors.values())
    assert same_weights(model, state, tmp_path / "out")
    old, new = weights_in(folder), weights_in(tmp_path / "out")
    assert old.keys() == new.keys() and all(new[name].dtype == x.dtype for name, x in old.items())
    kept = {name: mask for name, mask in state.masks.items() if mask.ndim}
    assert len(kept) == {"llama": 21, "gemma": 21, "gpt2": 12, "opt": 18}[make.__name__]
    assert all(2 * int(mask.sum()) == mask.numel() for mask in kept.values())
    names = {*os.listdir(folder)} - {"model.safetensors.index.json"} - {*map(os.path.basename, folder.glob("*tensors"))}
    assert names <= {*os.listdir(tmp_path / "out")} and not (tmp_path / "out" / ".stream").exists()


def test_encoder_and_decoder(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.t5, tmp_path / "t5")
    model = tiny_lms.t5().from_pretrained(folder)
    blocks = [f"{kind}.block.{i}.*" for kind in ("encoder", "decoder") for i in range(2)]
    inputs = {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :6]}
    state = sf.calibration.in_order(model, None, blocks, wanda, inputs, chunk_size=3, of="square")
    batches = [{"input_ids": words, "decoder_input_ids": words[:, :6]} for words in WORDS.split(3)]
    errors = sf.calibration.stream(folder, wanda, batches, tmp_path / "out", of="square")
    assert list(errors) == blocks and same_weights(model, state, tmp_path / "out")
    kill_everywhere(folder, batches, tmp_path, step=7)


def test_layers_are_left_out_and_blocks_are_halves(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=4)
    model = tiny_lms.llama().from_pretrained(folder)
    blocks = ["model.layers.1.self_attn.*", ["model.layers.1.mlp.*"], "model.layers.3.*"]
    state = sf.calibration.in_order(model, None, blocks, wanda, {"input_ids": WORDS}, chunk_size=2)
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out", blocks=blocks)
    assert same_weights(model, state, tmp_path / "out")
    kill_everywhere(folder, BATCHES[:1], tmp_path, step=5, blocks=blocks)


def test_batches_of_several_lengths_and_kinds(folder, tmp_path):
    batches = [
        {"input_ids": WORDS[:2], "attention_mask": torch.ones(2, 10, dtype=torch.int64)},
        (WORDS[:1, :4],),
        WORDS,
    ]
    sf.calibration.stream(folder, wanda, batches, tmp_path / "out")
    model = tiny_lms.llama().from_pretrained(folder)
    seen = []
    for batch in batches:
        call = batch if isinstance(batch, dict) else {"input_ids": batch[0] if isinstance(batch, tuple) else batch}
        seen.append(
            sf.calibration.inputs(model, None, paths="model.layers.0.self_attn.q_proj.weight", of="square", **call)
        )
    stats = seen[0]
    for more in seen[1:]:
        stats = {path: {name: x + more[path][name] for name, x in of.items()} for path, of in stats.items()}
    algorithm = wanda(stats)
    path = "model.layers.0.self_attn.q_proj.weight"
    state = algorithm.init({path: weights_in(folder)[path]})
    expected = sf.effective(algorithm.update(state, state.params, 0))[path]
    assert torch.equal(weights_in(tmp_path / "out")[path], expected)


def kill_everywhere(folder, batches, place, step=1, **options):
    """End the run at every `step`th file that gets its name, and go on: the files are those of a run in one go."""
    options |= {"of": "square"}
    sf.calibration.stream(folder, wanda, batches, place / "whole", **options)
    whole, at, replaced = files(place / "whole"), 0, os.replace
    while True:
        left = at

        def until(*args, replaced=replaced):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            replaced(*args)

        out = place / f"killed at {at}"
        os.replace = until
        try:
            sf.calibration.stream(folder, wanda, batches, out, **options)
            break
        except KeyboardInterrupt:
            with pytest.raises(ValueError, match="config.json and model.safetensors or"):
                sf.calibration.stream(out, wanda, batches, place / "no model")
        finally:
            os.replace = replaced
        sf.calibration.stream(folder, wanda, batches, out, **options)
        assert files(out) == whole, at
        shutil.rmtree(out)
        at += step
    assert at > step


def test_a_run_that_is_ended_anywhere_goes_on_with_the_same_bits(folder, tmp_path):
    kill_everywhere(folder, BATCHES[:2], tmp_path)


SCRIPT = """
import sys, torch
sys.path.insert(0, "tests")
from calibration.test_stream import BATCHES, sparsegpt
import sparsefn as sf
print("go", flush=True)
sf.calibration.stream(sys.argv[1], sparsegpt, BATCHES, sys.argv[2])
"""


def test_a_process_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    folder, out = tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=12), tmp_path / "out"
    command, times = [sys.executable, "-c", SCRIPT, str(folder), str(out)], 0
    journal = out / ".stream" / "journal.json"
    while not (out / "model.safetensors.index.json").exists():
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        done = json.loads(journal.read_text())["parts"] if journal.exists() else []
        while process.poll() is None and times < 3:
            if journal.exists() and len(json.loads(journal.read_text())["parts"]) > len(done) + 2:
                time.sleep(0.01 * times)
                process.send_signal(signal.SIGKILL)
                times += 1
                break
            time.sleep(0.005)
        process.communicate()
    assert times == 3
    sf.calibration.stream(folder, sparsegpt, BATCHES, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")
