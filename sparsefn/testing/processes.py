"""The law that needs another process: a run's result may not depend on its process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from sparsefn.testing.harness import algorithm_of, digest, updates
from sparsefn.testing.meta import Row
from sparsefn.testing.rows import row_of
from sparsefn.testing.values import Case

_CHILD = "import sys; from sparsefn.testing.processes import answer; answer(*sys.argv[1:])"


def answer(target: str, file: str) -> None:
    """Run a saved case and print the digest of its last state."""
    module, _, name = target.partition(":")
    make: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    print(_digest(row_of(make), torch.load(file, weights_only=False)))


def _digest(row: Row, case: Case) -> str:
    return digest(list(updates(algorithm_of(row, case), case))[-1])


def processes_do_not_matter(row: Row, case: Case) -> None:
    """Another process, with another hash seed and one thread, gives the same bits (for functions it can import)."""
    if row.reference is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.pt"
        torch.save(case, file)
        env = {**os.environ, "PYTHONHASHSEED": "1234", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _CHILD, row.reference, str(file)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, f"another process fails:\n{done.stderr}"
    assert done.stdout.split()[-1] == _digest(row, case), "another process gives other bits"
