"""The laws from the command line: what is printed and written, and the exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sparsefn as sf
from sparsefn.testing import __main__ as command
from sparsefn.testing.laws import EXACT_COUNT

HERE = "tests.testing.broken"


@pytest.fixture
def one_law(monkeypatch):
    def brief(make, *, laws=(EXACT_COUNT,), **options):
        return sf.testing.check_laws(make, laws=laws, **options)

    monkeypatch.setattr(command, "check_laws", brief)


def test_all_hold(one_law, capsys, tmp_path):
    file = tmp_path / "report.json"
    args = [
        f"{HERE}:static",
        "--meta",
        f"{HERE}:NEVER",
        "--examples",
        "4",
        "--seed",
        "3",
        "--json",
        str(file),
    ]
    assert command.main(args) == 0
    assert capsys.readouterr().out.startswith(
        "static: all 1 checks hold (seed 3, 4 examples, "
    )
    assert json.loads(file.read_text("utf-8"))["ok"] is True


def test_one_is_broken(one_law, capsys):
    assert command.main([f"{HERE}:forgetful", "--suggest"]) == 1
    assert "What would hold:\nMeta(" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: factory"),
        (["static"], "expected module:name, got 'static'"),
        (["no_such_module:x"], "no_such_module:x: No module named 'no_such_module'"),
        ([f"{HERE}:nothing"], "has no attribute 'nothing'"),
        ([f"{HERE}:EVEN"], "expected make_algorithm"),
        (
            [f"{HERE}:makes_nothing"],
            "expected makes_nothing to return an Algorithm, got None; a pair of "
            "functions is",
        ),
        (
            [f"{HERE}:makes_a_factory"],
            "to return an Algorithm, got rigl itself; call it: rigl(sparsity); a pair "
            "of",
        ),
        (
            [f"{HERE}:static", "--meta", f"{HERE}:static"],
            "expected meta to be a sf.testing.Meta, got function",
        ),
    ],
)
def test_wrong_calls(args, message, capsys):
    with pytest.raises(SystemExit) as left:
        command.main(args)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.deep
def test_it_is_a_module_that_runs():
    root = Path(__file__).parents[2]
    args = [sys.executable, "-m", "sparsefn.testing", "nothing"]
    done = subprocess.run(args, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "expected module:name, got 'nothing'" in done.stderr
