"""Kernels are found where they are installed, for one kind of device, and change
nothing elsewhere.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import torch

import sparsefn_kernels
from sparsefn_kernels import seams

NAMES = {"winners", "draws", "draws_of_leaves", "coins", "adam", "sgd", "sweep"}


def entries(device):
    return {(name, device) for name in NAMES}


def registered(interpreted, *lines):
    """Which kinds of devices have kernels after some lines of Python."""
    script = [
        "from sparsefn._engine.backends import BACKENDS, has_backend",
        "import sparsefn, sys",
        "before = dict(BACKENDS)",
        "assert 'triton' not in sys.modules",
        *lines,
        "new = [key for key in BACKENDS if BACKENDS[key] is not before.get(key)]",
        "print(*(f'{name},{device}' for name, device in new))",
    ]
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    command = [sys.executable, "-c", "\n".join(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return {tuple(key.split(",")) for key in done.stdout.split()}


def test_an_import_registers_them_for_one_kind_of_device():
    assert registered("1", "import sparsefn_kernels") == entries("cpu")
    assert registered("0", "import sparsefn_kernels") == entries("cuda")


def test_the_first_tensor_on_a_gpu_finds_them(tmp_path):
    # as an installation writes it
    folder = tmp_path / "sparsefn_kernels-0.2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: sparsefn-kernels\nVersion: 0.2.0\n")
    project = Path(__file__).parents[1] / "pyproject.toml"
    points = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]
    lines = [f"{name} = {at}" for name, at in points["sparsefn.backends"].items()]
    text = "\n".join(["[sparsefn.backends]", *lines])
    (folder / "entry_points.txt").write_text(text)
    found = f"sys.path.insert(0, {str(tmp_path)!r})"
    meet = "has_backend('winners', 'cuda')"
    assert registered("0", found, "has_backend('winners', 'cpu')") == set()
    assert registered("0", found, meet) == entries("cuda")
    off = "import os; os.environ['SPARSEFN_KERNELS'] = '0'"
    assert registered("0", found, off, meet) == set()


def test_amds_gpus_which_are_called_the_same_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert seams.installed(seams.DEVICE) == {}


def test_they_may_be_put_in_for_a_device_without_values():
    assert sparsefn_kernels.backends_for("meta") == {
        (name, "meta"): seams.backends_for("cuda")[name, "cuda"] for name in NAMES
    }
