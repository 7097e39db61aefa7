"""The table of deep tests names tests that are there."""

import ast
from pathlib import Path

import pytest

from tests.deep import DEEP, ONE, is_deep, starts_processes

ROOT = Path(__file__).parents[1]


def named_in(source: str) -> set[str]:
    """The tests of a file, as pytest names them."""
    found = set()
    for node in ast.parse(source).body:
        found.add(getattr(node, "name", ""))
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_what_is_deep_exists() -> None:
    assert [file for file in DEEP if not (ROOT / file).is_file()] == []
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in DEEP}
    gone = [f"{file}::{test}" for file, tests in DEEP.items() for test in tests if test not in named_in(sources[file])]
    assert gone == []


def test_what_stays_is_among_the_parameters(request: pytest.FixtureRequest) -> None:
    items = [item.nodeid for item in request.session.items]
    gone = []
    for name, stay in {f"{file}::{test}": stay for file, tests in DEEP.items() for test, stay in tests.items()}.items():
        found = [item for item in items if item.startswith(f"{name}[")]
        kept = [item for item in found if not is_deep(item)]
        if stay and len(found) > 1 and not kept:
            gone.append(name)
    assert gone == []


def test_one_of_those_that_start_processes_stays(request: pytest.FixtureRequest) -> None:
    starting = [item for item in request.session.items if starts_processes(item)]
    deep = {item.nodeid for item in starting if item.get_closest_marker("deep")}
    assert {item.nodeid for item in starting} - deep <= {ONE}
    file, test = ONE.split("::")
    assert test in named_in((ROOT / file).read_text(encoding="utf-8"))


def test_a_test_is_found_by_its_file_or_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEEP, "tests/whole.py", {})
    monkeypatch.setitem(DEEP, "tests/some.py", {"test_it": ("*-1",), "Test::test_all": ()})
    deep = ["tests/whole.py::test_x", "tests/whole.py::Test::test_x[b]", "tests/some.py::test_it[b]"]
    deep += ["tests/some.py::Test::test_all[a]", "tests/some.py::Test::test_all"]
    stay = ["tests/some.py::test_it[a-1]", "tests/some.py::test_it_too", "tests/other.py::test_it[a]"]
    assert [name for name in deep + stay if is_deep(name)] == deep
