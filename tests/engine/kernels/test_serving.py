"""Where kernels serve: nowhere unless asked for, and never because triton was loaded by something else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsefn.engine.kernels import serving


@pytest.mark.parametrize(
    ("device", "switch", "interpreted", "installed", "reason"),
    [
        ("cuda", "1", "0", True, ""),
        ("cpu", "1", "1", True, ""),
        ("cpu", "1", "0", True, "kernels run on cuda, and this is cpu"),
        ("meta", "1", "0", True, "kernels run on cuda, and this is meta"),
        ("cuda", "1", "1", True, "kernels run on the cpu, interpreted, and this is cuda"),
        ("cuda", "0", "0", True, "SPARSEFN_TRITON=1 is not set: no GPU has shown yet that they are exact"),
        ("cuda", "1", "0", False, "triton is not installed"),
    ],
)
def test_they_serve_where_asked_for_and_nowhere_else(device, switch, interpreted, installed, reason, monkeypatch):
    monkeypatch.setenv("SPARSEFN_TRITON", switch)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: object() if installed else None)
    assert serving.why_not(device) == reason
    assert serving.serves(device) == (reason == "")


def test_without_the_switch_they_are_off(monkeypatch):
    monkeypatch.delenv("SPARSEFN_TRITON", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not serving.serves("cuda") and not serving.serves("cpu")


def test_of_the_cpu_this_library_has_its_own_way():
    assert serving.has_own_way("cpu") and not serving.has_own_way("meta")


def test_launches_are_on_the_device_of_the_tensors():
    with serving.on(torch.device("cpu")) as on_cpu:
        assert on_cpu is None
    assert isinstance(serving.on(torch.device("cuda", 1)), torch.cuda.device)


def test_a_switch_alone_loads_nothing():
    script = "import sys, torch, sparsefn as sf; sf.topk_mask(torch.ones(9), 2); print('triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"SPARSEFN_TRITON": "1", "PYTHONPATH": ":".join(sys.path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
