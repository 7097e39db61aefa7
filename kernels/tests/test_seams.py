"""Importing the kernels is what turns them on, for one kind of device, and changes
nothing elsewhere.
"""

import os
import subprocess
import sys

import pytest

import sparsefn_kernels
from sparsefn.engine.surroundings.backends import BACKENDS
from sparsefn_kernels import seams

NAMES = {"winners", "draws", "draws_of_leaves", "coins", "adam", "sgd"}


@pytest.mark.parametrize(("interpreted", "device"), [("1", "cpu"), ("0", "cuda")])
def test_an_import_registers_them_for_one_kind_of_device(interpreted, device):
    script = """
        from sparsefn.engine.surroundings.backends import BACKENDS
        import sparsefn, sys
        assert not BACKENDS and "triton" not in sys.modules
        import sparsefn_kernels
        print(*(f"{name},{device}" for name, device in BACKENDS))
    """
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    command = [sys.executable, "-c", "if True:" + script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == {f"{name},{device}" for name in NAMES}


def test_they_may_be_put_in_for_a_device_without_values():
    assert sparsefn_kernels.backends_for("meta") == {
        (name, "meta"): BACKENDS[name, seams.DEVICE] for name in NAMES
    }
