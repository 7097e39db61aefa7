"""Every law over every row of the registry that it binds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from property_tests.harness import digest, hold, updates
from property_tests.laws import LAWS, Law
from property_tests.laws_masks import algorithm_of
from property_tests.meta import Row
from property_tests.registry import ROWS
from property_tests.strategies import large

BOUND = [pytest.param(law, row, id=f"{law.name}-{row.name}") for law in LAWS for row in ROWS if law.binds(row.meta)]


@pytest.mark.parametrize(("law", "row"), BOUND)
def test_laws_hold(law: Law, row: Row) -> None:
    hold(f"{law.name} {row.name}", lambda case: law.check(row, case), law.examples(row.meta), law.share)


def test_every_law_binds_a_row_and_every_row_is_bound_by_many() -> None:
    assert all(any(law.binds(row.meta) for row in ROWS) for law in LAWS)
    assert all(sum(law.binds(row.meta) for law in LAWS) >= 10 for row in ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)


def digests() -> dict[str, str]:
    """A digest of the last state of one run of every row."""
    return {
        row.name: digest(list(updates(algorithm_of(row, run), run))[-1])
        for row in ROWS
        for run in [large(row.meta.layout.form)]
    }


def test_another_process_gives_the_same_bits() -> None:
    script = "import json; from property_tests.test_laws import digests; print(json.dumps(digests()))"
    env = {**os.environ, "PYTHONHASHSEED": "1234", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == digests()
