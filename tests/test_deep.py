"""What `make test` leaves to `make test-all`: markers beside the tests, read by
tests/conftest.py.
"""

import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
PROBE = """
import pytest

def on_ranks(): ...

@pytest.mark.deep
def test_slow(): ...

@pytest.mark.deep(but=["a-*", "b-2"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_rows(letter, number): ...

@pytest.mark.deep
class TestAll:
    def test_of_a_class(self): ...

def test_ranks(): on_ranks()

@pytest.mark.quick
def test_quick_ranks(): on_ranks()

def test_plain(): ...
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("chosen", "outcome"),
    [("not deep", "5 passed, 4 deselected"), ("deep", "4 passed, 5 desel")],
)
def test_a_mark_leaves_the_parameters_that_it_names(
    chosen: str, outcome: str, tmp_path: Path
) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_probe.py").write_text(PROBE, encoding="utf-8")
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-m",
        chosen,
        "--rootdir",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    assert (
        outcome
        in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def test_parameters_that_stay_exist(request: pytest.FixtureRequest) -> None:
    """Where all rows of a test are collected, each pattern is that of some."""
    marked: dict[str, set[str]] = {}
    names: dict[str, list[str]] = {}
    for item in request.session.items:
        test, _, name = item.nodeid.partition("[")
        marks = getattr(getattr(item, "function", None), "pytestmark", ())
        rows = [
            row
            for mark in marks
            if mark.name == "deep"
            for row in mark.kwargs.get("but", ())
        ]
        if rows:
            marked[test] = set(rows)
            names.setdefault(test, []).append(name.removesuffix("]"))
    gone = [
        (test, row)
        for test, rows in marked.items()
        for row in rows
        if len(names[test]) > 1
        and not any(fnmatchcase(name, row) for name in names[test])
    ]
    assert gone == []
