"""Every law over every row of the registry that it binds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from property_tests import method_rows, registry
from property_tests.effort import seed, tries_of_a_row
from property_tests.registry import QUICK_ROWS, ROWS
from sparsefn import algorithms
from sparsefn.testing import LAWS, Check, Law, Row, check_row, parametrize_laws
from sparsefn.testing.harness import algorithm_of, hash_of, updates
from sparsefn.testing.introspection import run_of, takes_tensor
from sparsefn.testing.laws import COMPILE
from sparsefn.testing.strategies import large

# Compiling takes seconds: test_compile.py tries that law on a few rows.
CHECKS = [(law, check) for law in LAWS if law is not COMPILE for check in law.checks]


@pytest.mark.deep(
    but=["nothing_moves_off_the_support-*", *(f"*-{row}" for row in QUICK_ROWS)]
)
@parametrize_laws(ROWS, laws=[law for law in LAWS if law is not COMPILE])
def test_laws_hold(law: Law, check: Check, row: Row) -> None:
    check_row(law, check, row, max_examples=tries_of_a_row(), seed=seed())


def test_every_law_binds_a_row_and_every_row_is_bound_by_many() -> None:
    assert len(LAWS) == 12
    assert all(any(check.binds(row.meta) for row in ROWS) for _, check in CHECKS)
    assert all(
        len({law.name for law, check in CHECKS if check.binds(row.meta)}) >= 6
        for row in ROWS
    )
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_all_but_these_take_a_tensor_for_the_sparsity() -> None:
    """Laws do not give a tensor to one that reads its value, so that one which begins
    to is noticed here.
    """
    rows = [*ROWS, *method_rows.ROWS]
    assert {row.name for row in rows if not takes_tensor(row, run_of(row))} == {
        "static checkerboard",
        "static in multiples",  # counts are numbers of Python
        "woodfisher",
    }


def test_every_algorithm_has_a_row() -> None:
    made = Path(str(registry.__file__)).read_text(encoding="utf-8")
    returns = {
        name: getattr(value, "__annotations__", {}).get("return")
        for name, value in vars(algorithms).items()
    }
    missing = [
        name
        for name, kind in returns.items()
        if kind == "Algorithm" and f"sf.{name}(" not in made
    ]
    assert "rigl" in returns and not missing, (
        f"add a Row to property_tests/registry.py for each of {missing}"
    )


def digests() -> dict[str, str]:
    """A digest of the last state of one run of every row."""
    return {
        row.name: hash_of(list(updates(algorithm_of(row, run), run))[-1])
        for row in ROWS
        for run in [large(row.meta.layout.form)]
    }


@pytest.mark.deep
def test_another_process_gives_the_same_bits() -> None:
    script = (
        "import json; from property_tests.test_laws import digests; "
        "print(json.dumps(digests()))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1234", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == digests()
