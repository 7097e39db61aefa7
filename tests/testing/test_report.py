"""Reports: failures first, then the table and the tests to paste; the same as JSON."""

import dataclasses
import json
import platform

import pytest
import torch

import sparsefn as sf
from sparsefn.testing.laws import LAWS
from tests.testing.broken import NEVER, PLANTED, draws, fails_on_empty, halving, static

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def broken():
    laws = [law for law in LAWS if law.name in ("exact_count", "purity", "determinism")]
    return sf.testing.check_laws(
        draws, meta=NEVER._replace(exact_count=False), laws=laws, on_fail="report"
    )


def test_it_runs_on_after_failures_and_leads_with_a_line_for_each(broken):
    lines = str(broken).splitlines()
    failed = [row.check for row in broken.rows if row.failed]
    assert "functions_are_pure" in failed and "runs_repeat" in failed and not broken.ok
    assert lines[0].startswith(f"draws: {len(failed)} of ")
    assert lines[1].startswith(
        "draws breaks purity, functions_are_pure: init reads or advances a global "
        "generator"
    )
    assert lines[1 : 1 + len(broken.failures)] == broken.failures
    assert "Hypothesis" not in str(broken)


def test_the_table_has_every_check_of_the_laws(broken):
    text = str(broken)
    statuses = {row.check: row.status for row in broken.rows}
    assert (
        statuses["counts_are_exact"] == "does not bind"
        and statuses["states_keep_their_structure"] == "passed"
    )
    for row in broken.rows:
        (line,) = [
            x
            for x in text.splitlines()
            if x.startswith(row.law) and f" {row.check} " in x
        ]
        assert row.status in line
    assert broken.held == [row.check for row in broken.rows if row.status == "passed"]
    assert "\nfunctions_are_pure on Case(sparsity=" in text


def test_json_has_versions_seed_and_all_rows(broken):
    found = json.loads(broken.to_json())
    assert (
        found["versions"]["torch"] == torch.__version__
        and found["versions"]["python"] == platform.python_version()
    )
    assert (
        found["versions"]["sparsefn"] == sf.__version__
        and "hypothesis" in found["versions"]
    )
    assert (found["name"], found["seed"], found["max_examples"], found["ok"]) == (
        "draws",
        0,
        25,
        False,
    )
    assert [row["check"] for row in found["rows"]] == [row.check for row in broken.rows]
    (pure,) = [row for row in found["rows"] if row["check"] == "functions_are_pure"]
    assert pure["status"] == "failed" and pure["example"].startswith("Case(")
    assert (
        found["suggestion"] is None
        and found["coverage"].keys() == sf.testing.coverage.LEAST.keys()
    )


def test_one_error_in_many_checks_is_one_line():
    report = sf.testing.check_laws(
        fails_on_empty,
        meta=sf.testing.Meta(start="magnitude"),
        laws=LAWS[:1],
        max_examples=300,
        on_fail="report",
    )
    (row,) = [row for row in report.rows if row.failed]
    twice = sf.testing.Report(
        "mine", (row, row._replace(check="other")), report.meta, 0, 5
    )
    (line,) = twice.failures
    assert line.startswith("mine: init raises RuntimeError: max(): ") and line.endswith(
        " (in 2 checks)"
    )


def test_shares_of_drawn_cases_are_shown():
    report = sf.testing.Report(
        "mine",
        (),
        sf.testing.Meta(),
        0,
        5,
        coverage={"ties": 0.5, "NaN": 0.25},
        cases=8,
    )
    text = "8 drawn cases: 50% ties, 25% NaN"
    assert f"{text} (only shown: with params=, or fewer than 100)\n" in f"{report}\n"
    found = json.loads(report.to_json())
    assert found["coverage"] == {"ties": 0.5, "NaN": 0.25} and (
        found["cases"],
        found["easy"],
    ) == (8, None)
    judged = dataclasses.replace(
        report, easy=("ties in 50% of 8 cases, expected 80% or more",)
    )
    assert (
        f"{text}\n" in f"{judged}\n"
        and not judged.ok
        and not json.loads(judged.to_json())["ok"]
    )
    first, second, *_ = str(judged).splitlines()
    assert first.startswith("mine: all 0 checks hold, on too easy cases (seed 0, ")
    assert (
        second == "mine was tried on cases that are too easy: ties in 50% of 8 cases, "
        "expected 80% or more"
    )
    assert dataclasses.replace(report, easy=()).ok


def test_what_holds_says_so_and_a_suggestion_is_shown():
    report = sf.testing.check_laws(halving, laws=LAWS[:1], max_examples=4, suggest=True)
    text = str(report)
    assert "\nWhat would hold:\nMeta()\n" in text
    assert json.loads(report.to_json())["suggestion"]["text"] in text
    fine = sf.testing.check_laws(static, meta=NEVER, laws=LAWS[:1], max_examples=4)
    assert str(fine).startswith("static: all 1 checks hold (seed 0, 4 examples, ")


def test_what_no_declaration_mends_is_shown():
    make, _, check, _ = PLANTED["global generator"]
    text = str(sf.testing.check_laws(make, meta=NEVER, laws=LAWS[4:5], suggest=True))
    assert (
        f"Whatever is declared, this fails:\ndraws breaks purity, {check}: init reads"
        in text
    )
