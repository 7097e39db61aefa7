"""Files of a model's folder: some tensors at a time, written so that nothing is
lost.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsefn.posttraining.calibration.folders.disk import (
    read_json,
    read_tensors,
    some,
    stored_in,
    write_json,
    write_tensors,
)

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.tensor(True),
}


def folder_of(path, sharded=True):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    if not sharded:
        save_file(TENSORS, path / "model.safetensors")
        return path
    placed = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    for file in {*placed.values()}:
        save_file(
            {name: x for name, x in TENSORS.items() if placed[name] == file},
            path / file,
        )
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": placed})
    )
    return path


@pytest.mark.parametrize("sharded", [True, False])
def test_tensors_are_listed_and_read_in_memory_of_their_own(tmp_path, sharded):
    folder = folder_of(tmp_path, sharded)
    stored = stored_in(folder)
    assert {name: (one.shape, one.dtype) for name, one in stored.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((3,), "BF16"),
        "c": ((), "BOOL"),
    }
    found = dict(read_tensors(folder, {name: stored[name].file for name in ("a", "c")}))
    for file in {one.file for one in stored.values()}:
        (folder / file).write_bytes(b"\0" * 8)
    assert (
        found.keys() == {"a", "c"}
        and torch.equal(found["a"], TENSORS["a"])
        and bool(found["c"])
    )


def test_a_folder_that_is_no_model_is_told(tmp_path):
    with pytest.raises(
        ValueError,
        match="expected the folder of a model, got '.*nowhere', which is no folder",
    ):
        stored_in(tmp_path / "nowhere")
    with pytest.raises(
        ValueError,
        match=r"expected config.json and model.safetensors or .* in '.*', got nothing: "
        r"write",
    ):
        stored_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("x")
    with pytest.raises(
        ValueError,
        match=r"got 'config.json', 'pytorch_model.bin': write the folder with "
        r"model.save_",
    ):
        stored_in(tmp_path)
    folder = folder_of(tmp_path)
    (folder / "two.safetensors").write_bytes(b"torn")
    with pytest.raises(
        ValueError,
        match=r"expected a safetensors file at '.*two.safetensors', but: .*header",
    ):
        stored_in(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match=r"expected a safetensors file at '.*two.safetensors', but: No such file",
    ):
        stored_in(folder)
    save_file({"c": TENSORS["c"]}, folder / "two.safetensors")
    with pytest.raises(
        ValueError, match=r"index.json names tensors that its files lack: 'b'"
    ):
        stored_in(folder)
    (folder / "model.safetensors.index.json").write_text("[")
    with pytest.raises(
        ValueError, match="expected a file of JSON at '.*', but: Expecting value"
    ):
        stored_in(folder)


def test_what_is_written_is_whole_or_as_before(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"x": torch.ones(4).expand(3, 4)})
    assert torch.equal(load_file(file)["x"], torch.ones(3, 4))
    replaced = os.replace

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(file, {"x": torch.zeros(2)})
    monkeypatch.setattr(os, "replace", replaced)
    assert torch.equal(load_file(file)["x"], torch.ones(3, 4))
    write_tensors(file, {"x": torch.zeros(2)})  # over what was left
    assert torch.equal(load_file(file)["x"], torch.zeros(2)) and os.listdir(
        tmp_path
    ) == ["a.safetensors"]
    write_json(tmp_path / "a.json", [1])
    assert read_json(tmp_path / "a.json") == [1]


FULL = """
import resource, sys, torch
from pathlib import Path
from sparsefn.posttraining.calibration.folders.disk import write_json, write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
tensors, words = {"x": torch.ones(2**16)}, ["x" * 2**17]
for write, value in [(write_tensors, tensors), (write_json, words)]:
    try:
        write(Path(sys.argv[1], "file"), value)
    except OSError as error:
        print(error)
"""


@pytest.mark.deep
def test_a_disk_without_room_loses_nothing(tmp_path):
    (tmp_path / "file").write_text("before")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[4],
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    for line in lines:
        assert (
            "could not be written" in line
            and "File too large" in line
            and "the same call goes on from there" in line
        )
    assert (
        os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "before"
    )


def test_names_in_errors_are_few():
    assert (
        some([]) == "nothing"
        and some(["a"]) == "'a'"
        and some("abcdefg").endswith("'d' and 3 more")
    )
