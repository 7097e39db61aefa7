"""Runs that end before they are done, and go on with the same bits."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from posttraining.calibration import tiny_lms
from posttraining.calibration.tiny_lms import (
    BATCHES,
    WORDS,
    differing,
    ending_at,
    files,
    sparsegpt,
    wanda,
    weights_in,
)
from safetensors.torch import save_file
from torch import nn

import sparsefn as sf
from sparsefn.nn.checkpoint.folders import StoredTensor
from sparsefn.posttraining.calibration.folders.disk import PLACE
from sparsefn.posttraining.calibration.folders.resume import (
    Part,
    digest_of_batches,
    digest_of_model,
    journal_in,
)

ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path):
    return tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=2)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("x = self.layers[0](self.layers[0](x))", "'layers.0' is called 2 times"),
        (
            "x = self.layers[1](self.layers[1](self.layers[0](x)) + 1)",
            "'layers.1' is called 2 times",
        ),
        (
            "x = self.layers[1](self.layers[0](x)); x = self.layers[1](x * 2)",
            "'layers.1' is called 2 times",
        ),
        ("x = self.layers[1](x)", "'layers.0' is called 0 times"),
        (
            "x = self.layers[0](self.layers[1](x))",
            "'layers.1' is called before 'layers.0'",
        ),
        ("x = self.layers[1](self.layers[0](x)); h = self.layers[0]", ""),
        ("x = self.layers[1](2 * self.layers[0](x)) + 1", ""),
        ("y = self.layers[0](x); x = self.layers[1](y + x) + y", ""),
    ],
)
def test_the_order_in_which_a_model_calls_its_layers(tmp_path, calls, words):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.up(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x):
            space = {"self": self, "x": x}
            exec(calls, space)
            return space["x"]

    torch.manual_seed(0)
    model, x = Model(), torch.randn(12, 4)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text("{}")
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")
    if words:
        words = (
            f"expected layers that run one after the other, but {words}: prune the "
            "model in memory, with sf.calib"
        )
        with pytest.raises(ValueError, match=words):
            sf.calibration.stream(
                tmp_path / "in", wanda, [x], tmp_path / "out", make=Model
            )
        return
    sf.calibration.stream(tmp_path / "in", wanda, [x], tmp_path / "out", make=Model)
    state = sf.calibration.in_order(model, None, ["layers.0.*", "layers.1.*"], wanda, x)
    assert all(
        torch.equal(weights_in(tmp_path / "out")[n], w)
        for n, w in sf.effective(state).items()
    )


def test_halves_of_a_layer_in_another_order_are_told(folder, tmp_path):
    blocks = ["model.layers.1.mlp.*", "model.layers.1.self_attn.*"]
    with pytest.raises(
        ValueError,
        match=r"but 'model.layers.1.mlp.\*' is before 'model.layers.1.self_attn.\*'",
    ):
        sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out", blocks=blocks)


def end_everywhere(folder, batches, place, step=1, **options):
    """End the run at every `step`th file that gets its name, and go on: the files are
    those of a run in one go.
    """

    def run(out):
        return sf.calibration.stream(
            folder, wanda, batches, out, of="square", **options
        )

    errors = run(place / "whole")
    at = 0
    while True:
        out = place / f"ended at {at}"
        try:
            with ending_at(at):
                run(out)
            break
        except KeyboardInterrupt:
            with pytest.raises(
                ValueError, match="config.json and model.safetensors or"
            ):
                sf.calibration.stream(out, wanda, batches, place / "no model")
        assert run(out) == errors and differing(out, place / "whole") == {}, at
        shutil.rmtree(out)
        at += step
    assert at > step


@pytest.mark.deep
def test_a_run_that_is_ended_anywhere_goes_on_with_the_same_bits(folder, tmp_path):
    end_everywhere(folder, BATCHES[:2], tmp_path)


@pytest.mark.deep
def test_so_does_one_with_an_encoder_and_a_decoder(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.t5, tmp_path / "t5")
    batches = [
        {"input_ids": words, "decoder_input_ids": words[:, :6]}
        for words in WORDS.split(3)
    ]
    end_everywhere(folder, batches, tmp_path, step=5)


@pytest.mark.deep
def test_so_does_one_that_leaves_layers_out(tmp_path):
    folder = tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=5)
    blocks = ["model.layers.1.self_attn.*", "model.layers.1.mlp.*", "model.layers.4.*"]
    end_everywhere(folder, BATCHES[:1], tmp_path, blocks=blocks)


def test_ended_twice_at_the_same_place(folder, tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), ending_at(9):
            sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out")
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out")
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "whole")
    assert differing(tmp_path / "out", tmp_path / "whole") == {}
    with pytest.raises(
        ValueError,
        match="expected '.*' to be new or a run that was killed, got 'config.json', ",
    ):
        sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "out")


@pytest.mark.parametrize(
    "held", [{"version": 9}, {"run": {}, "parts": [{}]}, {"run": [], "parts": []}, []]
)
def test_a_journal_of_another_form(tmp_path, held):
    journal_in(tmp_path, {"model": "a"})
    (tmp_path / PLACE / "journal.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match="stream: expected .*journal.json'"):
        journal_in(tmp_path, {"model": "a"})


SCRIPT = """
import sys
sys.path.insert(0, "tests")
from posttraining.calibration.tiny_lms import BATCHES, sparsegpt
import sparsefn as sf
sf.calibration.stream(sys.argv[1], sparsegpt, BATCHES, sys.argv[2])
"""


@pytest.mark.deep
def test_a_process_that_is_killed_goes_on_with_the_same_bits(tmp_path):
    folder, out = (
        tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=12),
        tmp_path / "out",
    )
    command, times = [sys.executable, "-c", SCRIPT, str(folder), str(out)], 0
    journal = out / ".stream" / "journal.json"
    while not (out / "model.safetensors.index.json").exists():
        process = subprocess.Popen(command, cwd=ROOT)
        done = len(json.loads(journal.read_text())["parts"]) if journal.exists() else 0
        while process.poll() is None and times < 3:
            if (
                journal.exists()
                and len(json.loads(journal.read_text())["parts"]) > done + 2
            ):
                time.sleep(0.01 * times)
                process.send_signal(signal.SIGKILL)
                times += 1
                break
            time.sleep(0.005)
        process.wait()
    assert times == 3
    # in a process of its own, too: other tests leave no trace there
    command[-1] = str(tmp_path / "whole")
    subprocess.run(command, cwd=ROOT, check=True)
    assert differing(out, tmp_path / "whole") == {}


def changed(folder, name):
    """The folder with one bit of a tensor changed."""
    for file in folder.glob("*.safetensors"):
        tensors = tiny_lms.load_file(file)
        if name in tensors:
            tensors[name].view(torch.int32).flatten()[0] ^= 1
            save_file(tensors, file, metadata={"format": "pt"})


def test_another_run_than_the_one_that_was_killed_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), ending_at(15):  # in the second block
        sf.calibration.stream(folder, wanda, BATCHES, out)
    assert len(json.loads((out / ".stream" / "journal.json").read_text())["parts"]) == 2
    before = files(out / ".stream" / "0")

    def refused(words, folder=folder, prune=wanda, batches=BATCHES, **options):
        with pytest.raises(
            ValueError,
            match="expected the run that was killed in '.*out', but " + words,
        ):
            sf.calibration.stream(folder, prune, batches, out, **options)

    refused(
        "of another run were its batches: go on with the same, or give",
        batches=BATCHES[::-1],
    )
    refused("of another run were its blocks: go on", blocks=["model.layers.0.*"])
    refused("of another run were its statistics: go on", of="square")
    other = tiny_lms.folder_of(tiny_lms.llama, tmp_path / "deeper", layers=3)
    refused("of another run were its model, blocks: go on", folder=other)
    words = (
        "'model.layers.0.*weight' comes out otherwise: go on with the same prune, "
        "number of threads"
    )
    refused(words, prune=lambda stats: wanda(stats, sparsity=0.6))
    refused(words, prune=sparsegpt)
    for name, part in [
        ("lm_head.weight", "the embeddings and head"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0"),
    ]:
        changed(folder, name)
        refused(
            f"the weights of '{part}' are others now: go on with the same, or give "
            "another folder out"
        )
        changed(folder, name)
    assert files(out / ".stream" / "0").keys() == before.keys()
    changed(folder, "model.layers.1.mlp.up_proj.weight")  # which no one has read so far
    sf.calibration.stream(folder, wanda, BATCHES, out)
    sf.calibration.stream(folder, wanda, BATCHES, tmp_path / "whole")
    assert differing(out, tmp_path / "whole") == {}


FULL = """
import resource, sys
sys.path.insert(0, "tests")
from posttraining.calibration.tiny_lms import WORDS, wanda
import sparsefn as sf
size = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    sf.calibration.stream(sys.argv[1], wanda, [WORDS.repeat(4, 1)[:20]], sys.argv[2])
except OSError as error:
    print(error)
"""


@pytest.mark.deep
def test_a_disk_without_room_loses_nothing(tmp_path):
    folder, out = (
        tiny_lms.folder_of(tiny_lms.llama, tmp_path / "llama", layers=2),
        tmp_path / "out",
    )
    batches = [WORDS.repeat(4, 1)[:20]]
    sf.calibration.stream(folder, wanda, batches, tmp_path / "whole")
    sizes = [
        (2000, "model-00001-of-00003.safetensors"),
        (20000, "tmp[a-z0-9_]+"),
        (26000, "outputs-0-0.pt"),
    ]
    for size, file in [*sizes, (30000, "model-00002-of-00003.safetensors")]:
        command = [sys.executable, "-c", FULL, str(folder), str(out), str(size)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert re.search(
            f"{file}' could not be written.*the same call goes on from there",
            done.stdout,
        ), done
        assert not list(out.rglob("*.part"))
    sf.calibration.stream(folder, wanda, batches, out)
    assert (
        differing(out, tmp_path / "whole") == {}
        and weights_in(out).keys() == weights_in(folder).keys()
    )


ONE, TWO = Part("one", {}), Part("two", {"0.*": 0.5, "1.*": None})
RUN = {"batches": "a", "blocks": "b"}


def test_it_goes_on_where_it_was(tmp_path):
    out = tmp_path / "deep" / "out"
    journal = journal_in(out, RUN)
    assert journal.parts == () and journal_in(out, RUN) == journal
    later = journal.done(ONE).done(TWO)
    assert (
        journal_in(out, RUN) == later
        and later.parts == (ONE, TWO)
        and journal.parts == ()
    )


def test_it_refuses_another_run_and_other_folders(tmp_path):
    journal_in(tmp_path / "out", RUN)
    with pytest.raises(
        ValueError,
        match="expected the run that was killed in '.*out', but of another run were "
        "its batches:",
    ):
        journal_in(tmp_path / "out", RUN | {"batches": "c"})
    with pytest.raises(
        ValueError, match="expected '.*' to be new or a run that was killed, got 'out'$"
    ):
        journal_in(tmp_path, RUN)
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ValueError, match="to be new or a run that was killed, got a file$"
    ):
        journal_in(tmp_path / "file", RUN)
    # killed before it was there
    (tmp_path / "out" / ".stream" / "journal.json").unlink()
    assert journal_in(tmp_path / "out", RUN).parts == ()


def test_digests_see_every_value_and_no_layout(tmp_path):
    x = torch.arange(6).reshape(2, 3)
    digest = digest_of_batches([{"ids": x}])
    assert digest == digest_of_batches([{"ids": x.T.contiguous().T}])
    others = [
        [{"ids": x + 1}],
        [{"ids": x.T}],
        [{"ids": x.int()}],
        [{"words": x}],
        [{"ids": x}] * 2,
        [(x,)],
        [{"ids": x, "n": 1}],
    ]
    digests = {
        digest,
        *map(digest_of_batches, others),
        digest_of_batches([{"ids": x, "n": 2}]),
    }
    assert len(digests) == len(others) + 2
    config, stored = tmp_path / "config.json", {"a": StoredTensor("f", (1,), "F32")}
    config.write_text("{}")
    first = digest_of_model(config, stored)
    # whichever file it is in
    assert first == digest_of_model(config, {"a": StoredTensor("g", (1,), "F32")})
    assert first != digest_of_model(config, {"a": StoredTensor("f", (2,), "F32")})
    config.write_text("{ }")
    assert first != digest_of_model(config, stored)
