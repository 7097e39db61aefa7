"""`parametrize_laws`: one pytest test for each check, and failures that are
expected.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import sparsefn as sf
from sparsefn.testing.laws import EXACT_COUNT, PURITY
from tests.testing.broken import NEVER, by, one_more, static

FILE = """
import sparsefn as sf
from tests.testing.broken import MAGNITUDE, NEVER, by, one_more, static, draws

@sf.testing.parametrize_laws(
    [
        (static, NEVER),
        sf.testing.Row("more", lambda s, key, params: by(one_more)(s, key), MAGNITUDE),
    ],
    expected_failures={failures},
    strict={strict},
    laws=[sf.testing.laws.EXACT_COUNT],
)
def test_laws(law, check, row):
    sf.testing.check_row(law, check, row, max_examples=8)
"""
ROOT = Path(__file__).parents[2]


def outcome(tmp_path, failures, strict=True):
    file = tmp_path / "test_it.py"
    file.write_text(FILE.format(failures=failures, strict=strict), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        str(file),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    return done.returncode, done.stdout


def test_ids_are_check_and_row():
    @sf.testing.parametrize_laws([(static, NEVER)], laws=[EXACT_COUNT, PURITY])
    def test_laws(law, check, row):
        pass

    (mark,) = test_laws.pytestmark
    assert mark.args[0] == ("law", "check", "row")
    assert [param.id for param in mark.args[1]] == [
        "counts_are_exact-static",
        "states_keep_their_structure-static",
        "functions_are_pure-static",
        "inputs_may_change_later-static",
    ]


@pytest.mark.deep
def test_an_expected_failure_is_one_for_its_row_alone(tmp_path):
    code, text = outcome(tmp_path, {"counts_are_exact-more": "keeps one too many"})
    assert code == 0, text
    assert "1 passed, 1 xfailed" in text and "keeps one too many" in text


@pytest.mark.deep
def test_one_that_passes_all_the_same_is_an_error_unless_it_is_not_strict(tmp_path):
    code, text = outcome(tmp_path, {"counts_are_exact": "keeps one too many"})
    assert code == 1 and "XPASS(strict)" in text and "1 failed, 1 xfailed" in text
    code, text = outcome(
        tmp_path, {"counts_are_exact": "keeps one too many"}, strict=False
    )
    assert code == 0 and "1 xfailed, 1 xpassed" in text


def test_bad_arguments():
    with pytest.raises(
        ValueError, match="expected_failures: no check is named counts_are_right"
    ):
        sf.testing.parametrize_laws(
            [(static, NEVER)], expected_failures={"counts_are_right": "?"}
        )
    with pytest.raises(
        TypeError,
        match=r"expected rows of sf.testing.Row, or of \(make_alg.*\), got function",
    ):
        sf.testing.parametrize_laws([by(one_more)])
