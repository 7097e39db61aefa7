"""The journal of a long run: it goes on where it was ended, and says what failed."""

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest

from property_tests import million
from property_tests.million import Work, go_on, read, summary, tried, works


def works_of(bad_seed: int) -> list[Work]:
    def good(seed: int, counted: Counter[str]) -> None:
        counted.update(["cases", "ties"])

    def bad(seed: int, counted: Counter[str]) -> None:
        assert seed != bad_seed, "a count is off"

    return [Work("exact_count", "counts", "gmp", good), Work("purity", "pure", "rigl", bad)]


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ticks = tmp_path / "out" / "journal.jsonl", itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    go_on(file, 12, works_of(2))
    lines = list(read(file))
    file.write_text(file.read_text()[:-20])  # a kill
    go_on(file, 12, works_of(2))
    again = list(read(file))
    keys = [(line["check"], line["seed"]) for line in again]
    assert len(again) > len(lines) and len(set(keys)) == len(keys)
    assert {seed for _, seed in keys} == set(range(1, max(seed for _, seed in keys) + 1))
    text = "\n".join(summary(file))
    assert "| purity | 0 | 1 |" in text and '`--only "pure rigl" --seed 2`: AssertionError: a count is off' in text
    assert "ties: 100%" in text


def test_it_tries_every_check_that_binds_and_the_machine() -> None:
    found = works()
    assert len({work.key for work in found}) == len(found) > 2000
    assert {"exact_count", "resume", "state machine"} <= {work.law for work in found}
    assert "compile_is_eager" not in {work.law for work in found}
    work = next(work for work in found if work.name == "runs_resume")
    line = tried(work, 3)
    assert line["error"] is None and line["counted"]["cases"] == 10 and line == {**line, "seed": 3}
    assert million.order(found, 1) != million.order(found, 2)
