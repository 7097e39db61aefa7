"""Files of a model's folder: some tensors at a time, written so that nothing is
lost.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparsefn.nn.checkpoint.folders import read_json
from sparsefn.posttraining.calibration.folders.disk import write_json, write_tensors


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
    write_json(tmp_path / "a.json", {"x": 1})
    assert read_json("stream", tmp_path / "a.json") == {"x": 1}


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
